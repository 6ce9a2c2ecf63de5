"""Signals to a run of two processes under torchrun: it ends everywhere, and can be resumed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from rlkv.gates.head_gates import HeadGates
from rlkv.training.run_folder import last_checkpoint
from tests.helpers import random_run, warm
from tests.helpers.paths import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_of_two_processes_survives_signals(tmp_path: Path) -> None:
    """SIGTERM to one process, SIGTERM to the launcher, kill -9 of one process.

    Each time the run is resumed.
    """
    folder = tmp_path / "run"

    def launch(fault: str) -> tuple[int, str]:
        began = time.monotonic()
        command = ["-m", "tests.helpers.torchrun", fault, folder, "--save-steps", 4]
        done = warm.run(command, ROOT, timeout=840, TOKENIZERS_PARALLELISM="false")
        print(f"{fault}: {time.monotonic() - began:.0f} s")
        left = [
            rank for rank in "01" if Path("/proc", (tmp_path / f"pid_{rank}").read_text()).exists()
        ]
        assert left == [], f"processes stay behind: {left}"
        return done.returncode, done.stdout + done.stderr

    def saved() -> str:
        newest = last_checkpoint(folder)
        return "nothing" if newest is None else newest.name

    code, text = launch("SIGTERM:2:rank")
    assert (code, saved()) == (0, "checkpoint-2"), text
    assert text.count("stopped by SIGTERM after step 2") == 2  # both processes have ended with 0
    code, text = launch("SIGTERM:3:launcher")
    assert (code, saved()) == (1, "checkpoint-3"), (
        text
    )  # the launcher says so by a traceback of its own
    assert text.count("stopped by SIGTERM after step 3") == 2
    code, text = launch("SIGKILL:5:rank")
    assert (code, saved()) == (1, "checkpoint-4"), text
    code, text = launch("none")
    assert code == 0, text
    alone = random_run.run(tmp_path / "alone", ["--per-device-train-batch-size", "16"])
    assert torch.allclose(HeadGates.load(folder / "gates.pt").alpha, alone.alpha, rtol=0, atol=1e-5)
