"""Shared fixtures: random decoders of three families; files that lack a package are skipped."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Generator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.helpers.models import FAMILIES, make_tiny_model
from tests.helpers.paths import ROOT

# models this small lose more by waking threads than they win; workers of a parallel run have one
# core each
torch.set_num_threads(1)


def _packages() -> set[str]:
    """The packages that pyproject.toml names, as they are imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return {re.split(r"[^\w-]", line)[0].replace("-", "_") for lines in lists for line in lines}


def missing_package(error: BaseException | None) -> str | None:
    """Return the optional package for lack of which an import failed, else None."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            package = error.name.partition(".")[0]
            if package in _packages() and find_spec(package) is None:
                return package
        error = error.__cause__ or error.__context__
    return None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Skip a file of tests that needs a package which is not installed."""
    report = yield
    call = getattr(report, "call", None)
    if report.failed and call is not None and call.excinfo is not None:
        package = missing_package(call.excinfo.value)
        if package is not None:
            report.outcome, report.result = "skipped", []
            report.longrepr = (str(collector.path), 1, f"Skipped: {package} is not installed")
    return report


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tiny_model(family: str) -> PreTrainedModel:
    """One random model per family; tests that use it run once for each."""
    return make_tiny_model(family)
