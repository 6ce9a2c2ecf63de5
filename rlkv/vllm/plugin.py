"""Entry point ``vllm.general_plugins``: the engine calls :func:`register` in each of its processes."""

from __future__ import annotations

from functools import wraps
from typing import Any

from rlkv.vllm.names import ARCHITECTURES, PREFIX

GROUP, NAME, ENTRY_POINT = "vllm.general_plugins", "rlkv", "rlkv.vllm.plugin:register"


def register() -> None:
    """Put rlkv's classes in place of the stock ones, by name.

    The classes build the untouched stock model unless rlkv was asked for, which is known only when the engine has its
    settings; models that have no such class are refused then. Calling this twice changes nothing.
    """
    from vllm import ModelRegistry

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"rlkv.vllm.reallocation.models:{name}")
        mixed = PREFIX + name  # of rollouts; a caller in this process may have registered the class itself
        if mixed not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(mixed, f"rlkv.vllm.mixed.model:{mixed}")
    _prepare_every_config()


def _prepare_every_config() -> None:
    """The engine's configuration is where the settings, the model and the scheduler meet, before any other process."""
    from vllm.config import VllmConfig

    stock: Any = VllmConfig.__post_init__
    if getattr(stock, "prepared_by_rlkv", False):
        return

    @wraps(stock)
    def prepared(self: Any, *args: Any, **kwargs: Any) -> None:
        from rlkv.vllm.limits import prepare_engine

        stock(self, *args, **kwargs)
        prepare_engine(self)

    prepared.prepared_by_rlkv = True  # type: ignore[attr-defined]
    VllmConfig.__post_init__ = prepared


def check_installed() -> None:
    """Raise ``ValueError`` if the engine would not load this plugin, and so silently serve the full cache."""
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
