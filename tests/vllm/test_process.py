"""The engine in a process of its own: gates reach it, and its samples are right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.helpers.paths import ROOT
from tests.helpers.vllm_models import TOLERANCE

PROGRAM = "tests.helpers.engine_process"


@pytest.mark.skipif(
    "rlkv" not in entry_points(group="vllm.general_plugins").names,
    reason="rlkv is not installed with its entry point",
)
def test_gates_reach_an_engine_in_another_process(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", PROGRAM, str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        command, cwd=ROOT, text=True, env=environment, start_new_session=True, **pipes
    ) as process:
        try:
            out, messages = process.communicate(timeout=280)
        finally:
            with suppress(
                ProcessLookupError
            ):  # the engine's process outlives a parent that was killed
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, messages[-3000:]
    errors = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("max error")]
    assert len(errors) == 2
    assert max(errors) < TOLERANCE
