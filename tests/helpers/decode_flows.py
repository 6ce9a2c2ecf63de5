"""Whole models that decode through the kernel and through torch: rows that move, join, are copied
and forgotten.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

import rlkv.kernels.decode as kernel_module
from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from tests.helpers.cached_logits import MIXED, cached_logits, draw_ids
from tests.helpers.decode_cases import kernel
from tests.helpers.models import make_tiny_model

HEADS = MIXED[:2]  # of a mixed layer, and of one with compressible heads alone


def padded_rows_that_move(model: PreTrainedModel) -> list[Tensor]:
    device, cache = model.device, HeadReallocationCache(HEADS, 3, 5)
    ids, real = (
        draw_ids(3, 13).to(device),
        torch.arange(13, device=device) >= torch.tensor([[0], [4], [9]]).to(device),
    )
    before = cached_logits(model, ids[:, :12], cache, [10, 1, 1], real[:, :12])
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    moved = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache]
    return [
        before,
        *(
            cached_logits(model, ids[[2, 0, 0]], each, [1], real[[2, 0, 0]], begin=12)
            for each in moved
        ),
    ]


def turns_and_another_text(model: PreTrainedModel) -> list[Tensor]:
    cache = HeadReallocationCache(HEADS, 1, 4, protect_prompt=True)
    calls = [9, 1, 3, 1]
    first = cached_logits(model, draw_ids(2, sum(calls)).to(model.device), cache, calls)
    cache.reset()
    return [first, cached_logits(model, draw_ids(2, 8, seed=2).to(model.device), cache, [6, 1, 1])]


def rows_that_join(model: PreTrainedModel) -> list[Tensor]:
    ids = draw_ids(2, 18).to(model.device)
    caches = [HeadReallocationCache(HEADS, 2, 5, protect_prompt=True) for _ in range(2)]
    for row, (cache, length) in enumerate(zip(caches, (16, 11), strict=True)):
        cached_logits(model, ids[row : row + 1, 16 - length : 16], cache, [length - 1, 1])
    caches[0].join(caches[1], 16)
    real = torch.arange(18, device=model.device) >= torch.tensor([[0], [5]], device=model.device)
    return [cached_logits(model, ids, caches[0], [1] * (ids.shape[1] - 16), real, begin=16)]


def first_tokens_alone(model: PreTrainedModel) -> list[Tensor]:
    cache = HeadReallocationCache(HEADS, 0, 3, reserve=8)
    return [cached_logits(model, draw_ids(1, 5).to(model.device), cache, [1] * 5)]


# with the tokens that each reads one at a time
FLOWS: dict[Callable[[PreTrainedModel], list[Tensor]], int] = {
    padded_rows_that_move: 2 + 3 * 1,
    turns_and_another_text: 2 + 2,
    rows_that_join: 2 + 2,
    first_tokens_alone: 5,
}


def difference(flow: Callable[[PreTrainedModel], list[Tensor]], device: str) -> tuple[float, int]:
    """Largest difference of the logits with and without the kernel, and how many launches too few
    or too many.
    """
    model = make_tiny_model("llama", num_hidden_layers=len(HEADS)).to(device)
    model.set_attn_implementation(IMPLEMENTATION)
    with kernel(False):
        expected = flow(model)
    with (
        kernel(True),
        mock.patch.object(kernel_module, "decode", wraps=kernel_module.decode) as launches,
    ):
        found = flow(model)
    differences = ((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    return max(differences), launches.call_count - FLOWS[flow] * len(HEADS)
