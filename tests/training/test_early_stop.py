"""Training ends when the full heads have stayed the same.

A run that has ended so does not go on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlkv.training.callbacks import StopWhenStable
from rlkv.utils.files import read_log
from tests.helpers import random_run
from tests.helpers.gates import make_gates

START = torch.tensor([[0.9, 0.1], [0.6, 0.4]])


def follow(
    alphas: list[torch.Tensor], sparsities: list[float], steps: int, moving: bool = True
) -> list[int]:
    """``unchanged`` after every step until the callback stops the training; ``moving``: gates
    shrink at every step.
    """
    base, now = make_gates(alpha=START, mean_alpha=START, model=None), [START]
    callback = StopWhenStable(
        lambda: replace(base, alpha=now[0], mean_alpha=now[0]), sparsities, steps
    )
    counts = []
    for step, alpha in enumerate(alphas, start=1):
        now[0] = alpha * (1 - 1e-3 * step) if moving else alpha
        control = SimpleNamespace(should_save=False, should_training_stop=False)
        callback.on_step_end(
            None, SimpleNamespace(global_step=step, max_steps=len(alphas)), control
        )
        counts.append(callback.unchanged)
        assert control.should_save == control.should_training_stop
        if control.should_training_stop:
            break
    return counts


def test_only_a_change_of_the_full_heads_counts() -> None:
    swapped = START[:, [1, 0]]
    assert follow(
        [START, START / 2, swapped, swapped, swapped * 0.9, swapped, swapped, swapped], [0.5], 3
    ) == [*[0, 1, 0, 1, 2, 3]]
    # the order of the others may change
    other = torch.tensor([[0.6, 0.4], [0.9, 0.1]])
    assert follow([START, other, START, other], [0.5], 2) == [0, 1, 2]
    assert follow([START, other, START, other], [0.5, 0.25], 2) == [0, 0, 0, 0]


def test_steps_that_leave_the_gates_as_they_are_do_not_count() -> None:
    assert follow([START, START, START / 2, START / 2, START], [0.5], 2, moving=False) == [
        0,
        0,
        1,
        1,
        2,
    ]


def test_gates_that_are_equal_decide_nothing() -> None:
    assert follow([torch.ones(2, 2)] * 5, [0.5], 2) == [0] * 5
    # equal among the full heads and among the others is another thing
    assert follow([torch.tensor([[1.0, 0.0], [1.0, 0.0]])] * 5, [0.5], 2) == [0, 1, 2]


def test_a_run_stops_and_says_so_and_is_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max_steps", "40", "--learning_rate", "0.2", "--save_steps", "100"]
    early = ["--target_sparsity", "0.5", "--stable_steps", "3"]
    gates = random_run.run(tmp_path / "early", [*options, *early])
    last = gates.training["steps"]
    assert 4 <= last < 40
    assert (
        f"stopped after step {last} of 40: the full heads at sparsity 0.5 have been the same"
        in capsys.readouterr().out
    )
    records = read_log(tmp_path / "early" / "gates.jsonl")
    assert len(records) == last
    assert (tmp_path / "early" / "gates.pt").exists()
    again = random_run.run(tmp_path / "early", [*options, *early])
    assert len(read_log(tmp_path / "early" / "gates.jsonl")) == last
    assert torch.equal(again.alpha, gates.alpha)
    # the same steps as without it; and with a longer patience the run goes on
    longer = random_run.run(tmp_path / "early", [*options, *early[:-1], "4"])
    whole = random_run.run(
        tmp_path / "whole", [*options, "--max_steps", str(longer.training["steps"])]
    )
    assert torch.equal(longer.alpha, whole.alpha)
    assert longer.training["steps"] > last


@pytest.mark.parametrize(
    "given", [["--target_sparsity", "1.5"], ["--target_sparsity", "0.5", "--stable_steps", "-1"]]
)
def test_wrong_options(tmp_path: Path, given: list[str]) -> None:
    with pytest.raises(ValueError, match=r"target_sparsity needs|stable_steps must"):
        random_run.run(tmp_path / "run", given)
