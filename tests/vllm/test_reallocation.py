"""What heads keep of which layers, and layers that are not served."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.engines import need_vllm

need_vllm()

from rlkv.eviction import make_policy
from rlkv.vllm import backends
from rlkv.vllm.packing import BufferDemand, plan_packing
from rlkv.vllm.reallocation import _what_is_kept, check_layers
from rlkv.vllm.settings import ServingSettings


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
    for stock in (TritonAttentionBackend, Planned):
        layer: Any = SimpleNamespace(attn_backend=stock)
        found = backends.full_backend(layer)
        assert found.get_name() == "TRITON_ATTN"
        for aligned in (False, True):
            bins = backends.full_backend(layer, aligned)
            assert bins.supported_kv_cache_layouts() == backends.LAYOUTS
        assert (found.__mro__[1] is stock) == (stock is TritonAttentionBackend)
        builder = found.get_builder_cls()
        builder.build(object.__new__(builder), 0, None)
    assert asked == [True, True]
