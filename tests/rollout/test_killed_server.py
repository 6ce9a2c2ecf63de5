"""A rollout server that is really killed while it samples; ``kill_server.py --kills 10`` does more of the same."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

from tests.helpers.paths import ROOT

PROGRAM = "tests.helpers.kill_server"


def test_training_outlives_its_rollout_server() -> None:
    engine = "vllm" if importlib.util.find_spec("vllm") else "hf"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM, "--kills", "1", "--steps", "2", "--engine", engine],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kills in as many rollouts, 2 steps, no prompt lost" in done.stdout
