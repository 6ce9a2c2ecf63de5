"""SIGTERM during a training: the step is finished and saved, or given up after a while.

The run can be resumed.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from rlkv.training import callbacks as stopping
from rlkv.training.run_folder import last_checkpoint
from tests.helpers import random_run

NEVER = ["--save_steps", "100"]  # but at the end


class Terminate(TrainerCallback):
    """Sends SIGTERM to this process in a step, which then takes ``seconds`` longer."""

    def __init__(self, step: int, seconds: float = 0.0) -> None:
        self.step, self.seconds = step, seconds

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
            until = time.monotonic() + self.seconds
            while time.monotonic() < until:
                time.sleep(0.01)


def test_the_step_is_finished_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = random_run.run(tmp_path / "whole")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        random_run.run(tmp_path / "run", NEVER, [Terminate(2)])
    assert ended.value.code == 0
    assert signal.getsignal(signal.SIGTERM) == before
    assert "after step 2: the same command goes on" in capsys.readouterr().out
    assert last_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-2"
    assert not (tmp_path / "run" / "gates.pt").exists()
    assert torch.equal(random_run.run(tmp_path / "run", NEVER).alpha, expected.alpha)


def test_a_long_step_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stopping, "GRACE", 0.1)
    before = signal.getsignal(signal.SIGTERM)
    started = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        random_run.run(tmp_path / "run", [], [Terminate(3, seconds=60)])
    signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 0
    assert time.monotonic() - started < 60
    assert "within a step" in capsys.readouterr().out
    assert last_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-2"


def test_in_the_last_step_the_run_ends_as_usual(tmp_path: Path) -> None:
    gates = random_run.run(tmp_path / "run", NEVER, [Terminate(5)])
    assert gates.training["steps"] == 5
    assert (tmp_path / "run" / "gates.pt").exists()
