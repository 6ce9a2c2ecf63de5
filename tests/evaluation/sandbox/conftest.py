"""The ways in which a program can be shut in; those that do not work on this machine are skipped,
and say why.
"""

from __future__ import annotations

import shutil

import pytest

from rlkv.evaluation import sandbox
from rlkv.evaluation.sandbox import Isolation, Limits, SandboxError

WAYS = {
    "bubblewrap": Isolation(bubblewrap=shutil.which("bwrap")),
    "Landlock 1": Isolation(
        landlock=1
    ),  # knows neither truncation nor networks, signals and abstract sockets
    "Landlock": Isolation(landlock=sandbox.NEWEST),
}


@pytest.fixture
def isolation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Isolation:
    """One of :data:`WAYS`, in which programs run during the test."""
    way = WAYS[request.param]
    if way == Isolation():
        pytest.skip("bubblewrap (bwrap) is not installed")
    try:
        sandbox._run(way, {"program": "", "tests": {}}, Limits())
    except SandboxError as error:
        pytest.skip(f"{request.param} does not work on this machine: {error}")
    monkeypatch.setattr(sandbox, "find_isolation", lambda: (way, request.param))
    return way
