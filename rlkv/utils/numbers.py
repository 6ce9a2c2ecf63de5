"""Numbers as users write them, in options, requests and gates files."""

from __future__ import annotations

import reprlib
from typing import Any

MOST = 2**31 - 1  # tokens that no model reads, and that every library can count


def check_whole(name: str, value: Any, least: int, most: int = MOST) -> None:
    """Raise ValueError, beginning with ``name``, unless it is a whole number in the range."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        shown = reprlib.repr(value)
        raise ValueError(f"{name} is {shown}: it must be a whole number from {least} to {most}")


def check_number(name: str, value: Any, least: float, most: float) -> None:
    """Raise ValueError, beginning with ``name``, unless it is a number in the range; NaN is not."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        shown = reprlib.repr(value)
        raise ValueError(f"{name} is {shown}: it must be a number from {least:g} to {most:g}")
