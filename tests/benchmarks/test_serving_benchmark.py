"""The serving benchmark without an engine: requests, pools, what to expect, order of runs, resume, tables."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.benchmarks import serving_benchmark
from rlkv.benchmarks.serving_benchmark import FULL, claim, plan_runs, run_benchmark, settings_of, summarize
from rlkv.benchmarks.serving_report import markdown_page, plot_results
from rlkv.benchmarks.serving_workload import (
    LIMITED,
    LLAMA8B,
    ROOMY,
    SETTINGS,
    SMALL,
    LlamaShape,
    Workload,
    expect,
    theoretical_speedup,
)
from rlkv.gates.head_gates import HeadGates
from tests.helpers.paths import ROOT

TINY = Workload(
    LlamaShape(3, 64, 96, 4, 2, 16, 100),
    requests=9,
    mean_output=50,
    max_output=130,
    pool_tokens=210,
    prompt_tokens=(3, 7),
)


@pytest.mark.parametrize("work", [TINY, SMALL, LLAMA8B], ids=["tiny", "small", "llama8b"])
def test_lengths_have_the_stated_mean_and_bounds(work: Workload) -> None:
    lengths = work.output_lengths
    assert len(lengths) == work.requests
    assert min(lengths) >= 1
    assert max(lengths) <= work.max_output
    # lengths are whole numbers: their mean is met up to one token in all
    assert sum(lengths) / len(lengths) == pytest.approx(work.mean_output, abs=1 + 1e-3 * work.mean_output)
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
        ({"mean_output": 130}, "below the longest one of 130"),
        ({"pool_tokens": 136}, "smaller than one request of 137 tokens"),
        ({"prompt_tokens": (7, 3)}, "no such range"),
        ({"window": 0}, "start at 0 and 1"),
    ],
)
def test_workloads_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_theory_is_the_papers() -> None:
    found = [round(theoretical_speedup(s, 16 + 64, 3000), 2) for s in (0.2, 0.4, 0.5, 0.6)]
    assert found == [1.24, 1.64, 1.95, 2.40]
    assert theoretical_speedup(0.5, 80, 40) == 1  # nothing to save in texts that are shorter than S + W


def test_expectation_by_blocks() -> None:
    """One request of 10 + 90 tokens, blocks of 10, S=10, W=11: by hand."""
    work = replace(
        TINY, requests=1, prompt_tokens=(10, 10), mean_output=90, max_output=95, block_size=10, sink=10, window=11
    )
    assert work.output_lengths == [90]
    gates = HeadGates(torch.tensor([[1.0, 0.0]] * 3))
    evicting = expect(replace(work, budget=12, buffer=8), gates, 0.5, "rkv")
    found = expect(work, gates, 0.5)
    assert found.sparsity == 0.5
    assert found.theory == pytest.approx(1 / (0.5 + 0.5 * 21 / 100))
    # lengths 11 to 100: full heads hold 2 to 10 blocks, ten lengths each; the others at most 1 + 1 + 1
    full = sum(range(2, 11))
    assert found.by_blocks == pytest.approx(2 * full / (full + 2 + 8 * 3))
    # a block of 8 queries of 2 heads, 8 entries, and 2 of the 20 entries
    assert evicting.by_blocks == pytest.approx(2 * full / (full + 9 * 3))
    assert evicting.theory == pytest.approx(1 / (0.5 + 0.5 * 20 / 100))


def test_modes_take_turns() -> None:
    runs = plan_runs((LIMITED, ROOMY), (0.5,), 2)
    assert [run.mode for run in runs] == [FULL, "sparsity 0.5"] * 4
    assert [run.setting for run in runs] == [LIMITED] * 4 + [ROOMY] * 4
    assert len({run.file for run in runs}) == 8
    assert not any(" " in run.file or "," in run.file for run in runs)
    both = plan_runs((LIMITED,), (0.2, 0.5), 1, "rkv")
    assert [run.mode for run in both] == [
        FULL,
        "sparsity 0.2",
        "sparsity 0.2 + rkv",
        "sparsity 0.5",
        "sparsity 0.5 + rkv",
    ]
    with pytest.raises(ValueError, match="eviction 'h2o' is not served"):
        plan_runs((LIMITED,), (0.5,), 1, "h2o")


@pytest.mark.parametrize(
    ("settings", "sparsities", "message"),
    [
        (("small",), (0.5,), "unknown setting 'small'"),
        (SETTINGS, (0.0,), "above 0"),
        (SETTINGS, (0.5, 0.5), "each once"),
    ],
)
def test_runs_that_cannot_be(settings: tuple[str, ...], sparsities: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_runs(settings, sparsities, 1)


def result(speed: float, steps: int, pool: int = 1000) -> dict[str, Any]:
    """What a process writes."""
    figures = {
        "tokens_per_second": speed,
        "steps": steps,
        "mean_running": 2.5,
        "preemptions": 3,
        "bytes_per_token": 80.0,
    }
    times = {"ttft": [1.0, 2.0, 3.0], "latency": [4.0, 5.0, 6.0]}
    return {**figures, **times, "pool_bytes": pool, "pool_tokens": 77, "block_bytes": 10}


class FakeProcesses:
    """In the place of ``subprocess.run``: writes the next of ``results``, or fails."""

    def __init__(self, results: list[dict[str, Any] | str]) -> None:
        self.results, self.tasks = results, []

    def __call__(self, command: list[str], stdout: Any, **kwargs: Any) -> Any:
        self.tasks.append(json.loads(Path(command[-2]).read_text()))
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
    monkeypatch.setattr(subprocess, "run", fake)
    gates, runs = TINY.random_gates(), plan_runs((LIMITED,), (0.5,), 2)
    with pytest.raises(ValueError, match=r"memory-limited.*sparsity 0.5.*ValueError: no memory; its output is in"):
        run_benchmark(TINY, gates, runs, tmp_path)
    assert len(fake.tasks) == 4
    results = run_benchmark(TINY, gates, runs, tmp_path)
    assert len(fake.tasks) == 5  # the three that were done are not repeated
    assert [task["rlkv"] is None for task in fake.tasks] == [True, False, True, False, False]
    assert fake.tasks[1]["rlkv"]["sparsity"] == 0.5
    assert HeadGates.load(fake.tasks[1]["rlkv"]["gates"]) == gates
    assert {task["setting"] for task in fake.tasks} == {LIMITED}

    full, half = summarize(TINY, gates, results)
    assert full["speedup"] == full["step_ratio"] == [1, 1, 1]
    assert half["speedup"] == [1.75, 1.5, 2.0]
    assert half["step_ratio"] == pytest.approx([1.8, 1.6, 2.0])
    assert half["tokens_per_second"] == [155, 150, 160]
    assert (half["ttft_p50"][0], half["latency_p90"][0]) == (2.0, pytest.approx(5.8))
    assert half["expected"]["theory"] == expect(TINY, gates, 0.5).theory

    evicted = {**half, "mode": "sparsity 0.5 + rkv", "eviction": "rkv"}
    page = markdown_page(TINY, [full, half, evicted])
    assert "| sparsity 0.5 + rkv | 155.0" in page
    assert "| sparsity 0.5 | 155.0 [150.0, 160.0] | 1.75 [1.50, 2.00] |" in page
    assert f"{TINY.pool_bytes(LIMITED):,} bytes" in page
    plot_results([full, half, evicted], "a title", str(tmp_path / "found.png"))
    assert (tmp_path / "found.png").stat().st_size > 5000


def test_pools_must_be_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, four_results: list[dict[str, Any] | str]
) -> None:
    four_results[3] = result(160, 25, pool=1010)  # by a whole block of the full cache
    monkeypatch.setattr(subprocess, "run", FakeProcesses(four_results))
    results = run_benchmark(TINY, TINY.random_gates(), plan_runs((LIMITED,), (0.5,), 2), tmp_path)
    with pytest.raises(ValueError, match="a pool of 1,010 bytes, but one of 1,000"):
        summarize(TINY, TINY.random_gates(), results)


def test_a_folder_keeps_to_its_settings(tmp_path: Path) -> None:
    settings = settings_of(TINY, TINY.random_gates())
    claim(tmp_path, settings)
    claim(tmp_path, settings)
    for change, what in ((replace(TINY, rows=3), "workload"), (replace(TINY, seed=5), "workload and gates")):
        with pytest.raises(ValueError, match=f"runs with another {what}: choose"):
            claim(tmp_path, settings_of(change, change.random_gates()))


def test_gates_must_fit_the_shape() -> None:
    serving_benchmark.check_gates(TINY, TINY.random_gates())
    with pytest.raises(ValueError, match="gates of 3 x 2 heads, the model has 2 x 8"):
        serving_benchmark.check_gates(SMALL, TINY.random_gates())


def test_the_program_names_a_missing_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = ROOT / "inference" / "benchmark.py"
    monkeypatch.setattr("rlkv.benchmarks.serving_benchmark.installed_version", lambda: None)
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "serving", "--output-dir", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(program), run_name="__main__")
    assert exit_info.value.code == 2
    assert capsys.readouterr().err.strip() == "error: vLLM is not installed: pip install 'rlkv[vllm]'"
    assert not (tmp_path / "out").exists()
