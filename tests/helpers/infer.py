"""``rlkv-infer`` in this process."""

from __future__ import annotations

import sys
from unittest import mock

from rlkv.cli.infer import infer as command


def infer(*arguments: object) -> None:
    """Run the command with these arguments; what it refuses is raised."""
    with mock.patch.object(sys, "argv", ["rlkv-infer", *map(str, arguments)]):
        command()
