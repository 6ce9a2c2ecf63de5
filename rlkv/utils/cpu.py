"""What the CPU has instructions for."""

from __future__ import annotations

from typing import Any

import torch


def cpu_has_any(*names: str) -> bool:
    """Whether torch says so of any of ``names``, which are its own; before torch 2.11 it does not say."""
    known: Any = getattr(torch.cpu, "get_capabilities", dict)()
    return any(known.get(name) for name in names)
