"""The repository's programs as modules, for tests that call them in this process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from tests.helpers.paths import ROOT


def load_program(path: str) -> Any:
    """The module of a program, such as ``inference/evaluate.py``, loaded again."""
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_program", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module
