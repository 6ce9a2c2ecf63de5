"""Entry point ``vllm.general_plugins``: the engine calls :func:`register` in each of its processes."""

from __future__ import annotations

from functools import wraps
from typing import Any

from rlkv.vllm.names import ARCHITECTURES, PREFIX

GROUP, NAME, ENTRY_POINT = "vllm.general_plugins", "rlkv", "rlkv.vllm.plugin:register"


def register() -> None:
    """Put rlkv's classes in place of the stock ones, by name.

    The classes build the untouched stock model unless rlkv was asked for: whether it was is known only when the engine
    has its settings. For models that have no such class it is refused then. Calling this twice changes nothing.
    """
    from vllm import ModelRegistry

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"rlkv.vllm.reallocation.models:{name}")
        mixed = PREFIX + name  # of rollouts; a caller in this process may have registered the class itself
        if mixed not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(mixed, f"rlkv.vllm.mixed.model:{mixed}")
    _check_every_config()


def _check_every_config() -> None:
    """No class of ours is built for another model, so the engine's own settings are where it can be noticed.

    The scheduler reads the same settings, in another process perhaps than the model.
    """
    from vllm.config import VllmConfig

    stock: Any = VllmConfig.__post_init__
    if getattr(stock, "checked_by_rlkv", False):
        return

    @wraps(stock)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        from rlkv.vllm.reallocation.limits import adapt_engine, check_architecture

        stock(self, *args, **kwargs)
        check_architecture(self)
        adapt_engine(self)

    checked.checked_by_rlkv = True  # type: ignore[attr-defined]
    VllmConfig.__post_init__ = checked


def check_installed() -> None:
    """Raise ``ValueError`` if the engine would not load this plugin, and so serve the full cache without a word."""
    import os
    from importlib.metadata import entry_points

    if not any(entry.value == ENTRY_POINT for entry in entry_points(group=GROUP)):
        raise ValueError(
            "the installed rlkv does not announce its vLLM plugin (an older installation, or an rlkv.egg-info in the "
            "current folder that is older): install it again with pip install -e . or pip install 'rlkv[vllm]'"
        )
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and NAME not in chosen.split(","):
        raise ValueError(f"VLLM_PLUGINS={chosen!r} keeps the rlkv plugin out: add {NAME} to it, or unset it")
