"""Without an optional package the tests that need it are skipped by name, and all others are
collected.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.helpers.paths import ROOT

TESTS = (
    "tests/attention/test_branches.py",
    "tests/training/test_grpo_step.py",
    "tests/attention/test_head_gate.py",
)


def test_a_machine_without_the_packages_of_training() -> None:
    plugin = ["-p", "tests.helpers.without_packages"]
    command = [sys.executable, "-m", "pytest", *plugin, "-m", "gpu", "--collect-only", "-q", *TESTS]
    variables = {**os.environ, "WITHOUT": "trl,peft,datasets", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=variables, timeout=280
    )
    assert done.returncode == 0, done.stdout
    assert "test_a_fused_kernel_serves_groups" in done.stdout
    assert "SKIPPED [1] tests/attention/test_head_gate.py:1: peft is not installed" in done.stdout
    assert "SKIPPED [1] tests/training/test_grpo_step.py:1" in done.stdout
