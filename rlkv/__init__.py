"""RLKV: find which KV heads a reasoning LLM needs in full, and serve it with a small cache on all
others.

Names are loaded on first use: ``import rlkv`` costs no heavy import.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"

_HOMES = {
    "HeadGates": "rlkv.gates.head_gates",
    "HeadAllocation": "rlkv.gates.allocation",
    "HeadReallocationCache": "rlkv.cache",
    "compress": "rlkv.inference.compress",
    "generate_lossless": "rlkv.inference.lossless",
}

__all__ = [
    "HeadAllocation",
    "HeadGates",
    "HeadReallocationCache",
    "__version__",
    "compress",
    "generate_lossless",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlkv' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
