"""Bytes of the cache: real tensors, the formula of the docstring, growth and headroom."""

from __future__ import annotations

import gc

import pytest
import torch

from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from rlkv.cache.stores import grown_capacity
from tests.helpers.models import make_tiny_model

LAYERS, HEADS, DIM, FLOAT = 3, 4, 16, 4


def run(cache: HeadReallocationCache, calls: list[int], rows: int = 2) -> None:
    model = make_tiny_model("llama", max_position_embeddings=8192)
    model.set_attn_implementation(IMPLEMENTATION)
    with torch.no_grad():
        for length in calls:
            model(torch.randint(3, 128, (rows, length)), past_key_values=cache)


def storage_bytes(cache: HeadReallocationCache) -> int:
    """Bytes of every float storage that hangs off the stores of the cache's layers, each counted
    once.
    """
    storages = {}
    for layer in cache.layers:
        for store in layer.stores:
            loose = [value for value in vars(store).values() if isinstance(value, torch.Tensor)]
            for value in [*loose, *store.planes.values()]:
                if value.is_floating_point():
                    storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(storages.values())


def test_4096_tokens_at_sparsity_half_are_the_formula_to_the_byte() -> None:
    full = torch.zeros(LAYERS * HEADS, dtype=torch.bool)
    full[torch.randperm(12, generator=torch.Generator().manual_seed(0))[:6]] = True
    cache = HeadReallocationCache(full.view(LAYERS, HEADS), sink=16, window=64, reserve=4096)
    run(cache, [4090] + [1] * 6, rows=1)
    entry = 2 * DIM * FLOAT
    assert cache.get_seq_length() == 4096
    assert (
        cache.nbytes() == cache.used_nbytes() == storage_bytes(cache) == entry * (6 * 4096 + 6 * 80)
    )
    assert cache.full_nbytes() == entry * 12 * 4096
    assert cache.nbytes() / cache.full_nbytes() == 0.5 * (1 + 80 / 4096)


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 200, 300])
def test_growing_buffers_are_counted_with_their_headroom(prompt: int) -> None:
    cache = HeadReallocationCache(torch.ones(LAYERS, HEADS, dtype=torch.bool), reserve=0)
    run(cache, [prompt] + [1] * 80)
    capacity = -(-prompt // 16) * 16
    while capacity < prompt + 80:
        capacity = -(-max(capacity + capacity // 16, capacity + 1) // 16) * 16
    assert cache.nbytes() == storage_bytes(cache) == 2 * 2 * DIM * FLOAT * LAYERS * HEADS * capacity
    assert (
        cache.used_nbytes()
        == cache.full_nbytes()
        == 2 * 2 * DIM * FLOAT * LAYERS * HEADS * (prompt + 80)
    )


def test_compressible_heads_never_grow() -> None:
    cache = HeadReallocationCache(torch.zeros(LAYERS, HEADS, dtype=torch.bool), sink=2, window=6)
    run(cache, [3])
    first = cache.nbytes()
    pointers = [layer.stores[0].keys.data_ptr() for layer in cache.layers]
    run(cache, [1] * 100)
    assert cache.nbytes() == first == 2 * 2 * DIM * FLOAT * LAYERS * HEADS * 8
    assert [layer.stores[0].keys.data_ptr() for layer in cache.layers] == pointers


def test_used_bytes_leave_padding_slots_out() -> None:
    cache = HeadReallocationCache(torch.zeros(LAYERS, HEADS, dtype=torch.bool), sink=2, window=6)
    model = make_tiny_model("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
    with torch.no_grad():
        model(torch.randint(3, 128, (2, 5)), attention_mask=mask, past_key_values=cache)
    assert cache.used_nbytes() == 2 * DIM * FLOAT * LAYERS * HEADS * (5 + 2)


def test_growth_is_geometric_and_limited() -> None:
    assert grown_capacity(0, 1, None) == 16
    assert grown_capacity(6400, 6401, None) == 6800
    assert grown_capacity(6400, 6401, 6500) == 6500
    assert grown_capacity(6400, 6401, 100) == 6401
    capacity, copies = 0, 0
    for needed in range(1, 20_000):
        if needed > capacity:
            copies += capacity
            capacity = grown_capacity(capacity, needed, None)
    assert copies < 17 * 20_000


def test_the_memory_is_freed_without_the_garbage_collector() -> None:
    cache = HeadReallocationCache(torch.ones(LAYERS, HEADS, dtype=torch.bool))
    run(cache, [5, 1])
    import weakref

    buffer = weakref.ref(cache.layers[0].stores[0].keys)
    gc.collect()
    gc.disable()
    try:
        del cache
        assert buffer() is None
    finally:
        gc.enable()
