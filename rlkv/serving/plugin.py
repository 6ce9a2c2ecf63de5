"""Entry point ``vllm.general_plugins``: the engine calls :func:`register` in each of its processes."""

from __future__ import annotations

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def register() -> None:
    """Put rlkv's classes in place of the stock ones, by name.

    Nothing is imported here, and the classes build the untouched stock model unless rlkv was asked for: whether it
    was is known only when the engine builds its model. Calling it twice changes nothing.
    """
    from vllm import ModelRegistry

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"rlkv.serving.models:{name}")
