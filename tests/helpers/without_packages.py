"""A plugin of pytest, for which the packages named in ``WITHOUT`` are not installed.

``pytest -p tests.helpers.without_packages``
"""

from __future__ import annotations

import os
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

MISSING = set(os.environ["WITHOUT"].split(","))
_find_spec = PathFinder.find_spec


def find_spec(name: str, *args: Any) -> ModuleSpec | None:
    return None if name.partition(".")[0] in MISSING else _find_spec(name, *args)


PathFinder.find_spec = staticmethod(find_spec)  # type: ignore[method-assign,assignment]
