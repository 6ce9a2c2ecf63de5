"""Prompts that all heads read in full, before compressible heads keep sinks and window only (``prefill: full``).

A token of a prompt then sees all tokens before it, in every head. That needs prompts that are read in one step:
chunked prefill and prefix caching are switched off. A request that was preempted is read again in one step with what
it has written so far, and its own tokens must see no more than they did: so it has to be known where the prompt ends.
"""

from __future__ import annotations

from typing import Any


def full_prompts(common: Any, vllm_config: Any) -> list[int] | None:
    """:func:`prompt_lengths` of a step with the metadata ``common`` (vLLM's); None if it reads no prompt."""
    if common.is_prefilling is None or not bool(common.is_prefilling.any()):
        return None  # decoding, and the batches that the engine makes up while it starts
    # By this number the engine knows models that need prompt lengths, and states them from the next step on. The first
    # prompt comes when all stock layers and builders have read it, so that nothing else changes.
    arch = vllm_config.model_config.model_arch_config
    if arch.rswa_window is None:
        arch.rswa_window = vllm_config.model_config.max_model_len
    return prompt_lengths(common)


def prompt_lengths(common: Any) -> list[int]:
    """For each request of a step the length of its prompt, if the prompt is read in this step, else 0.

    The first step of all states no prompt lengths: no request can have been preempted, so what it reads is a prompt.

    Raises:
        RuntimeError: if a prompt is read in several steps, which the engine's settings rule out.
    """
    starts = common.query_start_loc_cpu.tolist()
    stated = None if common.rswa_prefix_lens is None else common.rswa_prefix_lens.tolist()
    found = []
    for row, length in enumerate(common.seq_lens_cpu_upper_bound.tolist()):
        queries = starts[row + 1] - starts[row]
        before = length - queries
        if queries == 0:
            found.append(0)
            continue
        prompt = stated[row] if stated is not None else length if before == 0 else 0
        if before < prompt and (before > 0 or queries < prompt):
            raise RuntimeError(
                f"rlkv: a prompt of {prompt:,} tokens is read in pieces ({before:,} and then {queries:,} tokens): with "
                "prefill 'full' send whole prompts, not streamed ones; else please report this with the engine's "
                "settings"
            )
        found.append(prompt if before == 0 else 0)
    return found
