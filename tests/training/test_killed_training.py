"""Training that is really killed, a few times; ``kill_training.py --kills 20`` does more of the same."""

from __future__ import annotations

from tests.helpers import warm
from tests.helpers.paths import ROOT

PROGRAM = "tests.helpers.kill_training"


def test_killed_runs_end_like_uninterrupted_ones() -> None:
    done = warm.run(["-m", PROGRAM, "--kills", 3, "--seed", 1], ROOT, TOKENIZERS_PARALLELISM="false")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills" in done.stdout
