"""Weights and adapters in the order of heads, plain and quantised."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.engines import need_vllm
from tests.helpers.quantised import LAYOUTS

need_vllm()

from rlkv.vllm.head_order import HeadOrder
from rlkv.vllm.packing import SinkWindowDemand, plan_packing

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


@pytest.mark.parametrize("projection", ["q", "k", "v", "o", "qkv"])
def test_adapters_move_as_what_they_are_merged_into(projection: str) -> None:
    """Both factors of whole numbers, whose products are exact, in layers of either name."""
    sides = {"q": (SIZE, 5), "k": (SIZE // 2, 5), "v": (SIZE // 2, 5), "o": (5, SIZE)}
    outputs, inputs = sides.get(projection, (2 * SIZE, 5))
    generator = torch.Generator().manual_seed(1)
    left = torch.randint(9, (outputs, 3), generator=generator)
    right = torch.randint(9, (3, inputs), generator=generator)
    order = HeadOrder({0: ORDER}, group_size=2, head_size=HEAD)
    for block in ("self_attn", "attn"):
        name = f"model.layers.0.{block}.{projection}_proj"
        ((_, merged),) = order.reordered([(name + ".weight", left @ right)])
        own = SimpleNamespace(lora_a=right, lora_b=left)
        order.reorder_adapter(SimpleNamespace(loras={name: own}))
        assert torch.equal(own.lora_b @ own.lora_a, merged)
        assert not torch.equal(merged, left @ right)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("self_attn.o_proj.scales", (2, 64), "weights reach over several heads"),
        ("self_attn.o_proj.weight_scale_inv", (4, 4 * 5), "weights reach over several heads"),
        ("self_attn.q_proj.absmax", (16,), "the order of heads in a absmax"),
        ("self_attn.o_proj.g_idx", None, "without desc_act"),
        ("attention.wq.weight", (256, 64), "which heads this tensor has"),
        ("self_attn.attn.k_scale", (), "which heads this tensor has"),
        ("self_attn.k_proj.lora_B", (64, 8), "64 entries where the model's heads have 128"),
        ("attn.o_proj.lora_A", (8, 64), "64 entries where the model's heads have 256"),
        ("self_attn.q_proj.lora_magnitude_vector", (256,), "in a lora_magnitude_vector"),
    ],
)
def test_what_cannot_move_is_refused(
    name: str, shape: tuple[int, ...] | None, message: str
) -> None:
    tensor = torch.ones(shape) if shape is not None else torch.tensor([0, 1, 0, 1])
    with pytest.raises(ValueError, match=message):
        list(HeadOrder({0: ORDER}, 2, HEAD).reordered([(f"model.layers.0.{name}", tensor)]))
