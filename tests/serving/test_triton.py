"""The kernels of the CUDA path, interpreted: programs in processes of their own, which print the largest errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")


@pytest.mark.parametrize(("program", "steps"), [("mixed_triton.py", 2), ("evicting_triton.py", 16)])
def test_the_triton_path_equals_the_torch_path(program: str, steps: int) -> None:
    command = [sys.executable, str(Path(__file__).with_name(program))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    errors = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("max error")]
    assert len(errors) == steps
    assert max(errors) < 2e-6  # float32 sums of at most 300 terms of size ~1
