"""Hybrids: gates on the layers with full attention, the others as the engine has them.

That the engine writes the tokens of transformers is in ``test_serving.py``, with all models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.cache.plan import CacheSettings
from rlkv.models.layout import Layout
from rlkv.rollout.base import SamplingParams
from rlkv.vllm.engine import ServingEngine
from rlkv.vllm.packing import OtherLayer, SinkWindowDemand, plan_heads, plan_packing
from rlkv.vllm.settings import ServingSettings, parse_settings
from tests.helpers.engines import (
    BLOCK,
    ELEMENT,
    HEAD_SIZE,
    KV_HEADS,
    LINEAR,
    SLIDING,
    Served,
    add_request,
    engine_config,
    generate,
    make_served,
    need_vllm,
    random_prompts,
)
from tests.helpers.models import build_tokenizer
from tests.vllm.conftest import Serving

need_vllm()

from rlkv.vllm.head_order import HeadOrder

ENTRY = 2 * HEAD_SIZE * ELEMENT


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    folder = tmp_path_factory.mktemp("hybrids")
    families = {"gemma3": SLIDING, "gpt_oss": SLIDING, "granitemoehybrid": LINEAR, "llama": {}}
    return {name: make_served(folder / name, name, **own) for name, own in families.items()}


@pytest.mark.parametrize(
    ("family", "gates", "options", "message"),
    [
        ("gemma3", "gpt_oss", {}, "other model type"),
        ("gpt_oss", "gpt_oss", {"eviction": {"name": "rkv", "budget": 64}}, "learned sinks"),
        ("gpt_oss", "gpt_oss", {"mode": "keep"}, "mode 'keep' is not served with learned sinks"),
        ("gemma3", None, {"full": ["10", "1111", "", "1111"]}, r"\[2, 4, 0, 4\].* \[0, 4, 0, 4\]"),
    ],
)
def test_what_is_refused_before_anything_is_loaded(
    models: dict[str, Served], family: str, gates: str | None, options: Any, message: str
) -> None:
    request: Any = {"rlkv": {"sink": 4, "window": 16, **options}}
    if gates is not None:
        request = models[gates].request(0.5, **options)
    with pytest.raises(ValueError, match=message):
        engine_config(models[family], request)


def test_sparsity_counts_the_heads_with_gates(models: dict[str, Served]) -> None:
    config = engine_config(models["gemma3"], models["gemma3"].request(0.625))
    settings = parse_settings(config.additional_config["rlkv"])
    assert settings.full is not None
    assert [len(row) for row in settings.full] == [0, KV_HEADS, 0, KV_HEADS]
    assert settings.allocation == models["gemma3"].allocation(0.625)
    assert settings.allocation.num_full == 3
    assert settings.full_LH.shape == (2, KV_HEADS)


@pytest.mark.parametrize("served_by", ["gemma3", "gpt_oss", "granite 4"])
def test_blocks_of_all_layers_share_a_pool(serving: Serving, served_by: str) -> None:
    """Blocks of equal bytes, and the layers without gates as the stock engine keeps them."""
    core = serving.llm.llm_engine
    config = core.engine_core.engine_core.scheduler.kv_cache_config
    settings = parse_settings(core.vllm_config.additional_config["rlkv"])
    model = core.collective_rpc("get_model")[0]
    block_size, least, others = model.rlkv_pool
    (plan,) = plan_heads(settings, block_size, 2, core.model_config.max_model_len, least=least)
    sizes = {tensor.size // config.num_blocks for tensor in config.kv_cache_tensors}
    assert sizes == {plan.block_entries * ENTRY}
    layout = Layout.from_config(serving.served.model.config)
    assert plan.num_heads(True) + plan.num_heads(False) == sum(layout.heads) == 2 * KV_HEADS
    assert len(others) == 2
    assert max(other.page for other in others) <= plan.block_entries * ENTRY
    kinds = [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups]
    expected = "MambaSpec" if served_by == "granite 4" else "SlidingWindowSpec"
    assert kinds.count(expected) == 2
    assert kinds.count("SinkWindowSpec") >= 1
    assert stock_blocks(serving, kinds, expected) == [own.held(300) // own.page for own in others]


def stock_blocks(serving: Serving, kinds: list[str], kind: str) -> list[int]:
    """Blocks of the groups of a kind when a request has 300 tokens."""
    core = serving.llm.llm_engine
    add_request(serving.llm, "0", random_prompts((200,))[0], 200)
    scheduler = core.engine_core.engine_core.scheduler
    while True:
        core.step()
        (request,) = scheduler.requests.values()
        if request.num_tokens > 300:
            break
    held = []
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    for found, manager in zip(kinds, managers, strict=True):
        (table,) = manager.req_to_blocks.values()
        if found == kind:
            held.append(sum(not block.is_null for block in table))
    core.abort_request(["0"])
    return held


def test_bytes_of_a_layer_without_gates() -> None:
    sliding = OtherLayer(100, 32, 48)
    assert [sliding.held(tokens) for tokens in (1, 32, 33, 64, 65, 5000)] == [
        *(100, 100, 200, 200, 300, 300),
    ]
    assert OtherLayer(100).held(5000) == 100


def test_bins_fill_the_blocks_of_other_layers() -> None:
    """Heads that are few get longer blocks where those of the linear layers are large."""
    full = torch.tensor([[True, False, False, False]])
    demand = SinkWindowDemand(32, 16, 64)
    alone = plan_packing(full, demand, 3000)
    plan = plan_packing(full, demand, 3000, least=500)
    assert alone.block_entries < plan.block_entries == 500
    assert max(own.demand.block_size for own in plan.bins) > 32
    assert plan.held(3000) == plan.blocks(3000) * 500
    assert "in its layers with full attention" in plan.summary(8, 3000)
    assert "holds the layers without gates" in plan.capacity(100, 8, 3000)


def test_weights_of_layers_with_gates_are_reordered() -> None:
    """Queries move with the gates of their outputs, and learned sinks with their heads."""
    order = HeadOrder({1: [2, 0, 1]}, group_size=2, head_size=1, gates_outputs=True)
    name = "model.layers.{}.self_attn.{}"
    # of each query head the query and the gate
    query = torch.arange(12)[:, None]
    sinks = torch.arange(6)
    weights = {}
    for layer in (0, 1):
        weights[name.format(layer, "q_proj.weight")] = query
        weights[name.format(layer, "sinks")] = sinks
    found = dict(order.reordered(weights.items()))
    assert torch.equal(found[name.format(0, "q_proj.weight")], query)
    assert torch.equal(found[name.format(0, "sinks")], sinks)
    moved = [8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7]
    assert found[name.format(1, "q_proj.weight")].flatten().tolist() == moved
    assert found[name.format(1, "sinks")].tolist() == [4, 5, 0, 1, 2, 3]


@pytest.mark.engine("gemma3")
def test_prefixes_of_sliding_layers_are_found_again(serving: Serving) -> None:
    prompts = random_prompts((5, 6 * BLOCK, 6 * BLOCK + 1, 333), seed=4)
    first = generate(serving.llm, prompts, 40)
    again = generate(serving.llm, prompts, 40)
    assert max(output.num_cached_tokens for output in again) >= 8 * BLOCK
    assert serving.check(first + again) == 320


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_bytes_of_a_batch_count_all_layers(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    served = make_served(tmp_path, "gemma3", vocab_size=len(tokenizer), **SLIDING)
    tokenizer.save_pretrained(served.path)
    cache = CacheSettings(sink=4, window=16, prefill="local")
    settings = ServingSettings.of(served.allocation(0.5), cache)
    options = {"dtype": "float32", "kv_gib": 0.03, "max_positions": 512, "enforce_eager": True}
    engine = ServingEngine(str(served.path), settings, **options)
    try:
        ((completion,), usage) = engine.batch(["1 + 2 ."], SamplingParams(max_new_tokens=100))
        (given,) = engine.prompt_lengths(["1 + 2 ."])
    finally:
        engine.close()
    length = given + len(completion.token_ids) - 1
    blocks = -(-length // BLOCK)
    page = BLOCK * KV_HEADS * ENTRY
    unchanged = 2 * min(blocks, 3) * page
    assert usage.kv_bytes_unchanged == unchanged
    assert usage.kv_bytes_full == 2 * blocks * page + unchanged
    (plan,) = engine.plans
    assert usage.kv_bytes == plan.held(length) * ENTRY + unchanged
