"""Results of evaluations without what differs from run to run."""

from __future__ import annotations

from typing import Any

VOLATILE = (
    "seconds",
    "seconds_per_text",
    "tokens_per_second",
    "finished",
    "command",
    "output_dir",
)


def stable(content: Any) -> Any:
    """``content``, as of JSON, without times and the folder."""
    if isinstance(content, dict):
        return {name: stable(value) for name, value in content.items() if name not in VOLATILE}
    return [stable(value) for value in content] if isinstance(content, list) else content
