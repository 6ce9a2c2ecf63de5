"""Block tables without the gap between sinks and window, so that a kernel reads only what is kept.

The gap is a whole number of blocks: without it the window's keys and the queries move by the same distance, so "the
first S or the last W" selects the same keys as before. Its blocks may belong to another request now: never read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlkv.vllm.blocks.demand import SinkWindowDemand


@dataclass
class GapRules:
    """What a step's queries see of the first tokens, and how long tables without gaps get.

    ``longest``: tokens of the longest text; ``full_prefill``: prompts are read in full, and not kept.
    """

    demand: SinkWindowDemand
    longest: int
    full_prefill: bool = False

    def width(self, queries: int, prompt: int = 0) -> int:
        """Blocks that a request can need with this many queries in a step, and a prompt that is read in full in it."""
        demand = self.demand
        prefix = max(prompt, demand.prefix(self.longest))
        return demand.full(prefix) + demand.full(demand.window - 1 + queries) + 1

    def full_prompts(self, common: Any, vllm_config: Any) -> list[int] | None:
        """:func:`prompt_lengths` of a step's metadata; None unless it reads prompts in full."""
        return prompt_lengths(common) if self.full_prefill and _reads_prompts(common, vllm_config) else None

    def prefixes(self, common: Any, vllm_config: Any) -> Tensor | None:
        """First tokens that each request of a step sees, on either device; None: the sinks, of all."""
        if not self.demand.protect_prompt:
            return None
        _reads_prompts(common, vllm_config)
        # the first step of all states no lengths, and reads nothing but prompts
        prompt_R = common.seq_lens if common.rswa_prefix_lens is None else common.rswa_prefix_lens
        return prompt_R.clamp(min=self.demand.sink)


def _reads_prompts(common: Any, vllm_config: Any) -> bool:
    """Whether a step reads prompts; after the first one that does, the engine states the lengths of prompts.

    Not while decoding, nor in batches that the engine makes up while it starts.
    """
    if common.is_prefilling is None or not bool(common.is_prefilling.any()):
        return False
    # By this number the engine knows models that need prompt lengths, and states them from the next step on. The first
    # prompt comes when all stock layers and builders have read it, so that nothing else changes.
    arch = vllm_config.model_config.model_arch_config
    if arch.rswa_window is None:
        arch.rswa_window = vllm_config.model_config.max_model_len
    return True


def prompt_lengths(common: Any) -> list[int]:
    """For each request of a step the length of its prompt, if the prompt is read in this step, else 0.

    The first step of all states no prompt lengths: no request can have been preempted, so what it reads is a prompt.
    A preempted request is read again with what it has written, which must see no more than it did.
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


class SteadyTables:
    """Tables without gaps at the same addresses in every step, as a captured CUDA graph needs them.

    Every builder has its own: the engine builds the metadata of all before it uses one.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self._table = torch.zeros(rows, columns, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(rows, dtype=torch.int32, device=device)

    def __call__(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """The buffers' part for a table ``[rows, columns]`` and its lengths."""
        return self._table[:rows, :columns], self._lengths[:rows]
