"""The cache as a whole: extreme sizes, generation, bytes, growth, and the growing full cache."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from transformers import DynamicCache, MistralConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from rlkv.cache import IMPLEMENTATION, CacheSettings, HeadReallocationCache, schedule
from rlkv.cache.accounting import KVSizes, kv_nbytes
from rlkv.cache.plan import CacheState
from rlkv.cache.reallocation import GrowingCache, GrowingLayer, full_cache
from rlkv.cache.stores import FullStore
from rlkv.eviction import H2O, RKV, RPC, EvictionPolicy
from rlkv.models.layout import Layout
from tests.helpers.cached_logits import (
    MIXED,
    TOLERANCE,
    cached_logits,
    draw_ids,
    real_tokens,
    starts_of,
)
from tests.helpers.equalities import tensors
from tests.helpers.families import make_family
from tests.helpers.mixed_reference import reference_logits
from tests.helpers.models import make_tiny_model
from tests.helpers.naive_eviction import INSTANCES
from tests.helpers.transposed import in_both_layouts

SINK, WINDOW = 3, 5
LAYERS, HEADS, DIM, FLOAT = 3, 4, 16, 4
ENTRY = 2 * DIM * FLOAT
ALL_FULL = torch.ones(LAYERS, HEADS, dtype=torch.bool)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_tiny_model("llama", attn_implementation=IMPLEMENTATION)


@pytest.mark.parametrize(("sink", "window"), [(0, 1), (0, 40), (1, 2), (40, 1), (40, 40)])
def test_extreme_sizes(model: PreTrainedModel, sink: int, window: int) -> None:
    calls = [5] + [1] * 10 + [4, 1, 1]
    ids = draw_ids(2, sum(calls))
    got = cached_logits(model, ids, HeadReallocationCache(MIXED, sink, window), calls)
    want = reference_logits(model, ids, MIXED, sink, window, starts_of(calls))
    assert (got - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("protect_prompt", [False, True])
def test_a_prompt_of_one_token(model: PreTrainedModel, protect_prompt: bool) -> None:
    ids = draw_ids(2, 20)
    cache = HeadReallocationCache(MIXED, 0, WINDOW, protect_prompt=protect_prompt)
    got = cached_logits(model, ids, cache, [1] * 20)
    want = reference_logits(model, ids, MIXED, int(protect_prompt), WINDOW)
    assert (got - want).abs().max() < TOLERANCE


def test_a_store_without_memory_to_grow_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FullStore(2, cast(CacheState, None))
    for name in ("keys", "values"):
        store.planes[name] = torch.randn(1, 2, 5, 3)
    before = dict(store.planes)
    new_empty = torch.Tensor.new_empty
    sizes: list[tuple[int, ...]] = []

    def ends_at_second(tensor: torch.Tensor, *size: int) -> torch.Tensor:
        sizes.append(size)
        if len(sizes) == 2:
            raise torch.OutOfMemoryError
        return new_empty(tensor, *size)

    monkeypatch.setattr(torch.Tensor, "new_empty", ends_at_second)
    with pytest.raises(torch.OutOfMemoryError):
        store.reserve(9, 5)
    assert all(store.planes[name] is before[name] for name in before)
    store.reserve(9, 5)
    for name, plane in before.items():
        assert torch.equal(store.planes[name][:, :, :5], plane)


@pytest.mark.parametrize(
    ("prefill", "policy"),
    [
        ("full", None),
        ("local", None),
        ("full", RKV(budget=9, buffer=4, observation=3)),
        ("local", H2O(budget=8)),
        ("full", RPC(P=12, R=3, c=3, aggregation="head")),
    ],
)
def test_no_store_depends_on_the_strides_of_torchs_output(
    model: PreTrainedModel, prefill: str, policy: EvictionPolicy | None
) -> None:
    ids, real = draw_ids(2, 40), real_tokens([0, 5], 40)

    def run() -> torch.Tensor:
        cache = HeadReallocationCache(MIXED, SINK, WINDOW, prefill, eviction=policy)
        return cached_logits(model, ids, cache, [14, 1, 1, 1, 7, *[1] * 16], real)

    torch.testing.assert_close(*in_both_layouts(run))


def test_prefills_and_protection_change_what_is_seen(model: PreTrainedModel) -> None:
    """Guards the comparisons of the matrix: on these models all of them change the logits."""
    ids, calls = draw_ids(1, 130), [120, *[1] * 10]

    def read(
        prefill: str, protect_prompt: bool = False, full: torch.Tensor = MIXED
    ) -> torch.Tensor:
        cache = HeadReallocationCache(full, SINK, WINDOW, prefill, protect_prompt=protect_prompt)
        return cached_logits(model, ids, cache, calls)[0]

    full, local, published = (read(prefill) for prefill in schedule.PREFILL_MODES)
    assert (published - full)[:70].abs().max() < TOLERANCE  # all but the last 50 tokens
    assert (published - full)[70:120].abs().amax(-1).min() > 100 * TOLERANCE
    assert (published - local)[:70].abs().max() > 100 * TOLERANCE
    kept = read("full", protect_prompt=True)
    assert torch.equal(kept[:120], full[:120])
    assert (kept - full)[120 + WINDOW :].abs().amax(-1).min() > 100 * TOLERANCE
    assert (read("full", full=ALL_FULL) - full).abs().max() > 0.1


def test_calls_are_split_before_the_last_fifty_tokens() -> None:
    split = schedule.split_call
    assert split("published", 7, 51) == [(7, 1, True), (8, 50, False)]
    for length in (50, 49, 1):
        assert split("published", 0, length) == [(0, length, False)]
    assert split("full", 0, 120) == [(0, 120, True)]
    assert split("local", 0, 120) == [(0, 120, False)]


@pytest.mark.parametrize("beams", [1, 3])
def test_all_heads_full_generates_the_stock_tokens(tiny_model: PreTrainedModel, beams: int) -> None:
    ids, mask = draw_ids(3, 10), real_tokens([0, 3, 6], 10).long()
    settings = {"max_new_tokens": 25, "num_beams": beams, "do_sample": False}
    settings |= {"eos_token_id": None, "attention_mask": mask}
    stock = tiny_model.generate(ids, past_key_values=DynamicCache(), **settings)
    tiny_model.set_attn_implementation(IMPLEMENTATION)
    # the second one: windows as long as the text, so that beams lose nothing when they move
    whole = HeadReallocationCache(ALL_FULL, SINK, WINDOW)
    wide = HeadReallocationCache(MIXED, 1, 25, protect_prompt=True)
    for cache in (whole, wide):
        assert torch.equal(tiny_model.generate(ids, past_key_values=cache, **settings), stock)
    assert whole.full_nbytes() == ENTRY * 3 * beams * LAYERS * HEADS * 34


RESET = [{"protect_prompt": protect_prompt} for protect_prompt in (False, True)]
RESET += [{"eviction": INSTANCES[name]} for name in ("rkv", "h2o", "random", "rpc schedule")]


@pytest.mark.parametrize("options", RESET)
def test_a_reset_cache_is_as_new(model: PreTrainedModel, options: dict[str, Any]) -> None:
    cache, fresh = (
        HeadReallocationCache(MIXED, SINK, WINDOW, record=True, **options) for _ in range(2)
    )
    cached_logits(model, draw_ids(2, 34, seed=2), cache, [25] + [1] * 9)
    assert fresh.held(0).shape == (*MIXED.shape, 0)
    cache.reset()
    assert cache.kept == []
    calls = [17] + [1] * 15
    again = cached_logits(model, draw_ids(2, 32), cache, calls)
    assert torch.equal(again, cached_logits(model, draw_ids(2, 32), fresh, calls))
    assert cache.used_nbytes() == fresh.used_nbytes()
    for a, b in zip(cache.kept, fresh.kept, strict=True):
        assert torch.equal(a.positions, b.positions)
        assert torch.equal(a.scores, b.scores)


def test_fill_keeps_the_whole_prompt_if_it_is_protected() -> None:
    cache = HeadReallocationCache(MIXED, SINK, WINDOW, protect_prompt=True)
    cache.fill(torch.randn(2, 4, 40, 16), torch.randn(2, 4, 40, 16))
    assert cache.held(0).all()


# Bytes


def storage_bytes(cache: HeadReallocationCache) -> int:
    """Bytes of every float storage that hangs off the stores of the layers, each counted once."""
    storages = {}
    for layer in cache.layers:
        for store in layer.stores:
            for plane in store.planes.values():
                storages[plane.untyped_storage().data_ptr()] = plane.untyped_storage().nbytes()
    return sum(storages.values())


def test_a_protected_prompt_counted_by_hand(model: PreTrainedModel) -> None:
    """6 full and 6 compressible heads; rows with 14, 11, 3 and 1 tokens of prompt."""
    cache = HeadReallocationCache(MIXED, SINK, WINDOW, protect_prompt=True)
    cache.state.limit = 30
    cached_logits(model, draw_ids(4, 30), cache, [14, *[1] * 16], real_tokens([0, 3, 11, 13], 30))
    assert cache.nbytes() == storage_bytes(cache) == ENTRY * 4 * (6 * 30 + 6 * (14 + WINDOW))
    assert cache.used_nbytes() == ENTRY * (6 * 4 * 30 + 6 * (14 + 11 + 3 + 3 + 4 * WINDOW))
    cache.batch_select_indices(torch.tensor([3, 1]))
    assert cache.nbytes() == storage_bytes(cache) == ENTRY * 2 * (6 * 30 + 6 * (11 + WINDOW))


def test_bfloat16_is_cached_as_bfloat16() -> None:
    model = make_tiny_model("llama", attn_implementation=IMPLEMENTATION).bfloat16()
    cache = HeadReallocationCache(MIXED, SINK, WINDOW)
    cache.state.limit = 20
    assert cached_logits(model, draw_ids(1, 20), cache, [10] + [1] * 10).dtype == torch.bfloat16
    assert cache.nbytes() == ENTRY // 2 * (6 * 20 + 6 * (SINK + WINDOW))


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 300])
def test_growing_buffers_are_counted_with_their_headroom(
    model: PreTrainedModel, prompt: int
) -> None:
    cache = HeadReallocationCache(ALL_FULL)
    cached_logits(model, draw_ids(2, prompt + 80), cache, [prompt] + [1] * 80)
    capacity = -(-prompt // 16) * 16
    while capacity < prompt + 80:
        capacity = -(-max(capacity + capacity // 16, capacity + 1) // 16) * 16
    entries = 2 * LAYERS * HEADS
    assert cache.nbytes() == storage_bytes(cache) == ENTRY * entries * capacity
    assert cache.used_nbytes() == cache.full_nbytes() == ENTRY * entries * (prompt + 80)


def test_keys_and_values_may_differ_in_dtype(model: PreTrainedModel) -> None:
    cache = HeadReallocationCache(ALL_FULL)
    with torch.autocast("cpu", torch.bfloat16):
        cached_logits(model, draw_ids(1, 16), cache, [16])
    layer = cache.layers[0]
    assert [states.dtype for states in layer.stores[0].planes.values()] == [
        torch.float32,
        torch.bfloat16,
    ]
    assert cache.nbytes() == cache.full_nbytes() == storage_bytes(cache)


def test_compressible_heads_never_grow(model: PreTrainedModel) -> None:
    cache = HeadReallocationCache(~ALL_FULL, sink=2, window=6)
    cached_logits(model, draw_ids(2, 3), cache, [3])
    pointers = [layer.stores[0].keys.data_ptr() for layer in cache.layers]
    cached_logits(model, draw_ids(2, 103), cache, [1] * 100, begin=3)
    assert cache.nbytes() == ENTRY * 2 * LAYERS * HEADS * 8
    assert [layer.stores[0].keys.data_ptr() for layer in cache.layers] == pointers


def test_the_memory_is_freed_without_the_garbage_collector(model: PreTrainedModel) -> None:
    cache = HeadReallocationCache(ALL_FULL)
    cached_logits(model, draw_ids(2, 6), cache, [5, 1])
    buffer = weakref.ref(cache.layers[0].stores[0].keys)
    gc.collect()
    gc.disable()
    try:
        del cache
        assert buffer() is None
    finally:
        gc.enable()


# The full cache

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


@pytest.mark.parametrize(
    ("limit", "change"), [(None, "select"), (5, "repeat"), (40, "reorder"), (40, "crop")]
)
def test_a_growing_layer_holds_what_the_stock_layer_holds(limit: int | None, change: str) -> None:
    ours, stock = GrowingLayer(limit), DynamicLayer()
    assert_same_updates(ours, stock, [9, 1, 1, 1, 3, 1, 1], seed=0)
    for layer in (ours, stock):
        CHANGES[change](layer)
    assert_same_updates(ours, stock, [1, 1, 4, 1, 1, 1, 20, 1], seed=1)


def test_a_growing_layer_copies_seldom_and_takes_no_room_beyond_the_limit() -> None:
    layer = GrowingLayer(limit=300)
    places = []
    for length in [20] + [1] * 280:  # values may have another size than keys
        keys, values = layer.update(torch.ones(1, 2, length, 8), torch.ones(1, 2, length, 4))
        places.append(keys.data_ptr())
    assert (keys.shape, values.shape) == ((1, 2, 300, 8), (1, 2, 300, 4))
    moves = sum(here != there for here, there in pairwise(places))
    assert moves <= 300 / 16
    assert keys.untyped_storage().nbytes() == 300 * 2 * 8 * FLOAT


def test_models_that_forget_bring_their_own_cache() -> None:
    cache = full_cache(make_tiny_model("llama").config)
    assert type(cache) is GrowingCache
    assert [type(layer) for layer in cache.layers] == [GrowingLayer] * 3
    assert type(full_cache(MistralConfig(num_hidden_layers=2, sliding_window=8))) is DynamicCache


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_shared", "deepseek_v3", "minicpm3"])
def test_bytes_of_models_that_only_the_full_cache_serves(family: str) -> None:
    """Layers that share keys and values, or keep a latent state, are in both caches."""
    model = make_family(family)
    size = KVSizes.of(model)
    heads = Layout.from_config(model.config).heads
    full = torch.ones(len(heads), max(1, *heads), dtype=torch.bool)
    tokens = torch.tensor([23])
    held, whole = kv_nbytes(CacheSettings(), full, size, tokens - 3, tokens)
    with torch.no_grad():
        cache = model(torch.arange(3, 26)[None], use_cache=True).past_key_values
    found = sum(state.nbytes for state in tensors([vars(layer) for layer in cache.layers]))
    assert int(held) == int(whole) == found - int(size.unchanged_nbytes(tokens)) < found
