"""Training that is really killed, a few times; ``kill_training.py --kills 20`` does more of the same."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.helpers.paths import ROOT

PROGRAM = "tests.helpers.kill_training"


def test_killed_runs_end_like_uninterrupted_ones() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM, "--kills", "3", "--seed", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills" in done.stdout
