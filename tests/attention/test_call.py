"""What an attention call must not have is refused by name, before any fallback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.masking_utils import causal_mask_function, or_masks

from rlkv.attention import call as call_module
from rlkv.attention.call import (
    OF_SDPA,
    MixedCall,
    is_plain_causal,
    mixed_mask,
    refuse_variants,
)
from rlkv.attention.mixed import GATE, Gate, mixed_attention
from rlkv.cache.layer import NewStates, realloc_attention

NAMES = ("sliding_window", "position_bias", "cu_seq_lens_q", "never_heard_of")
STATES = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
CALL = MixedCall(1, 5, 5, 0, None, True, lambda: None)


class Holder(nn.Module):
    def current(self) -> Gate:
        return Gate(torch.full((2,), 0.5), 1, 2)


def layer(gated: bool) -> Any:
    module = nn.Module()
    module.is_causal, module.num_key_value_groups = True, 1
    if gated:
        setattr(module, GATE, Holder())
    return module


@pytest.mark.parametrize("name", NAMES)
def test_arguments_that_would_be_ignored_are_named(name: str) -> None:
    harmless = {name: None, "is_causal": True, "position_ids": torch.zeros(1), "use_cache": True}
    refuse_variants({**harmless, "output_attentions": False}, "this")
    for value in (0, 30.0, True, torch.zeros(4)):  # 0 is asked for as well
        with pytest.raises(ValueError, match=rf"^this .* {name},"):
            refuse_variants({"is_causal": True, name: value}, "this")
    for gated in (False, True):
        mixed_attention(layer(gated), *STATES, CALL, **{name: None})
        if gated or name not in OF_SDPA:
            with pytest.raises(ValueError, match=name):
                mixed_attention(layer(gated), *STATES, CALL, **{name: 4})


def test_several_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"is_causal=False, position_bias, sliding_window"):
        refuse_variants({"position_bias": 1, "sliding_window": 8, "is_causal": False}, "this")
    with pytest.raises(ValueError, match="attention weights"):
        refuse_variants({"output_attentions": True}, "this")


@pytest.mark.parametrize("attention", [mixed_attention, realloc_attention])
def test_a_layer_with_a_window_keeps_it_and_nothing_else(attention: Any) -> None:
    window = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril().triu(-1)
    expected = mixed_attention(layer(False), *STATES, window)[0]
    assert torch.equal(attention(layer(False), *STATES, window, sliding_window=2)[0], expected)
    with pytest.raises(ValueError, match="never_heard_of"):
        attention(layer(False), *STATES, window, sliding_window=2, never_heard_of=4)


@pytest.mark.parametrize(
    ("heads", "dropout", "message"),
    [
        (2, 0.1, "no dropout"),
        (1, 0.0, "1 KV heads, but gates for 2"),
    ],
)
def test_calls_that_would_bypass_a_gate(heads: int, dropout: float, message: str) -> None:
    query, key, value = STATES
    with pytest.raises(ValueError, match=message):
        mixed_attention(layer(True), query, key[:, :heads], value[:, :heads], CALL, dropout=dropout)


@pytest.mark.parametrize(
    ("padding", "message"),
    [
        (torch.tensor([[True, False, True, True, True]]), "padding"),
        (torch.ones(1, 1, dtype=torch.bool), r"\(1, 1\).*5"),
    ],
)
def test_masks_with_holes_or_without_the_cache(padding: Tensor, message: str) -> None:
    call = MixedCall(1, 1, 5, 4, padding, True, lambda: None)
    with pytest.raises(ValueError, match=message):
        call.rows(torch.device("cpu"))


@pytest.mark.parametrize("padding", [None, torch.ones(1, 32, dtype=torch.bool)])
@pytest.mark.parametrize("offset", [0, torch.tensor(0)])
@pytest.mark.parametrize("queries", [4, 1])
def test_a_static_cache(queries: int, offset: int | Tensor, padding: Tensor | None) -> None:
    rest: dict[str, Any] = {"batch_size": 1, "mask_function": causal_mask_function}
    with pytest.raises(ValueError, match="static"):
        mixed_mask(q_length=queries, kv_length=32, q_offset=offset, attention_mask=padding, **rest)


@pytest.mark.parametrize("offset", [0, 5])
def test_a_mask_is_compared_with_the_causal_one_in_blocks(
    offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_module, "COMPARED_AT_ONCE", 2 * (offset + 7) * 3)  # three queries
    kinds = torch.zeros(2, offset + 7, dtype=torch.long)
    sizes: list[int] = []

    def within_images(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        sizes.append(row.numel() * query.numel() * key.numel())
        return (kinds[row, query] == 1) & (kinds[row, key] == 1)

    call = {
        "batch_size": 2,
        "q_length": 7,
        "kv_length": offset + 7,
        "q_offset": offset,
        "attention_mask": torch.tensor([[True] * (offset + 7), [False] + [True] * (offset + 6)]),
        "mask_function": or_masks(causal_mask_function, within_images),
    }
    assert is_plain_causal(call)
    assert max(sizes) == call_module.COMPARED_AT_ONCE
    assert sum(sizes) == 2 * (offset + 7) * 7
    kinds[1, -2:] = 1  # in different blocks
    assert not is_plain_causal(call)


def test_what_models_must_not_look_into_says_so() -> None:
    new: Any = NewStates(None, STATES[0])  # type: ignore[arg-type]
    for use in (lambda: new.shape, lambda: torch.chunk(new, 2), lambda: torch.cat([new, new])):
        with pytest.raises(ValueError, match="keys and values that the cache returns"):
            use()
    with pytest.raises(ValueError, match=r"attention mask.*dtype"):
        _ = CALL.dtype
