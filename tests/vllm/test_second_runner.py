"""The engine's second model runner, the default on a GPU, with asynchronous scheduling: a process
of its own each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.vllm_models import TOLERANCE

pytest.importorskip("vllm")


def run(program: str, folder: Path) -> str:
    command = [sys.executable, "-m", "tests.helpers.second_runner", program, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_rollouts_have_the_draws_of_the_training_loop(tmp_path: Path) -> None:
    lines = run("rollouts", tmp_path).splitlines()
    errors = [float(line.split()[-1]) for line in lines if line.startswith("max error")]
    assert len(errors) == 2
    assert max(errors) < TOLERANCE


def test_head_reallocation_equals_transformers(tmp_path: Path) -> None:
    compared = [
        line for line in run("serving", tmp_path).splitlines() if line.startswith("120 tokens")
    ]
    assert len(compared) == 4  # sinks and a window, R-KV, prompts read in full, protected prompts
