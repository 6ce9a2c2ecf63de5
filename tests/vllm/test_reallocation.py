"""Weights in the order of heads, plain and quantised, and layers that are not served."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.engines import need_vllm
from tests.helpers.quantised import LAYOUTS

need_vllm()

from rlkv.eviction import make_policy
from rlkv.vllm import backends
from rlkv.vllm.packing import BufferDemand, SinkWindowDemand, plan_packing
from rlkv.vllm.reallocation import HeadOrder, _what_is_kept, check_layers
from rlkv.vllm.settings import ServingSettings

ORDER = [2, 0, 3, 1]
HEAD, SIZE = 32, 8 * 32  # 8 query heads over 4 KV heads


def test_weights_are_reordered() -> None:
    """Heads of 2 numbers, groups of 2 query heads: rows and columns are named after their heads."""
    full = torch.tensor([[False, True, False], [True, True, True]])
    plan = plan_packing(full, SinkWindowDemand(32, 16, 64), 1000)
    order = {layer: plan.head_order(layer) for layer in range(2)}
    changed = HeadOrder(order, group_size=2, head_size=2)
    heads = torch.arange(3).repeat_interleave(2)
    rows = heads.repeat_interleave(2)
    own = "model.layers.0.self_attn."
    weights = {
        f"{own}q_proj.weight": rows[:, None].expand(12, 5),
        f"{own}k_proj.bias": heads,
        f"{own}v_proj.weight": heads[:, None].expand(6, 5),
        f"{own}o_proj.weight": rows.expand(5, 12),
        f"{own}o_proj.bias": torch.arange(5),
        "model.layers.1.self_attn.k_proj.bias": heads,
        "model.norm.weight": torch.arange(5),
    }
    order = torch.tensor(plan.head_order(0))
    assert order[0] == 1  # the full one comes first
    heads = order.repeat_interleave(2)
    rows = order.repeat_interleave(4)
    expected = {
        **weights,
        f"{own}q_proj.weight": rows[:, None].expand(12, 5),
        f"{own}k_proj.bias": heads,
        f"{own}v_proj.weight": heads[:, None].expand(6, 5),
        f"{own}o_proj.weight": rows.expand(5, 12),
    }
    found = dict(changed.reordered(weights.items()))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("projection", ["q", "k", "v", "o"])
@pytest.mark.parametrize("form", LAYOUTS)
def test_quantised_heads_move_as_plain_ones(form: str, projection: str) -> None:
    """Quantising and reordering commute, number for number."""
    outputs = SIZE // (2 if projection in "kv" else 1)
    weight = torch.randn(outputs, SIZE, generator=torch.Generator().manual_seed(1))
    order = HeadOrder({0: ORDER}, group_size=2, head_size=HEAD)
    name = f"model.layers.0.self_attn.{projection}_proj."
    ((_, plain),) = order.reordered([(name + "weight", weight)])
    assert not torch.equal(plain, weight)
    quantised = {name + kind: tensor for kind, tensor in LAYOUTS[form](weight).items()}
    found = dict(order.reordered(quantised.items()))
    for kind, tensor in LAYOUTS[form](plain).items():
        assert found[name + kind].dtype == quantised[name + kind].dtype
        assert torch.equal(found[name + kind].float(), tensor.float()), kind


def test_fused_projections_move_as_single_ones() -> None:
    query, key, value = (torch.randn(heads * HEAD, 5) for heads in (8, 4, 4))
    order = HeadOrder({0: ORDER}, group_size=2, head_size=HEAD)
    name = "model.layers.0.self_attn."
    names = [f"{name}{projection}_proj.weight" for projection in "qkv"]
    single = order.reordered(zip(names, (query, key, value), strict=True))
    ((_, fused),) = order.reordered([(name + "qkv_proj.weight", torch.cat([query, key, value]))])
    assert torch.equal(fused, torch.cat([tensor for _, tensor in single]))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("self_attn.o_proj.scales", (2, 64), "weights reach over several heads"),
        ("self_attn.o_proj.weight_scale_inv", (4, 4 * 5), "weights reach over several heads"),
        ("self_attn.q_proj.absmax", (16,), "the order of heads in a absmax"),
        ("self_attn.o_proj.g_idx", None, "without desc_act"),
        ("attention.wq.weight", (256, 64), "which heads this tensor has"),
        ("self_attn.attn.k_scale", (), "which heads this tensor has"),
    ],
)
def test_what_cannot_move_is_refused(
    name: str, shape: tuple[int, ...] | None, message: str
) -> None:
    tensor = torch.ones(shape) if shape is not None else torch.tensor([0, 1, 0, 1])
    with pytest.raises(ValueError, match=message):
        list(HeadOrder({0: ORDER}, 2, HEAD).reordered([(f"model.layers.0.{name}", tensor)]))


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("sliding_window", 64, "a sliding window"),
        ("kv_sharing_target_layer_name", "layers.0", "keys and values of another layer"),
        ("attn_type", "encoder_only", "attention in both directions"),
        ("num_kv_heads", 2, "another number or size of heads"),
        ("impl", SimpleNamespace(scale=1.0, logits_soft_cap=30.0), "soft-capped logits"),
        ("impl", SimpleNamespace(scale=1.0, alibi_slopes=torch.ones(4)), "ALiBi"),
        ("impl", SimpleNamespace(scale=0.5), "another scale"),
    ],
)
def test_layers_with_more_than_plain_attention(attribute: str, value: Any, message: str) -> None:
    plain = {"sliding_window": None, "kv_sharing_target_layer_name": None, "attn_type": "decoder"}
    heads = {"num_heads": 8, "num_kv_heads": 4, "head_size": 32, "impl": SimpleNamespace(scale=1.0)}
    layers = [
        SimpleNamespace(layer_name=f"layers.{number}.attn", **plain, **heads) for number in range(3)
    ]
    assert check_layers(layers) is None
    setattr(layers[2], attribute, value)
    with pytest.raises(ValueError, match=f"layers.2.attn has {message}"):
        check_layers(layers)


def test_what_would_never_be_dropped_is_refused() -> None:
    eviction = {"name": "rkv", "budget": 100, "buffer": 60}
    settings = ServingSettings(full=("01", "10"), eviction=eviction)
    demand = BufferDemand.of(make_policy(**eviction), 16, 2)
    plan = plan_packing(settings.allocation.full, demand, 1000)
    assert _what_is_kept(settings, plan, 161) is not None
    with pytest.raises(ValueError, match="160 entries"):
        _what_is_kept(settings, plan, 160)


def test_full_heads_share_metadata_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend is used, and no schedule made, whose metadata are for one number of heads."""
    from vllm.v1.attention.backends.triton_attn import (
        TritonAttentionBackend,
        TritonAttentionMetadataBuilder,
    )

    class Planned(TritonAttentionBackend):
        @staticmethod
        def get_name() -> str:
            return "FLASHINFER"

    monkeypatch.setattr(backends, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    asked: list[bool] = []
    monkeypatch.setattr(
        TritonAttentionMetadataBuilder,
        "build",
        lambda self, prefix, common, fast_build=False: asked.append(fast_build),
    )
    for stock, expected in ((TritonAttentionBackend, "TRITON_ATTN"), (Planned, "TRITON_ATTN")):
        layer: Any = SimpleNamespace(attn_backend=stock)
        found = backends.full_backend(layer)
        assert found.get_name() == expected
        assert (found.__mro__[1] is stock) == (stock is TritonAttentionBackend)
        builder = found.get_builder_cls()
        builder.build(object.__new__(builder), 0, None)
    assert asked == [True, True]
