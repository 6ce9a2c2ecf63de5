"""Solutions as batches: what is read under masks, and what of each was read in full before.

Shapes: L layers, H KV heads, B rows, P columns read in full, T columns after them, N answer tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from rlkv.data.recall import MarkedText

PADDING = 0  # on both sides, where no token sees it


class PromptLayer(DynamicLayer):
    """Keys and values of prompts, ``[B, H, P, D]``, which stay as they are when later tokens are read."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The prompts' states, and the new ones after them."""
        assert self.keys is not None
        assert self.values is not None
        return torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)


class TraceBatch(NamedTuple):
    """Texts whose prompts, with prompts in full, are in ``past`` and padded on the left.

    Attributes:
        ids_BT, position_BT: the tokens to read, and where they stand in their texts; int64 ``[B, T]``.
        mask_BK: real tokens, int64 ``[B, P + T]``.
        row_N, position_N, answer_N: the states that predict answers, and those answers; int64 ``[N]``.
        past: what was read in full; None if P is 0.
    """

    ids_BT: Tensor
    position_BT: Tensor
    mask_BK: Tensor
    row_N: Tensor
    position_N: Tensor
    answer_N: Tensor
    past: Cache | None

    def call(self) -> dict[str, Any]:
        """Arguments of the decoder."""
        call = {"input_ids": self.ids_BT, "position_ids": self.position_BT, "attention_mask": self.mask_BK}
        return {**call, "past_key_values": self.past, "use_cache": False}

    def states(self, decoder: Any) -> Tensor:
        """Last hidden states ``[N, D]`` of the positions that predict the answers."""
        return decoder(**self.call())[0][self.row_N, self.position_N]


@torch.no_grad()
def make_batch(decoder: Any, texts: Sequence[MarkedText], prompts_in_full: bool, device: torch.device) -> TraceBatch:
    """A batch on ``device``; ``decoder``, with full attention, reads the prompts where they are in full.

    A prompt ends before the first answer, whose prediction is then not the masks'.
    """
    cuts = [text.answers[0] if prompts_in_full else 0 for text in texts]
    split, pairs = max(cuts), list(zip(texts, cuts, strict=True))
    ids = torch.full((len(texts), split + max(len(text.ids) - cut for text, cut in pairs)), PADDING)
    mask = torch.zeros_like(ids)
    for row, (text, cut) in enumerate(pairs):
        columns = slice(split - cut, split - cut + len(text.ids))
        ids[row, columns], mask[row, columns] = torch.tensor(text.ids), 1
    ids, mask = ids.to(device), mask.to(device)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    places = [(row, at - 1 - cut) for row, (text, cut) in enumerate(pairs) for at in text.answers if at > cut]
    row_N, position_N = torch.tensor(places, device=device).T
    answer_N = ids[row_N, split + position_N + 1]
    past = None
    if split:
        prompt = {"input_ids": ids[:, :split], "position_ids": position[:, :split], "attention_mask": mask[:, :split]}
        cache = decoder(**prompt, use_cache=True).past_key_values
        past = Cache(layers=[_kept(layer) for layer in cache.layers])
    return TraceBatch(ids[:, split:], position[:, split:], mask, row_N, position_N, answer_N, past)


def _kept(layer: Any) -> PromptLayer:
    kept = PromptLayer()
    kept.lazy_initialization(layer.keys, layer.values)
    kept.keys, kept.values = layer.keys, layer.values
    return kept
