"""A command in this process, judged by its exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest import mock

import pytest


def exit_code(main: Callable[[], object], *words: object) -> int:
    """Return what ``main`` exits with; the first word is the name of the program."""
    with (
        mock.patch.object(sys, "argv", list(map(str, words))),
        pytest.raises(SystemExit) as stopped,
    ):
        main()
    return int(stopped.value.code or 0)
