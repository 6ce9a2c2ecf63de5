"""Commands, and the repository's programs, in this process."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

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


def exit_code(main: Callable[[], object], *words: object) -> int:
    """Return what ``main`` exits with; the first word is the name of the program."""
    with (
        mock.patch.object(sys, "argv", list(map(str, words))),
        pytest.raises(SystemExit) as stopped,
    ):
        main()
    return int(stopped.value.code or 0)


def run_program(path: str, *words: object) -> int:
    """Return the exit code of a program."""
    return exit_code(lambda: runpy.run_path(str(ROOT / path), run_name="__main__"), path, *words)
