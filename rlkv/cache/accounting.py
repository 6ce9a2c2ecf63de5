"""Bytes of KV that a cache has in use after a text: its own bookkeeping, without states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlkv.cache.plan import CacheSettings
from rlkv.cache.schedule import RowCounts, plan_segments, split_call
from rlkv.eviction.base import EvictionPolicy
from rlkv.models.shape import ModelShape

SCORE_NBYTES = 4  # of the float32 that a policy accumulates for each entry


@dataclass(frozen=True)
class EntrySize:
    """The memory of one head's share of one token.

    Attributes:
        head_dim: elements of a key, and of a value.
        group_size: query heads per KV head.
        itemsize: bytes of an element.
    """

    head_dim: int
    group_size: int
    itemsize: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> EntrySize:
        """Return the sizes of a model; ValueError if it has layers without full attention."""
        kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or [])
        others = sorted(kinds - {"full_attention"})
        if others:
            raise ValueError(
                f"{model.config.model_type} has layers of kind {', '.join(others)}: bytes of KV "
                "can be computed for models with full attention in every layer only"
            )
        shape = ModelShape.from_config(model.config)
        group_size = shape.num_query_heads // shape.num_kv_heads
        return cls(shape.head_dim, group_size, model.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Key and value of one token of one KV head."""
        return 2 * self.head_dim * self.itemsize


def kv_nbytes(
    settings: CacheSettings,
    full: Tensor,
    size: EntrySize,
    prompts: Tensor,
    tokens: Tensor,
    planned: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the bytes in use, and those of the full cache, of each row: int64 ``[B]`` each.

    Args:
        settings: what compressible heads keep.
        full: bool ``[layers, KV heads]``.
        prompts: int64 ``[B]``, tokens of the first call.
        tokens: int64 ``[B]``, tokens of all calls.
        planned: int64 ``[B]``, lengths of texts that fix the budgets of a ratio; None: budgets grow
            with the text.
    """
    num_full = int(full.sum())
    num_compressible = full.numel() - num_full
    of_full_head = tokens * size.nbytes
    policy = settings.eviction
    if policy is None:
        of_head = torch.minimum(tokens, settings.sinks(prompts) + settings.window) * size.nbytes
    else:
        entries = _entries_at(policy, prompts, tokens, settings.prefill, planned)
        copies = size.group_size if policy.per_query_head else 1
        of_entry = size.nbytes + (SCORE_NBYTES if policy.accumulates else 0)
        of_head = copies * entries * of_entry
        if policy.observes:
            of_query = size.group_size * size.head_dim * size.itemsize
            of_head = of_head + tokens.clamp(max=policy.observation) * of_query
    used = num_full * of_full_head + num_compressible * of_head
    return used, full.numel() * of_full_head


def _entries_at(
    policy: EvictionPolicy, prompts: Tensor, tokens: Tensor, prefill: str, planned: Tensor | None
) -> Tensor:
    """Count the entries of a head once each row has its ``tokens``: int64 ``[B]``."""
    seen = int(prompts.max())
    padding = seen - prompts
    counts = RowCounts.start(len(prompts), planned)
    for part in split_call(prefill, 0, seen):
        segments = plan_segments(policy, counts, padding, *part, protect=policy.protect_prompt)
        counts = segments[-1].after
    entries = counts.held
    for step in range(1, int((tokens - prompts).max()) + 1):
        counts = plan_segments(policy, counts, None, seen, 1, in_one_go=True)[-1].after
        seen += 1
        entries = torch.where(tokens - prompts >= step, counts.held, entries)
    return entries
