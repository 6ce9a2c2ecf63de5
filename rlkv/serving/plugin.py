"""Entry point ``vllm.general_plugins``: the engine calls :func:`register` in each of its processes."""

from __future__ import annotations

from rlkv.serving.mixed_names import PREFIX

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
