"""How many bytes of KV a cache has in use after a text: its own bookkeeping, without states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlkv.cache.plan import CacheSettings
from rlkv.cache.schedule import RowCounts, plan_segments, split_call
from rlkv.eviction.base import EvictionPolicy
from rlkv.models.shape import ModelShape


@dataclass(frozen=True)
class EntrySize:
    """What one head's share of one token takes:

    ``head_dim`` elements of ``itemsize`` bytes, G query heads.
    """

    head_dim: int
    group_size: int
    itemsize: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> EntrySize:
        """The sizes of a model; ValueError if it has layers without full attention."""
        kinds = set(
            getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"]
        )
        if kinds != {"full_attention"}:
            raise ValueError(
                f"{model.config.model_type} has layers of kind "
                f"{', '.join(sorted(kinds - {'full_attention'}))}: bytes "
                "of KV can be computed for models with full attention in every layer only"
            )
        shape = ModelShape.from_config(model.config)
        return cls(
            shape.head_dim, shape.num_query_heads // shape.num_kv_heads, model.dtype.itemsize
        )

    @property
    def nbytes(self) -> int:
        """Key and value of one token of one KV head."""
        return 2 * self.head_dim * self.itemsize


def entries_by_step(
    policy: EvictionPolicy, prompts: Tensor, prefill: str = "full", planned: Tensor | None = None
) -> Iterator[Tensor]:
    """Entries that a compressible head holds of each row, int64 ``[B]``: after the prompts, after
    one more token, ...

    ``prompts`` int64 ``[B]``: tokens of the first call, the others come one at a time; ``prefill``
    as of the cache, ``planned`` as of :class:`RowCounts`.
    """
    seen, counts = int(prompts.max()), RowCounts.start(len(prompts), planned)
    for part in split_call(prefill, 0, seen):
        segments = plan_segments(
            policy, counts, seen - prompts, *part, protect=policy.protect_prompt
        )
        counts = segments[-1].after
    while True:
        yield counts.held
        counts = plan_segments(policy, counts, None, seen, 1, in_one_go=True)[-1].after
        seen += 1


def kv_nbytes(
    settings: CacheSettings,
    full: Tensor,
    size: EntrySize,
    prompts: Tensor,
    tokens: Tensor,
    planned: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Bytes in use, and bytes of the full cache, of each row: int64 ``[B]`` each.

    Args:
        settings: what compressible heads keep; full: bool ``[layers, KV heads]``.
        prompts, tokens: int64 ``[B]``, tokens of the first call and of all calls.
        planned: int64 ``[B]``, lengths of texts that fix the budgets of a ratio; None: budgets grow
            with the text.
    """
    entries = torch.zeros_like(prompts)
    if settings.eviction is not None:
        steps = range(int((tokens - prompts).max()) + 1)
        by_step = entries_by_step(settings.eviction, prompts, settings.prefill, planned)
        for step, held in zip(steps, by_step, strict=False):
            entries = torch.where(tokens - prompts >= step, held, entries)
    policy, num_full = settings.eviction, int(full.sum())
    num_compressible = full.numel() - num_full
    if policy is None:
        of_head = torch.minimum(tokens, settings.sinks(prompts) + settings.window) * size.nbytes
    else:
        copies = size.group_size if policy.per_query_head else 1
        of_head = copies * entries * (size.nbytes + (4 if policy.accumulates else 0))
        if policy.uses_queries and not policy.accumulates:
            of_head = (
                of_head
                + tokens.clamp(max=policy.observation)
                * size.group_size
                * size.head_dim
                * size.itemsize
            )
    return (
        num_full * tokens * size.nbytes + num_compressible * of_head,
        full.numel() * tokens * size.nbytes,
    )
