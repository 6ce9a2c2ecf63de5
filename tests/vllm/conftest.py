"""Engines that tests share: one is open in a process at a time, so tests are sorted by engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.helpers.engines import ENGINES, EngineKey, Engines, Served, check_equal


def engine_of(item: pytest.Item) -> str:
    """Return the name of a test's engine; an empty one: it needs none of those that are shared."""
    marker = item.get_closest_marker("engine")
    if marker is not None:
        return marker.args[0]
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("served_by", "") if callspec else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort tests by engine, and keep those of an engine, or of a file, in one worker."""
    own = [item for item in items if item.path.parent.name == "vllm"]
    for item in own:
        item.add_marker(pytest.mark.xdist_group(engine_of(item) or item.path.name))
    names = list(ENGINES)
    order = sorted(own, key=lambda item: names.index(engine_of(item)) if engine_of(item) else -1)
    items[:] = [item for item in items if item not in own] + order


@dataclass
class Serving:
    """A shared engine with its model and reference."""

    llm: Any
    served: Served
    key: EngineKey

    def check(self, outputs: list[Any], greedy: bool = True) -> int:
        """Compare all tokens with the reference; the number of tokens."""
        assert self.key.sparsity is not None
        sizes = self.key.what_is_kept()
        return check_equal(self.served, self.key.sparsity, outputs, greedy, sizes)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    found = Engines(tmp_path_factory.mktemp("engines"))
    yield found
    found.close()


@pytest.fixture
def serving(request: pytest.FixtureRequest, engines: Engines) -> Serving:
    """The engine that the test is marked with, or that ``served_by`` names."""
    name = engine_of(request.node)
    return Serving(engines.open(name), engines.served(name), ENGINES[name])


@pytest.fixture
def alone(engines: Engines) -> None:
    """No shared engine is open while the test has one of its own."""
    engines.close()


@pytest.fixture(scope="session")
def llama(engines: Engines) -> Served:
    """A random Llama and random gates, in a folder, for tests with an engine."""
    pytest.importorskip("vllm")
    return engines.served("sinks")
