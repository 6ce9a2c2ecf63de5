"""GrowingLayer: holds what transformers' own layer holds, without copying it at every token."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, MistralConfig
from transformers.cache_utils import DynamicLayer

from rlkv.cache.reallocation import GrowingCache, GrowingLayer, full_cache
from tests.helpers.models import make_tiny_model

CHANGES = {
    "select": lambda layer: layer.batch_select_indices(torch.tensor([2, 0])),
    "repeat": lambda layer: layer.batch_repeat_interleave(2),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([1, 1, 0])),
    "crop": lambda layer: layer.crop(-7),
}


def assert_same_updates(
    ours: GrowingLayer, stock: DynamicLayer, lengths: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = ours.keys.shape[0] if ours.is_initialized else 3
    for length in lengths:
        new = torch.randn(2, rows, 4, length, 16, generator=generator)
        for found, expected in zip(ours.update(*new), stock.update(*new), strict=True):
            assert torch.equal(found, expected)
        assert ours.get_seq_length() == stock.get_seq_length()
        assert ours.get_mask_sizes(1) == stock.get_mask_sizes(1)


@pytest.mark.parametrize("limit", [None, 5, 40])
@pytest.mark.parametrize("change", CHANGES)
def test_it_holds_what_the_stock_layer_holds(limit: int | None, change: str) -> None:
    ours, stock = GrowingLayer(limit), DynamicLayer()
    assert_same_updates(ours, stock, [9, 1, 1, 1, 3, 1, 1], seed=0)
    for layer in (ours, stock):
        CHANGES[change](layer)
    assert_same_updates(ours, stock, [1, 1, 4, 1, 1, 1, 20, 1], seed=1)


def test_it_copies_seldom_and_takes_no_room_beyond_the_limit() -> None:
    layer = GrowingLayer(limit=300)
    places = set()
    for length in [20] + [1] * 280:
        keys, _ = layer.update(*torch.zeros(2, 1, 2, length, 8))
        places.add(keys.data_ptr())
    assert len(places) <= 8  # 20 * 1.5 ** 7 = 342
    assert layer.keys.untyped_storage().nbytes() == 300 * 2 * 8 * 4


def test_values_may_have_another_size_than_keys() -> None:
    layer = GrowingLayer()
    for _ in range(3):
        keys, values = layer.update(torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 4))
    assert (keys.shape, values.shape) == ((1, 2, 15, 8), (1, 2, 15, 4))


def test_models_that_forget_bring_their_own_cache(family: str) -> None:
    cache = full_cache(make_tiny_model(family).config)
    assert type(cache) is GrowingCache
    assert [type(layer) for layer in cache.layers] == [GrowingLayer] * 3
    assert type(full_cache(MistralConfig(num_hidden_layers=2, sliding_window=8))) is DynamicCache
