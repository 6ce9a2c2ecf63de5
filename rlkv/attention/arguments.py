"""Arguments that transformers passes to attention functions and that the attention here does not compute."""

from __future__ import annotations

from typing import Any

# each of them changes the result of attention
VARIANTS = ("sliding_window", "softcap", "s_aux", "position_bias")


def refuse_variants(arguments: dict[str, Any], who: str) -> None:
    """Raise if the keyword arguments of an attention call ask for another variant of attention.

    Args:
        arguments: the keyword arguments that the attention function does not name; None means not asked for.
        who: the subject of the message, such as ``"gated attention"``.

    Raises:
        ValueError: naming the arguments.
    """
    given = [name for name in VARIANTS if arguments.get(name) is not None]
    if given:
        raise ValueError(f"{who} does not support attention with {', '.join(given)}: use another model")
