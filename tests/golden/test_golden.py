"""What user-visible commands give stays as recorded; ``python -m tests.golden.record`` records it again.

A difference that is wanted is recorded, and named in CHANGELOG.md.  Tolerances are ``TOLERANCE`` of
``tests/golden/record.py``: what rounding changes between one thread and two, or two processors, is far below.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.golden.compare import differences
from tests.golden.record import TOLERANCE
from tests.helpers.paths import ROOT

FILES = ("api", "files", "gates", "logs", "options", "results", "texts")
# --plan and the filter say which engine there is
pytestmark = pytest.mark.skipif(
    find_spec("trl") is None or find_spec("vllm") is not None, reason="recorded in the environment of make venv"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a new record; a process of its own, since other tests change what libraries hold."""
    folder = tmp_path_factory.mktemp("golden")
    command = [sys.executable, "-m", "tests.golden.record", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FILES)
def test_it_gives_what_is_recorded(name: str, found: Path) -> None:
    recorded, new = (json.loads((folder / f"{name}.json").read_text()) for folder in (Path(__file__).parent, found))
    changed = list(differences(recorded, new, TOLERANCE.get(name, 0), name))
    assert not changed, "\n" + "\n".join(changed)
