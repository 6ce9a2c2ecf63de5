"""No temporary tensor of an eviction grows with N x N, nor with B x H x N beyond the scores
themselves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlkv.eviction import base as attention
from rlkv.eviction import rkv
from tests.helpers.eviction_matrix import HEADS, random_entries

ROWS, N = 2, 500


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that was newly allocated."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage().data_ptr() not in self.known
            ):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("floats", [2**14, 2**16])
def test_temporary_tensors_stay_within_the_limit(floats, monkeypatch):
    monkeypatch.setattr(attention, "FLOATS", floats)
    keys, queries = random_entries(
        ROWS, N, 1, N, seed=0
    )  # one query head per KV head: nothing is copied to group them
    valid = torch.ones(ROWS, N, dtype=torch.bool)
    calls = [
        lambda: rkv.redundancy(keys, valid, 0.5, 2, "published"),
        lambda: rkv.importance(keys, queries, valid, 8, 7, "paper"),
        lambda: attention.attention_received(keys, queries, valid),
    ]
    for call in calls:
        with LargestTensor(keys, queries, valid) as largest:
            call()
        assert floats / 4 < largest.elements <= max(floats, ROWS * HEADS * N)
        assert largest.elements < N * N
