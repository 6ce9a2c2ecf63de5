"""Entry point ``vllm.general_plugins``: the engine calls :func:`register` in each of its processes."""

from __future__ import annotations

from rlkv.serving.mixed_names import PREFIX

GROUP, NAME, ENTRY_POINT = "vllm.general_plugins", "rlkv", "rlkv.serving.plugin:register"
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def register() -> None:
    """Put rlkv's classes in place of the stock ones, by name.

    Nothing is imported here, and the classes build the untouched stock model unless rlkv was asked for: whether it
    was is known only when the engine builds its model. Calling it twice changes nothing.
    """
    from vllm import ModelRegistry

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"rlkv.serving.models:{name}")
        mixed = PREFIX + name  # of rollouts; a caller in this process may have registered the class itself
        if mixed not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(mixed, f"rlkv.serving.mixed_model:{mixed}")


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
