"""What is compared of two training runs, on folders that are written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlkv.cli.train import parse_config
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from tests.helpers.programs import load_program

PROGRAM = load_program("rollout/compare_rollouts.py")
SHAPE = ModelShape("tiny", "llama", 2, 3, 6, 8)


def write_run(
    folder: Path, alphas: list[torch.Tensor], rewards: list[float], seconds: list[float]
) -> Path:
    folder.mkdir()
    logs = zip(alphas, rewards, seconds, strict=True)
    records = [
        {
            "step": step,
            "reward/mean": reward,
            "response/length_mean": 9.0,
            "rollout/logprob_diff_max": step * 1e-6,
            "time/rollout_s": second,
            "time/update_s": 2 * second,
            "time/step_s": 3 * second,
            "time/step_cpu_s": 4 * second,
        }
        for step, (_, reward, second) in enumerate(logs, start=1)
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    gates = [{"step": step, "alpha": alpha.tolist()} for step, alpha in enumerate(alphas, start=1)]
    (folder / "gates.jsonl").write_text("".join(json.dumps(r) + "\n" for r in gates))
    rank = torch.stack(alphas).mean(0)
    HeadGates(alpha=alphas[-1], mean_alpha=rank, model=SHAPE, sink=2, window=6).save(
        folder / "gates.safetensors"
    )
    return folder


def test_the_trainings_command_is_understood(tmp_path: Path) -> None:
    config = PROGRAM.CompareConfig(output=tmp_path)
    words = PROGRAM.training_options(config, "hf", 3, tmp_path / "problems.jsonl", tmp_path)
    settings, args = parse_config(words)
    assert (settings.rollout, args.seed, args.use_cpu) == ("hf", 3, True)


def test_ranking_lengths_and_seconds_of_two_runs(tmp_path: Path) -> None:
    base = torch.arange(6.0).view(2, 3) / 6
    swapped = base.clone()
    swapped[0, 0], swapped[1, 2] = base[1, 2], base[0, 0]
    first = write_run(tmp_path / "a", [base] * 4, [0.5, 0.6, 0.7, 0.8], [9.0, 1.0, 3.0, 2.0])
    second = write_run(tmp_path / "b", [swapped] * 4, [0.5, 0.6, 0.9, 0.8], [90.0, 4.0, 4.0, 4.0])
    found = PROGRAM.compare(first, second)
    assert found["spearman"] == pytest.approx(
        1 - 6 * 2 * 25 / (6 * 35)
    )  # two heads, five ranks apart
    assert found["final_difference"] == pytest.approx(5 / 6)
    assert found["steps"] == 4
    assert found["reward"] == pytest.approx([0.65, 0.7])
    seconds = {
        "rollout": 2.0,
        "update": 4.0,
        "step": 6.0,
        "step_cpu": 8.0,
    }  # the first step does not count
    assert found["seconds"][0] == seconds
    assert found["logprob_diff_max"] == [4e-6, 4e-6]
    assert PROGRAM.compare(first, first)["spearman"] == pytest.approx(1.0)
    table = PROGRAM.table_page({7: found}).markdown()
    seconds = "2.00, 4.00, 8.00 | 4.00, 8.00, 16.00"
    assert f"| 7 | -0.429 | 8.3e-01 | 0.650 and 0.700 | 4.0e-06 | {seconds} |" in table


def test_a_run_of_one_step_is_refused(tmp_path: Path) -> None:
    base = torch.rand(2, 3)
    run = write_run(tmp_path / "a", [base], [0.5], [1.0])
    with pytest.raises(ValueError, match="two steps"):
        PROGRAM.compare(run, run)
