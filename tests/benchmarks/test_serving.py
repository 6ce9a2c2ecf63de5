"""The serving benchmark without an engine: pools, options, comparison; and the check's command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlkv.benchmarks import serving
from rlkv.benchmarks.engines import step_by_turns
from rlkv.benchmarks.serving import Mode, ServingConfig, engine_options, summarize
from rlkv.cli.app import parse
from rlkv.cli.jobs import bench_main
from rlkv.utils import runtime
from tests.helpers.programs import exit_code

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
        ({"sparsities": ()}, "nothing to run beside the full cache"),
        ({"ways": ("keep", "keep")}, "--ways keep keep: give each once"),
        ({"ways": ()}, "nothing to run beside the full cache"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(TINY, **changes).check()


def test_modes_differ_by_the_plugin_alone(tmp_path: Path) -> None:
    stock, plain, evicting = (engine_options(TINY, mode, tmp_path) for mode in MODES)
    assert "additional_config" not in stock
    request = plain.pop("additional_config")["rlkv"]
    assert (request["sparsity"], request["sink"], request["window"]) == (0.5, 4, 28)
    assert "sink" not in evicting.pop("additional_config")["rlkv"]
    assert plain == evicting == stock


def test_requests_are_drawn_around_their_means() -> None:
    requests = replace(TINY, requests=400, prompt_tokens=20).draw_requests()
    assert requests == replace(TINY, requests=400, prompt_tokens=20).draw_requests()
    prompts = [len(prompt) for prompt, _ in requests]
    outputs = [output for _, output in requests]
    assert (min(prompts), max(prompts), min(outputs), max(outputs)) == (8, 32, 20, 80)
    assert sum(outputs) / 400 == pytest.approx(50, rel=0.05)


class CountingEngine:
    """An engine whose requests take ``left`` steps."""

    def __init__(self, name: str, left: int, order: list[str]) -> None:
        self.name = name
        self.left = left
        self.order = order

    def has_unfinished_requests(self) -> bool:
        return self.left > 0

    def step(self) -> list[Any]:
        self.left -= 1
        self.order.append(self.name)
        texts = [SimpleNamespace(token_ids=[1, 2, 3])]
        return [SimpleNamespace(finished=self.left == 0, outputs=texts)]


def test_engines_take_a_few_steps_by_turns() -> None:
    order: list[str] = []
    engines = {"a": CountingEngine("a", 7, order), "b": CountingEngine("b", 5, order)}
    spent = step_by_turns(engines, 2)
    assert "".join(order) == "aabbbbaaaaba"
    found = {name: (own.steps, own.tokens) for name, own in spent.items()}
    assert found == {"a": (7, 3), "b": (5, 3)}


def test_runs_are_compared_with_the_full_cache_beside_them() -> None:
    runs = []
    for full, own in ((10, 12), (5, 10), (20, 10)):
        for mode, speed, steps in ((Mode(), full, 30), (Mode(0.5), own, 20)):
            found = {"mode": mode.name, "tokens_per_second": speed, "steps": steps}
            runs.append({"beside": "sparsity 0.5", **found})
    full, half = summarize(TINY, MODES[:2], runs)
    assert (full["tokens_per_second"], full["speedup"], full["fewer_steps"]) == (10, 1, 1)
    figures = ("speedup", "speedup_low", "speedup_high", "fewer_steps")
    assert [half[name] for name in figures] == [1.2, 0.5, 2.0, 1.5]
    # the paper's: 1 / ((1 - s) + s K / L)
    assert half["theory"] == pytest.approx(1 / (0.5 + 0.5 * 32 / 55))


def test_mode_keep_has_room_for_no_more_requests() -> None:
    keep = Mode(0.5, way="keep")
    runs = []
    for mode in (Mode(), keep):
        runs.append({"beside": keep.name, "mode": mode.name, "tokens_per_second": 9, "steps": 30})
    assert summarize(TINY, [keep], runs)[0]["theory"] == 1


def test_the_command_runs_each_mode_beside_the_stock_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []

    def run(command: list[str], **options: Any) -> Any:
        assert options["env"]["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        spec = json.loads(Path(command[-2]).read_text())
        folder = Path(spec["engines"]["full cache"]["model"])
        assert (folder / "config.json").exists()
        assert (folder / "gates.safetensors").exists()
        assert len(spec["requests"]) == 48
        done.append(list(spec["engines"]))
        spent = {name: {"seconds": 2.0, "steps": 10, "tokens": 90} for name in spec["engines"]}
        Path(command[-1]).write_text(json.dumps({"rounds": [spent] * spec["rounds"]}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(serving, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(serving, "check_installed", lambda: None)
    options = "--sparsities 0.5 --rounds 2 --eviction rkv --output-dir"
    assert exit_code(bench_main, "rlkv-bench", "serving", *options.split(), tmp_path) == 0
    names = [mode.name for mode in MODES]
    assert done == [[names[0], name] for name in names[1:]]
    found = json.loads((tmp_path / "serving.json").read_text())
    assert [row["mode"] for row in found["results"]] == names
    assert len(found["runs"]) == 8
    assert {"vllm", "versions", "hardware", "command"} <= found.keys()
    tokens = 90 + sum(len(prompt) for prompt, _ in ServingConfig().draw_requests())
    line = f"| sparsity 0.5 + rkv | {tokens / 2:.1f} | 1.00 [1.00, 1.00] |"
    assert line in (tmp_path / "serving.md").read_text()
    assert (tmp_path / "serving.png").stat().st_size > 5000


def test_an_engine_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "raise TypeError('no option')"]

    def run(_: Any, **options: Any) -> Any:
        return subprocess.run(command, **options)

    monkeypatch.setattr(serving, "subprocess", SimpleNamespace(run=run))
    config = replace(TINY, output_dir=tmp_path)
    said = "the run of sparsity 0.5 failed: TypeError: no option; its output is in .*run.log"
    with pytest.raises(ValueError, match=said):
        serving.run_pair(config, MODES[1], tmp_path)


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
