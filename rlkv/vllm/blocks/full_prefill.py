"""Prompts that all heads read in full, before compressible heads keep sinks and window only (``prefill: full``).

A token of a prompt then sees all tokens before it, in every head. That can be served where each prompt is read in one
step, whose keys are all there: chunked prefill is switched off, and prefix caching too, because a cached answer was
not read in full. A request that was preempted is read again in one step with what it has written so far, and its own
tokens must see no more than they did: so it has to be known where the prompt ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class FullPrefill:
    """Where prompts end, for all compressible heads of a served model."""

    _latest: tuple[Any, list[int]] | None = field(default=None, repr=False)

    def prompts(self, common: Any, vllm_config: Any) -> list[int] | None:
        """Prompt lengths of a step (:func:`prompt_lengths`), found once for all bins; None if it reads no prompt.

        Args:
            common: metadata of the step (vLLM's).
        """
        if common.is_prefilling is None or not bool(common.is_prefilling.any()):
            return None  # decoding, and the batches that the engine makes up while it starts
        ask_for_prompt_lengths(vllm_config)
        key = common.seq_lens_cpu_upper_bound
        if self._latest is None or self._latest[0] is not key:
            self._latest = (key, prompt_lengths(common))
        return self._latest[1]


def ask_for_prompt_lengths(vllm_config: Any) -> None:
    """Make the engine state prompt lengths in the metadata of later steps.

    It does so for models with another kind of attention, identified by this number. The first prompt comes when all
    stock layers and builders have read it, so that nothing else changes.
    """
    arch = vllm_config.model_config.model_arch_config
    if arch.rswa_window is None:
        arch.rswa_window = vllm_config.model_config.max_model_len


def prompt_lengths(common: Any) -> list[int]:
    """For each request of a step the length of its prompt, if the prompt is read in this step, else 0.

    Args:
        common: metadata of the step. Where they state no prompt lengths, in the first step of all, no request can have
            been preempted, and what is read from its first token on is a prompt.

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
