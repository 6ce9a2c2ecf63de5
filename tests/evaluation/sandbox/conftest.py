"""The ways in which a program can be shut in, and the programs of the tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlkv.evaluation import sandbox
from rlkv.evaluation.sandbox import Isolation, Limits, SandboxError

WAYS = {
    "bubblewrap": Isolation(bubblewrap=shutil.which("bwrap")),
    # knows neither truncation nor networks, signals and abstract sockets
    "Landlock 1": Isolation(landlock=1),
    "Landlock": Isolation(landlock=sandbox.NEWEST),
}


@pytest.fixture
def isolation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Isolation:
    """One of :data:`WAYS`, in which programs run; skipped if it does not work on this machine."""
    way = WAYS[request.param]
    if way == Isolation():
        pytest.skip("bubblewrap (bwrap) is not installed")
    try:
        sandbox._run(way, {"program": "", "tests": {}}, Limits())
    except SandboxError as error:
        pytest.skip(f"{request.param} does not work on this machine: {error}")
    monkeypatch.setattr(sandbox, "find_isolation", lambda: (way, request.param))
    return way


def load_programs(name: str) -> dict[str, str]:
    """The programs of a file by name: "## NAME", then the source."""
    found = {}
    text = (Path(__file__).parent / "programs" / f"{name}.txt").read_text(encoding="utf-8")
    for part in text.split("## ")[1:]:
        title, _, source = part.partition("\n")
        found[title] = source
    return found
