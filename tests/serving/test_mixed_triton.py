"""The kernels of the CUDA path, interpreted: ``mixed_triton.py`` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

PROGRAM = Path(__file__).with_name("mixed_triton.py")


def test_the_triton_path_equals_the_torch_path() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    errors = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("max error")]
    assert len(errors) == 2
    assert max(errors) < 2e-6  # float32 sums of at most 300 terms of size ~1
