"""What is compared of two training runs, on folders that are written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from rlkv.utils.files import write_jsonl
from tests.helpers.programs import load_program

PROGRAM = load_program("rollout/compare_rollouts.py")
SHAPE = ModelShape("tiny", "llama", 2, 3, 6, 8)


def write_run(folder: Path, alpha: torch.Tensor, seconds: list[float]) -> Path:
    folder.mkdir()
    records, history = [], []
    for step, second in enumerate(seconds, start=1):
        record = {"step": step, "rollout/logprob_diff_max": step * 1e-6}
        for times, name in enumerate(PROGRAM.PARTS, start=1):
            record[f"time/{name}_s"] = times * second
        records.append(record)
        history.append({"step": step, "alpha": alpha.tolist()})
    write_jsonl(folder / "log.jsonl", records)
    write_jsonl(folder / "gates.jsonl", history)
    HeadGates(alpha, model=SHAPE, sink=2, window=6).save(folder / "gates.safetensors")
    return folder


def test_ranking_and_seconds_of_two_runs(tmp_path: Path) -> None:
    base = torch.arange(6.0).view(2, 3) / 6
    swapped = base.clone()
    swapped[0, 0], swapped[1, 2] = base[1, 2], base[0, 0]
    first = write_run(tmp_path / "a", base, [9.0, 1.0, 3.0, 2.0])
    second = write_run(tmp_path / "b", swapped, [90.0, 4.0, 4.0, 4.0])
    found = PROGRAM.compare(first, second)
    # two heads, five ranks apart
    assert found["spearman"] == pytest.approx(1 - 6 * 2 * 25 / (6 * 35))
    assert found["final_difference"] == pytest.approx(5 / 6)
    assert found["steps"] == 4
    # the first step does not count
    seconds = {"rollout": 2.0, "update": 4.0, "step": 6.0, "step_cpu": 8.0}
    assert found["seconds"][0] == seconds
    assert found["logprob_diff_max"] == [4e-6, 4e-6]
    assert PROGRAM.compare(first, first)["spearman"] == pytest.approx(1.0)
    table = PROGRAM.table_page({7: found}).markdown(tmp_path)
    assert "| 7 | -0.429 | 8.3e-01 | 4.0e-06 | 2.00, 4.00, 8.00 | 4.00, 8.00, 16.00 |" in table
    short = write_run(tmp_path / "short", base, [1.0])
    with pytest.raises(ValueError, match="two steps"):
        PROGRAM.compare(short, short)
