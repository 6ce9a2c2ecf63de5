"""Attention variants that would be ignored are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlkv.attention.call import VARIANTS, MixedCall, refuse_variants
from rlkv.attention.mixed import GATE, Gate, mixed_attention


@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_is_named(name: str) -> None:
    refuse_variants({name: None, "is_causal": True, "position_ids": torch.zeros(1)}, "this")
    for value in (0, 8, 30.0, torch.zeros(4)):  # 0 is asked for as well
        with pytest.raises(ValueError, match=rf"^this .* {name}:"):
            refuse_variants({"is_causal": True, name: value}, "this")


def test_several_are_all_named() -> None:
    with pytest.raises(ValueError, match="sliding_window, s_aux"):
        refuse_variants({"s_aux": 1, "sliding_window": 8}, "this")


class Holder(nn.Module):
    def current(self) -> Gate:
        return Gate(torch.full((2,), 0.5), 1, 2)


@pytest.mark.parametrize("name", VARIANTS)
def test_gated_layers_refuse_them(name: str) -> None:
    states = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    layer = nn.Module()
    layer.is_causal, layer.num_key_value_groups = True, 1
    call = MixedCall(1, 5, 5, 0, None, True, lambda: None)
    mixed_attention(layer, *states, call, **{name: None})
    setattr(layer, GATE, Holder())
    mixed_attention(layer, *states, call, **{name: None})
    with pytest.raises(ValueError, match=f"gated attention.*{name}"):
        mixed_attention(layer, *states, call, **{name: 4})
