"""GRPO that starts from a gates file: the start is respected, recorded, checked, and a resumed run
is tied to it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlkv.cli.train import parse_config
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from tests.helpers import random_run

START = torch.tensor([[0.0, 0.3, 0.6, 1.0], [0.2, 0.4, 0.8, 0.5]])


def save_start(path: Path, alpha: torch.Tensor = START) -> str:
    model, _ = random_run.make_policy()
    facts = {"method": "trace_distillation", "steps": 7}
    HeadGates(alpha=alpha, model=ModelShape.from_config(model.config), training=facts).save(path)
    return str(path)


def test_training_starts_there_and_says_so(tmp_path: Path) -> None:
    start = save_start(tmp_path / "start.pt")
    gates = random_run.run(
        tmp_path / "run", ["--init_gates", start, "--max_steps", "1", "--learning_rate", "0.001"]
    )
    # AdamW's first step moves a gate by the learning rate at most, plus the weight decay of 0.017 *
    # 0.001
    assert (gates.alpha - START).abs().max() < 0.00102
    assert not torch.equal(gates.alpha, START)
    facts = gates.training["init_gates"]
    assert (facts["method"], facts["steps"]) == ("trace_distillation", 7)
    assert str(tmp_path) not in json.dumps(gates.training)


def test_without_it_gates_start_at_one(tmp_path: Path) -> None:
    gates = random_run.run(tmp_path / "run", ["--max_steps", "1", "--learning_rate", "0.001"])
    assert gates.alpha.min() > 0.998
    assert gates.training["init_gates"] is None


def test_a_resumed_run_is_tied_to_the_values_not_to_the_path(tmp_path: Path) -> None:
    start = save_start(tmp_path / "start.pt")
    whole = random_run.run(tmp_path / "whole", ["--init_gates", start, "--max_steps", "3"])
    random_run.run(tmp_path / "run", ["--init_gates", start, "--max_steps", "2"])
    other = save_start(tmp_path / "other.pt", START.flip(0))
    for options in (["--init_gates", other], []):
        with pytest.raises(ValueError, match=r"\(init_gates"):
            random_run.run(tmp_path / "run", [*options, "--max_steps", "3"])
    moved = save_start(tmp_path / "moved.safetensors")
    assert random_run.run(tmp_path / "run", ["--init_gates", moved, "--max_steps", "3"]) == whole


def test_what_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    save_start(tmp_path / "start.pt")
    HeadGates(alpha=torch.ones(3, 4)).save(tmp_path / "others.pt")
    with pytest.raises(ValueError, match=r"others\.pt.*3 layers"):
        random_run.run(tmp_path / "run", ["--init_gates", str(tmp_path / "others.pt")])
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"init_gates and init_value=0.5"):
        parse_config(
            [
                "--finder",
                "rlkv",
                "--init_gates",
                "start.pt",
                "--init_value",
                "0.5",
                "--use_cpu",
                "true",
            ]
        )
