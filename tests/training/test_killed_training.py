"""Training on two processes that is really killed, a few times.

``kill_training.py --kills 50`` does more of it.
"""

from __future__ import annotations

import pytest

from tests.helpers import warm
from tests.helpers.paths import ROOT

PROGRAM = "tests.helpers.kill_training"


@pytest.mark.timeout(900)
def test_killed_runs_end_like_uninterrupted_ones() -> None:
    done = warm.run(
        ["-m", PROGRAM, "--kills", 3, "--steps", 6, "--processes", 2, "--seed", 1],
        ROOT,
        timeout=840,
        TOKENIZERS_PARALLELISM="false",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills" in done.stdout
