"""What counts as the expected output or value, as in LiveCodeBench's evaluation: called by tests, in the judge."""

from decimal import Decimal, InvalidOperation
from typing import Any


def same_output(found: str, expected: str) -> bool:
    """Whether both texts have the same lines, up to white space around them; numbers may be written differently."""
    lines, wanted = ([line.strip() for line in text.strip().split("\n")] for text in (found, expected))
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(found: str, expected: str) -> bool:
    try:
        return found == expected or [*map(Decimal, found.split())] == [*map(Decimal, expected.split())]
    except InvalidOperation:
        return False


def same_value(found: Any, expected: Any) -> bool:
    """Whether both are equal; a tuple may stand for the list that JSON has."""
    return bool((list(found) if type(found) is tuple else found) == expected)
