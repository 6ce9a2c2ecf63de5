"""NaN in a gradient costs its step; several in a row end the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.training.run_folder import load_tensors
from rlkv.training.trainer import RLKVTrainer
from rlkv.utils.files import read_log
from tests.helpers import random_run

Spoil = Callable[..., None]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """Makes the loss of some steps NaN or infinite."""

    def use(*steps: int, value: float = float("nan")) -> None:
        stock = RLKVTrainer._policy_loss

        def spoiled(self: RLKVTrainer, model: Any, inputs: dict[str, Any]) -> Any:
            loss, clipped = stock(self, model, inputs)
            return loss * (value if self.state.global_step + 1 in steps else 1.0), clipped

        monkeypatch.setattr(RLKVTrainer, "_policy_loss", spoiled)

    return use


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_step_changes_nothing_and_is_kept(tmp_path: Path, spoil: Spoil, value: float) -> None:
    spoil(2, value=value)
    gates = random_run.run(tmp_path / "run", ["--max_steps", "3"])
    alphas = [record["alpha"] for record in read_log(tmp_path / "run" / "gates.jsonl")]
    assert alphas[0] == alphas[1] != alphas[2]
    assert gates.alpha.isfinite().all()
    assert [
        record["train/skipped_steps"] for record in read_log(tmp_path / "run" / "log.jsonl")
    ] == [0, 1, 1]
    (file,) = (tmp_path / "run").glob("nonfinite_step_*.pt")
    assert file.name == "nonfinite_step_000002_0.pt"
    kept = load_tensors(file)
    assert {"prompt_ids", "completion_ids", "advantages"} <= set(kept["inputs"])
    assert torch.cat(kept["gates"]).flatten().tolist() == pytest.approx(
        torch.tensor(alphas[0]).flatten().tolist()
    )


def test_three_in_a_row_end_the_run_which_can_be_resumed(
    tmp_path: Path, spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = random_run.run(tmp_path / "whole")
    spoil(2, 3, 4)
    with pytest.raises(ValueError, match=r"3 steps in a row are not finite \(.*step_000004_0.pt\)"):
        random_run.run(tmp_path / "run", ["--save_steps", "100"])
    monkeypatch.undo()
    assert torch.equal(random_run.run(tmp_path / "run").alpha, expected.alpha)
