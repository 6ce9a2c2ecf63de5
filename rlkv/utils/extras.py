"""Optional dependencies: imported where they are needed, and named with their pip command when absent."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Import ``module`` of the extra ``rlkv[extra]``; ``ValueError`` with the pip command if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        package = module.split(".")[0].replace("_", "-")
        raise ValueError(
            f"this needs the package {package}, which is not installed: pip install 'rlkv[{extra}]'"
        ) from None
