"""What user-visible commands give stays as recorded.

A difference that is wanted is recorded again with ``python -m tests.golden.record``, and named in
CHANGELOG.md.  Between one thread and two, only logged figures differ, by less than 1e-5; the
tolerances in ``tests/golden/record.py`` leave room for other processors.
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
# the text of --plan says which engine there is
recorded_here = find_spec("trl") and find_spec("wandb") and not find_spec("vllm")
pytestmark = pytest.mark.skipif(not recorded_here, reason="recorded without vLLM, with W&B")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a new record in a process of its own: other tests change the state of libraries."""
    folder = tmp_path_factory.mktemp("golden")
    command = [sys.executable, "-m", "tests.golden.record", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FILES)
def test_it_gives_what_is_recorded(name: str, found: Path) -> None:
    recorded = json.loads((Path(__file__).parent / f"{name}.json").read_text())
    new = json.loads((found / f"{name}.json").read_text())
    changed = list(differences(recorded, new, TOLERANCE.get(name, 0), name))
    if changed:
        pytest.fail("\n".join(["not as recorded:", *changed]), pytrace=False)
