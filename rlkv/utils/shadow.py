"""Methods of an instance that are other ones for a while."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any


def shadow(instance: Any, name: str, function: Any, undo: ExitStack) -> None:
    """Shadow a method on the instance, until ``undo`` removes the shadow or restores an earlier one."""
    own = vars(instance)
    undo.callback(*((setattr, instance, name, own[name]) if name in own else (delattr, instance, name)))
    setattr(instance, name, function)
