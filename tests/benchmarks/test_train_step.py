"""The benchmark of a training step at a small size: its rows, and that another model gets no ratio."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlkv.benchmarks import train_step
from rlkv.benchmarks.train_step import measure_train_step, run_train_step
from rlkv.benchmarks.train_step_config import TrainStepConfig
from rlkv.training.head_gate import HeadGateConfig
from tests.helpers.models import TOY_LLAMA

SIZES: dict[str, Any] = {"rounds": 2, "sink": 2, "window": 6, **TOY_LLAMA, "device": "cpu"}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_row_for_each_length_and_model(checkpointing: bool) -> None:
    rows = measure_train_step(TrainStepConfig(lengths=(8, 20), checkpointing=checkpointing, **SIZES))
    assert [(row["tokens"], row["model"]) for row in rows] == [
        (n, name) for n in (8, 20) for name in ("stock", "gates")
    ]
    for row in rows:
        assert row["error"] < 1e-5
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert (row["over_stock"] == 1) == (row["model"] == "stock")
        assert row["peak_bytes"] > 0


def test_another_model_gets_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_step, "set_gates", lambda model, gates: None)  # they stay where training starts them
    monkeypatch.setattr(train_step, "HeadGateConfig", partial(HeadGateConfig, init_value=0.5))
    rows = measure_train_step(TrainStepConfig(lengths=(20,), **SIZES))
    assert all("over_stock" not in row for row in rows)
    assert rows[1]["note"].startswith("gates of 1 are not the stock model")


def test_files_are_written(tmp_path: Path) -> None:
    run_train_step(TrainStepConfig(lengths=(8,), output_dir=tmp_path, **SIZES))
    assert {file.name for file in tmp_path.iterdir()} == {"train-step.json", "train-step.md", "train-step.png"}


def test_a_text_of_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="--lengths 1"):
        TrainStepConfig(lengths=(1,)).check()
