"""Bytes of KV that a cache has in use after a text: its own bookkeeping, without states."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from rlkv.cache.plan import CacheSettings
from rlkv.cache.reallocation import cached_states, full_cache
from rlkv.cache.schedule import RowCounts, plan_segments, split_call
from rlkv.eviction.base import EvictionPolicy
from rlkv.models.layout import Layout, gated_places
from rlkv.models.loading import cache_argument, refuse_own_cache, try_forward
from rlkv.models.shape import ModelShape

SCORE_NBYTES = 4  # of the float32 that a policy accumulates for each entry


@dataclass(frozen=True)
class KVSizes:
    """The memory that the KV of a model takes.

    Attributes:
        head_dim: elements of a key, in the layers with gates.
        group_size: query heads per KV head there.
        itemsize: bytes of an element.
        value_dim: elements of a value; None: ``head_dim``.
        heads: how many heads of each layer can be compressed, as ``HeadAllocation.heads``.
        others: what compression leaves as it is (sliding windows, linear states): bytes of a token,
            and the number of tokens from which on they grow no more.
    """

    head_dim: int
    group_size: int
    itemsize: int
    value_dim: int | None = None
    heads: Sequence[int] | None = None
    others: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, model: PreTrainedModel) -> KVSizes:
        """Return the sizes of a model.

        Where it has other layers than those with full attention it reads two tokens, as no config
        says what linear layers keep.

        Raises:
            ValueError: for layers of an unknown kind, a cache of another class, or heads of several
                sizes in layers with gates.
        """
        layout = Layout.from_config(model.config)
        shape = ModelShape.from_config(model.config)
        group_size = shape.num_query_heads // shape.num_kv_heads
        plain = cls(shape.head_dim, group_size, model.dtype.itemsize)
        if layout.is_plain:
            return plain
        layout.check()
        refuse_own_cache(
            model, "bytes of KV can be computed for models that take transformers' DynamicCache"
        )
        cache: Any = full_cache(model.config)
        try_forward(model, use_cache=True, **{cache_argument(): cache})
        dims = set()
        others = []
        for number, layer in enumerate(cache.layers):
            states = cached_states(layer)
            if isinstance(layer, CacheLayerMixin) and states:
                keys, values, *states = states
                if number in layout.gated:
                    dims.add((keys.shape[3], values.shape[3]))
                else:
                    of_token = (keys.nbytes + values.nbytes) // keys.shape[2]
                    # transformers' sliding layers keep one token less than the window
                    most = getattr(layer, "sliding_window", sys.maxsize) - 1
                    others.append((of_token, most))
            if states:
                others.append((sum(state.nbytes for state in states), 1))
        if len(dims) > 1:
            raise ValueError(
                f"{layout.model_type} has layers with full attention whose heads differ in size: "
                "bytes of KV can be computed for heads of one size only"
            )
        if dims:
            key_dim, value_dim = dims.pop()
            plain = replace(plain, head_dim=key_dim, value_dim=value_dim)
        return replace(plain, heads=layout.heads, others=tuple(others))

    @property
    def nbytes(self) -> int:
        """Key and value of one token of one KV head."""
        value_dim = self.head_dim if self.value_dim is None else self.value_dim
        return (self.head_dim + value_dim) * self.itemsize

    def unchanged_nbytes(self, tokens: Tensor) -> Tensor:
        """Return the bytes that both caches hold in ``others`` after ``tokens``: int64 ``[B]``."""
        found = torch.zeros_like(tokens)
        for nbytes, most in self.others:
            found += nbytes * tokens.clamp(max=most)
        return found


def kv_nbytes(
    settings: CacheSettings,
    full: Tensor,
    size: KVSizes,
    prompts: Tensor,
    tokens: Tensor,
    planned: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the bytes in use, and those of the full cache, of each row: int64 ``[B]`` each.

    They are those of the heads that can be compressed; both caches also hold
    ``size.unchanged_nbytes``.

    Args:
        settings: what the heads keep.
        full: bool ``[layers, KV heads]``.
        prompts: int64 ``[B]``, tokens of the first call.
        tokens: int64 ``[B]``, tokens of all calls.
        planned: int64 ``[B]``, lengths of texts that fix the budgets of a ratio; None: budgets grow
            with the text.
    """
    own = full[gated_places(size.heads, *full.shape)]
    num_full = int(own.sum())
    num_compressible = own.numel() - num_full
    whole = tokens * size.nbytes
    policy = settings.eviction
    of_policy = whole
    if policy is not None:
        entries = _entries_at(policy, prompts, tokens, settings.prefill, planned)
        copies = size.group_size if policy.per_query_head else 1
        of_entry = size.nbytes + (SCORE_NBYTES if policy.accumulates else 0)
        of_policy = copies * entries * of_entry
        if policy.observes:
            of_query = size.group_size * size.head_dim * size.itemsize
            of_policy = of_policy + tokens.clamp(max=policy.observation) * of_query
    of_full = whole if settings.policy_of(True) is None else of_policy
    of_compressible = of_policy
    if settings.policy_of(False) is None:
        kept = torch.minimum(tokens, settings.sinks(prompts) + settings.window)
        of_compressible = kept * size.nbytes
    used = num_full * of_full + num_compressible * of_compressible
    return used, own.numel() * whole


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
