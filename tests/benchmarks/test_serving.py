"""The serving benchmark without an engine: pools, options, comparison; and the check's command."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlkv.benchmarks import serving
from rlkv.benchmarks.serving import Mode, ServingConfig, engine_options, summarize
from rlkv.cli.app import parse
from rlkv.cli.jobs import bench_main
from rlkv.utils import runtime
from tests.helpers.exit_code import exit_code

TINY = ServingConfig(
    layers=3,
    hidden=64,
    query_heads=4,
    kv_heads=2,
    head_dim=16,
    vocabulary=100,
    prompt_tokens=5,
    output_tokens=50,
    pool_tokens=210,
    sparsities=(0.5,),
)
MODES = [Mode(), Mode(0.5), Mode(0.5, "rkv")]


def test_the_pool_is_counted_in_blocks_of_the_full_cache() -> None:
    assert TINY.pool_bytes == (7 + 1) * 32 * 2 * 3 * 2 * 16 * 4
    llama8b = parse(ServingConfig, arguments=["--config", "bench_llama8b"])
    assert llama8b.pool_bytes == (65536 + 16) * 131072


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pool_tokens": 80}, "--pool-tokens is 80: the pool must hold one request of 90 tokens"),
        ({"spread": 1.0}, "--spread 1"),
        ({"window": 0}, "--window"),
        ({"rounds": 0}, "--rounds"),
        ({"eviction": "h2o"}, "--eviction 'h2o' is not served"),
        ({"eviction": "rkv", "budget": 0}, "budget"),
        ({"sparsities": (0.5, 0.5)}, "--sparsities 0.5 0.5: give each once"),
        ({"sparsities": (0.0,)}, "--sparsities 0"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(TINY, **changes).check()


def test_modes_differ_by_the_plugin_alone(tmp_path: Path) -> None:
    options = [engine_options(TINY, mode, tmp_path) for mode in MODES]
    stock, plain, evicting = options
    assert plain[: len(stock)] == evicting[: len(stock)] == stock
    name, settings = plain[len(stock) :]
    assert name == "--additional-config"
    request = json.loads(settings)["rlkv"]
    assert (request["sparsity"], request["sink"], request["window"]) == (0.5, 4, 28)
    assert "sink" not in json.loads(evicting[-1])["rlkv"]


def test_runs_are_compared_with_the_full_cache_of_their_round() -> None:
    speeds = {"full cache": (10, 5, 20), "sparsity 0.5": (12, 10, 10)}
    runs = [
        {"mode": mode, "tokens_per_second": speed} for mode, of in speeds.items() for speed in of
    ]
    full, half = summarize(TINY, MODES[:2], runs)
    assert (full["tokens_per_second"], full["speedup"]) == (10, 1)
    figures = ("speedup", "speedup_low", "speedup_high")
    assert [half[name] for name in figures] == [1.2, 0.5, 2.0]
    # the paper's: 1 / ((1 - s) + s K / L)
    assert half["theory"] == pytest.approx(1 / (0.5 + 0.5 * 32 / 55))


def test_the_command_runs_all_modes_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []

    def run_once(config: ServingConfig, mode: Mode, folder: Path) -> dict[str, Any]:
        assert {"config.json", "tokenizer.json", "gates.safetensors"} <= set(
            file.name for file in folder.iterdir()
        )
        done.append(mode)
        return {"mode": mode.name, "tokens_per_second": 10.0}

    monkeypatch.setattr(serving, "run_once", run_once)
    monkeypatch.setattr(serving, "check_installed", lambda: None)
    options = "--sparsities 0.5 --rounds 2 --eviction rkv --output-dir"
    assert exit_code(bench_main, "rlkv-bench", "serving", *options.split(), tmp_path) == 0
    assert done == MODES * 2
    found = json.loads((tmp_path / "serving.json").read_text())
    assert [row["mode"] for row in found["results"]] == [mode.name for mode in MODES]
    assert {"vllm", "versions", "hardware", "command"} <= found.keys()
    assert (
        "| sparsity 0.5 + rkv | 10.0 | 1.00 [1.00, 1.00] |" in (tmp_path / "serving.md").read_text()
    )
    assert (tmp_path / "serving.png").stat().st_size > 5000


def test_an_engine_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "PROGRAM", "raise TypeError('no such option')")
    config = replace(TINY, output_dir=tmp_path)
    said = "the run of full cache failed: TypeError: no such option; its output is in .*run.log"
    with pytest.raises(ValueError, match=said):
        serving.run_once(config, Mode(), tmp_path)


# --- rlkv-bench check

check = partial(exit_code, bench_main, "rlkv-bench", "check")


@pytest.mark.parametrize(("options", "parts"), [("", "123"), ("--part 2", "2")])
def test_parts_run_by_pytest_and_a_failure_is_the_exit_code(
    options: str, parts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def run(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(returncode=int("part2" in " ".join(command)))

    monkeypatch.setattr(subprocess, "run", run)
    assert check(*options.split(), "--output-dir", tmp_path) == 1
    files = [str(tmp_path / f"part{part}.json") for part in parts]
    assert [command[command.index("--figures") + 1] for command in commands] == files
    for command in commands:
        tests = [Path(word) for word in command if word.endswith(".py")]
        assert tests
        assert all(test.is_file() for test in tests)


def test_all_tests_of_the_gpu_are_in_a_part() -> None:
    from rlkv.cli.jobs import CHECK_FILES

    folder = runtime.ROOT / "tests" / "gpu"
    named = [name for names in CHECK_FILES.values() for name in names]
    assert sorted(named) == sorted(file.name for file in folder.glob("test_*.py"))


def test_a_wheel_names_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runtime, "ROOT", tmp_path)
    assert check() == 2
    said = capsys.readouterr().err
    assert said.startswith("error: rlkv-bench check runs tests/gpu, which is not in the wheel: get")
