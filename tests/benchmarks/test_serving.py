"""The serving benchmark without an engine: requests, pools, what to expect, order of runs, resume,
tables.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.benchmarks.common import write_result
from rlkv.benchmarks.serving import ServingConfig, do_runs, summarize
from rlkv.benchmarks.serving_page import serving_page, serving_plot
from rlkv.benchmarks.workload import (
    LIMITED,
    PERCENTILES,
    ROOMY,
    Workload,
    expect,
    theoretical_speedup,
)
from rlkv.cli.app import parse
from rlkv.cli.jobs import bench_main as main
from rlkv.evaluation.report import FULL_CACHE
from rlkv.gates.head_gates import HeadGates

TINY = Workload(
    layers=3,
    hidden=64,
    intermediate=96,
    query_heads=4,
    kv_heads=2,
    head_dim=16,
    vocabulary=100,
    requests=9,
    mean_output=50,
    max_output=130,
    pool_tokens=210,
    prompt_tokens=(3, 7),
)
SMALL, LLAMA8B = Workload(), parse(ServingConfig, arguments=["--config", "bench_llama8b"])


def serving(**options: Any) -> ServingConfig:
    return ServingConfig(
        **{**vars_of(TINY), "settings": (LIMITED,), "sparsities": (0.5,), "rounds": 2, **options}
    )


def vars_of(work: Workload) -> dict[str, Any]:
    return {field.name: getattr(work, field.name) for field in fields(work)}


@pytest.mark.parametrize("work", [TINY, SMALL, LLAMA8B], ids=["tiny", "small", "llama8b"])
def test_lengths_have_the_stated_mean_and_bounds(work: Workload) -> None:
    lengths = work.output_lengths
    assert len(lengths) == work.requests
    assert min(lengths) >= 1
    assert max(lengths) <= work.max_output
    # lengths are whole numbers: their mean is met up to one token in all
    assert sum(lengths) / len(lengths) == pytest.approx(
        work.mean_output, abs=1 + 1e-3 * work.mean_output
    )
    assert len(set(lengths)) > work.requests / 2
    assert lengths == replace(work, sink=work.sink + 1).output_lengths
    assert lengths != replace(work, seed=1).output_lengths


def test_prompts_are_the_same_everywhere_and_of_the_stated_lengths() -> None:
    again = Workload.from_dict(json.loads(json.dumps(TINY.to_dict())))
    assert again == TINY
    assert again.prompts == TINY.prompts
    assert {3, 7} >= {min(map(len, TINY.prompts)), max(map(len, TINY.prompts))}
    assert all(3 <= token < 100 for prompt in TINY.prompts for token in prompt)
    assert TINY.mean_length == (sum(map(len, TINY.prompts)) + sum(TINY.output_lengths)) / 9


def test_the_pool_is_counted_in_blocks_of_the_full_cache() -> None:
    assert TINY.bytes_per_token == 2 * 3 * 2 * 16 * 4
    assert TINY.pool_bytes(LIMITED) == (7 + 1) * 32 * TINY.bytes_per_token
    # eight requests of 137 tokens need five blocks each
    assert TINY.pool_bytes(ROOMY) >= 8 * 5 * 32 * TINY.bytes_per_token
    assert (TINY.rows_of(LIMITED), TINY.rows_of(ROOMY)) == (64, 8)
    assert LLAMA8B.bytes_per_token == 131072


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean_output": 130}, "--mean-output"),
        ({"pool_tokens": 136}, "--pool-tokens.* 137 tokens"),
        ({"prompt_tokens": (7, 3)}, "--prompt-tokens"),
        ({"window": 0}, "--window"),
        ({"dtype": "float8"}, "--dtype"),
    ],
)
def test_workloads_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change).check()


def test_theory_is_the_papers() -> None:
    found = [round(theoretical_speedup(s, 16 + 64, 3000), 2) for s in (0.2, 0.4, 0.5, 0.6)]
    assert found == [1.24, 1.64, 1.95, 2.40]
    assert (
        theoretical_speedup(0.5, 80, 40) == 1
    )  # nothing to save in texts that are shorter than S + W


def test_expectation_by_blocks() -> None:
    """One request of 10 + 90 tokens, blocks of 10, S=10, W=11: by hand."""
    work = replace(
        TINY,
        requests=1,
        prompt_tokens=(10, 10),
        mean_output=90,
        max_output=95,
        block_size=10,
        sink=10,
        window=11,
    )
    assert work.output_lengths == [90]
    gates = HeadGates(torch.tensor([[1.0, 0.0]] * 3))
    evicting = expect(replace(work, budget=12, buffer=8), gates, 0.5, "rkv")
    found = expect(work, gates, 0.5)
    assert found["sparsity"] == 0.5
    assert found["theory"] == pytest.approx(1 / (0.5 + 0.5 * 21 / 100))
    # lengths 11 to 100: full heads hold 2 to 10 blocks, ten lengths each; the others at most 1 + 1
    # + 1
    full = sum(range(2, 11))
    assert found["by_blocks"] == pytest.approx(2 * full / (full + 2 + 8 * 3))
    # a block of 8 queries of 2 heads, 8 entries, and 2 of the 20 entries
    assert evicting["by_blocks"] == pytest.approx(2 * full / (full + 9 * 3))
    assert evicting["theory"] == pytest.approx(1 / (0.5 + 0.5 * 20 / 100))


def test_modes_take_turns() -> None:
    runs = serving(settings=(LIMITED, ROOMY)).runs()
    assert [run.mode for run in runs] == [FULL_CACHE, "sparsity 0.5"] * 4
    assert [run.setting for run in runs] == [LIMITED] * 4 + [ROOMY] * 4
    assert len({(run.setting, run.mode, run.round) for run in runs}) == 8
    both = serving(sparsities=(0.2, 0.5), rounds=1, eviction="rkv").runs()
    assert [run.mode for run in both] == [
        FULL_CACHE,
        "sparsity 0.2",
        "sparsity 0.2 + rkv",
        "sparsity 0.5",
        "sparsity 0.5 + rkv",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": ("small",)}, "--settings 'small'"),
        ({"sparsities": (0.0,)}, "--sparsities 0"),
        ({"sparsities": (0.5, 0.5)}, "--sparsities 0.5 0.5"),
        ({"eviction": "h2o"}, "--eviction 'h2o'"),
        ({"rounds": 0}, "--rounds"),
    ],
)
def test_runs_that_cannot_be(change: dict[str, Any], message: str) -> None:
    serving().check()
    with pytest.raises(ValueError, match=message):
        serving(**change).check()


def result(speed: float, steps: int, pool: int = 1000) -> dict[str, Any]:
    """What a process writes."""
    figures = {
        "tokens_per_second": speed,
        "steps": steps,
        "mean_running": 2.5,
        "preemptions": 3,
        "bytes_per_token": 80.0,
    }
    times = {
        f"{name}_p{share}": float(share) for name in ("ttft", "latency") for share in PERCENTILES
    }
    return {**figures, **times, "pool_bytes": pool, "pool_tokens": 77, "block_bytes": 10}


class FakeProcesses:
    """In the place of ``subprocess``: ``run`` writes the next of ``results``, or fails."""

    STDOUT = subprocess.STDOUT

    def __init__(self, results: list[dict[str, Any] | str]) -> None:
        self.results, self.tasks, self.gates = results, [], []

    def run(self, command: list[str], stdout: Any, **kwargs: Any) -> Any:
        self.tasks.append(json.loads(Path(command[-2]).read_text()))
        self.gates.append(HeadGates.load(Path(self.tasks[-1]["model"]) / "gates.safetensors"))
        done = self.results.pop(0)
        if isinstance(done, str):
            stdout.write(f"INFO starts\n(worker) ValueError: {done}\n")
            stdout.flush()
            return subprocess.CompletedProcess(command, 1)
        Path(command[-1]).write_text(json.dumps(done))
        return subprocess.CompletedProcess(command, 0)


@pytest.fixture
def four_results() -> list[dict[str, Any] | str]:
    return [result(100, 40), result(150, 20), result(80, 40), result(160, 25)]


def test_runs_are_resumed_and_compared_within_their_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, four_results: list[dict[str, Any] | str]
) -> None:
    fake = FakeProcesses([*four_results[:3], "no memory", four_results[3]])
    monkeypatch.setattr("rlkv.benchmarks.serving.subprocess", fake)
    config = serving(output_dir=tmp_path)
    gates = config.head_gates()
    with pytest.raises(ValueError, match=r"memory-limited.*0.5.*no memory"):
        do_runs(config, gates)
    assert len(fake.tasks) == 4
    results = do_runs(config, gates)
    assert len(fake.tasks) == 5  # the three that were done are not repeated
    assert [task["rlkv"] is None for task in fake.tasks] == [True, False, True, False, False]
    assert fake.tasks[1]["rlkv"]["sparsity"] == 0.5
    assert fake.gates == [gates] * 5
    assert {task["setting"] for task in fake.tasks} == {LIMITED}

    full, half = summarize(TINY, gates, results)
    assert full["speedup"] == full["step_ratio"] == [1, 1, 1]
    assert half["speedup"] == [1.75, 1.5, 2.0]
    assert half["step_ratio"] == pytest.approx([1.8, 1.6, 2.0])
    assert half["tokens_per_second"] == [155, 150, 160]
    assert (half["ttft_p50"], half["latency_p90"]) == ([50.0] * 3, [90.0] * 3)
    assert half["expected"]["theory"] == expect(TINY, gates, 0.5)["theory"]

    evicted = {**half, "mode": "sparsity 0.5 + rkv", "eviction": "rkv"}
    page = serving_page(TINY, [full, half, evicted])
    text = page.markdown()
    assert "| sparsity 0.5 + rkv | 155.0" in text
    assert "| sparsity 0.5 | 155.0 [150.0, 160.0] | 1.75 [1.50, 2.00] |" in text
    assert f"{TINY.pool_bytes(LIMITED):,} bytes" in text
    rows = [full, half, evicted]
    write_result(
        tmp_path, "found", "a title", config, rows, page, serving_plot(rows), versions={"vllm": "1"}
    )
    assert (tmp_path / "found.png").stat().st_size > 5000
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["config"]["sparsities"], found["versions"]["vllm"], len(found["results"])) == (
        [0.5],
        "1",
        3,
    )


def test_pools_must_be_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, four_results: list[dict[str, Any] | str]
) -> None:
    four_results[3] = result(160, 25, pool=1010)  # by a whole block of the full cache
    monkeypatch.setattr("rlkv.benchmarks.serving.subprocess", FakeProcesses(four_results))
    results = do_runs(serving(output_dir=tmp_path), TINY.random_gates())
    with pytest.raises(ValueError, match=r"memory-limited.*1,010.*1,000"):
        summarize(TINY, TINY.random_gates(), results)


def test_a_folder_keeps_to_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, four_results: list[dict[str, Any] | str]
) -> None:
    monkeypatch.setattr(
        "rlkv.benchmarks.serving.subprocess",
        FakeProcesses([*four_results, result(90, 40), result(160, 25)]),
    )
    config = serving(output_dir=tmp_path)
    do_runs(config, config.head_gates())
    for change, what in (({"rows": 3}, "workload.rows"), ({"seed": 5}, "gates, workload.seed")):
        other = serving(output_dir=tmp_path, **change)
        with pytest.raises(ValueError, match=what):
            do_runs(other, other.head_gates())
    fresh = serving(output_dir=tmp_path, rows=3, rounds=1, fresh=True)
    assert len(do_runs(fresh, fresh.head_gates())) == 2


def test_gates_must_fit_the_shape(tmp_path: Path) -> None:
    TINY.random_gates().save(tmp_path / "gates.pt")
    assert serving(gates=str(tmp_path / "gates.pt")).head_gates() == TINY.random_gates()
    with pytest.raises(ValueError, match=r"3 x 2.*2 x 8"):
        ServingConfig(gates=str(tmp_path / "gates.pt")).head_gates()


def test_the_program_names_a_missing_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlkv.vllm.plugin.installed_version", lambda: None)
    monkeypatch.setattr(
        sys, "argv", ["rlkv-bench", "serving", "--output-dir", str(tmp_path / "out")]
    )
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    assert (
        capsys.readouterr().err.strip() == "error: vLLM is not installed: pip install 'rlkv[vllm]'"
    )
    assert not (tmp_path / "out").exists()
