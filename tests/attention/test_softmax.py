"""Learned sinks and soft-capped logits, in every form of attention, against a plain reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from rlkv.attention import branches, softmax
from rlkv.attention.branches import full_attention, local_attention
from rlkv.attention.mixed import mix, plain_attention
from rlkv.attention.softmax import Softmax
from tests.attention.test_branches import CPU, Padding, make_call, make_states, real_queries
from tests.attention.test_call import layer
from tests.helpers.mixed_reference import mixed_by_head_attention

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, -0.2])  # of 3 KV heads with 2 query heads each
KINDS = {
    "capped": Softmax(0.25, cap=0.7),
    "sinks": Softmax(0.25, sinks_N=SINKS),
    "both": Softmax(0.4, cap=1.5, sinks_N=SINKS),
}
TOLERANCE = 2e-6  # float32 sums of at most 300 terms of size ~1


def reference(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, kind: Softmax) -> Tensor:
    """Attend in float64, one query head at a time: mask bool ``[B, 1, Q, K]``."""
    states = [state.double() for state in (query, key, value)]
    heads = torch.ones(key.shape[1], dtype=torch.bool)
    softmax = (kind.scale, kind.cap, kind.sinks_N)
    return mixed_by_head_attention(*states, heads, mask[:, 0], mask[:, 0], *softmax).transpose(1, 2)


@pytest.mark.parametrize("block", [2**24, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_equals_the_reference(
    kind: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are smaller than keys, and the queries are read at once or one by one."""
    monkeypatch.setattr(softmax, "SCORES_AT_ONCE", block)
    query, key, value = make_states(make_call([(0, 0)] * 2, 30))
    states = (query, key, value[..., :5])
    causal = torch.ones(1, 1, 30, 30).tril() > 0
    expected = reference(*states, causal, KINDS[kind])
    added = torch.zeros(1, 1, 30, 30).masked_fill(~causal, -torch.inf)
    for given in ({"causal": True}, {"mask": causal}, {"mask": added}):
        found = KINDS[kind].attend(*states, **given)
        assert (found - expected).abs().max() < TOLERANCE
    seen = torch.ones(1, 1, 1, 30) > 0
    everything = KINDS[kind].attend(*states)
    assert (everything - reference(*states, seen, KINDS[kind])).abs().max() < TOLERANCE


@pytest.mark.parametrize("queries", [30, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_causal_call_read_the_keys_that_they_see(
    kind: str, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients are those of one block, whatever keys lie behind the queries."""
    states = [state.detach().double() for state in make_states(make_call([(0, 0)] * 2, 30))]
    states[0] = states[0][:, :, :queries]
    found = []
    for block in (30, 4):
        monkeypatch.setattr(softmax, "SCORES_AT_ONCE", block * 2 * 6 * 30)
        inputs = [state.clone().requires_grad_() for state in states]
        with FlopCounterMode(display=False) as counter:
            out = KINDS[kind].attend(*inputs, causal=True)
        gradients = torch.autograd.grad(out.sin().sum(), inputs)
        found.append((counter.get_total_flops(), out, *gradients))
    whole, blocks = found
    for own, expected in zip(blocks[1:], whole[1:], strict=True):
        assert (own - expected).abs().max() < 1e-14  # float64 sums of 30 terms
    seen = sum(min(4, queries - at) * min(at + 4, queries) for at in range(0, queries, 4))
    assert blocks[0] == whole[0] * seen // queries**2


FORMS: list[tuple[Padding, int]] = [
    ([(0, 0), (0, 0)], 1),
    ([(13, 0), (0, 0)], 1),
    ([(0, 9), (0, 0)], 7),
    ([(13, 0), (200, 0)], 7),
    ([(0, 0), (0, 0)], 263),
    ([(20, 15), (64, 0)], 263),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lengths", "q_length"), FORMS)
def test_branches_equal_the_reference(lengths: Padding, q_length: int, kind: str) -> None:
    """One query, some, and all: gathered, dense and banded forms."""
    call = make_call(lengths, 263, q_length)
    states = make_states(call)
    seen = call.dense_local_mask(263, 0, CPU)
    found = full_attention(*states, call, KINDS[kind])
    real = real_queries(call).expand_as(found)
    assert (found - reference(*states, seen, KINDS[kind]))[real].abs().max() < TOLERANCE
    for sizes in ((4, 16), (0, 1)):
        expected = reference(*states, call.dense_local_mask(*sizes, CPU), KINDS[kind])
        found = local_attention(*states, call, *sizes, KINDS[kind])
        assert (found - expected)[real].abs().max() < TOLERANCE
        assert found.isfinite().all()


def test_no_form_for_plain_softmax_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither torch's fused attention nor FlexAttention, which a GPU would take here."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    call = make_call([(0, 0)], 263)
    local_attention(*make_states(call), call, 4, 16, KINDS["both"])
    with pytest.raises(AssertionError):
        branches.flex_local_attention(*make_states(call), call, 4, 16, KINDS["both"])


def test_heads_taken_apart_keep_their_sinks() -> None:
    call = make_call([(0, 0)], 30)
    query, key, value = make_states(call)
    whole = full_attention(query, key, value, call, KINDS["both"])
    for heads in (torch.tensor([2, 0]), torch.tensor([True, False, True])):
        states = query.unflatten(1, (3, 2))[:, heads].flatten(1, 2), key[:, heads], value[:, heads]
        found = full_attention(*states, call, KINDS["both"].of_heads(heads, 3))
        torch.testing.assert_close(found, whole.unflatten(1, (3, 2))[:, heads].flatten(1, 2))


def test_gradients_equal_finite_differences() -> None:
    """Of gates, states and sinks, by the banded form and the causal one."""
    call = make_call([(3, 0)], 150)
    inputs = [state.detach()[..., :2].double().requires_grad_() for state in make_states(call)]
    inputs += [SINKS.double().requires_grad_(), torch.rand(3).double().requires_grad_()]

    def mixed(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, alpha_H: Tensor) -> Tensor:
        kind = Softmax(0.5, 1.5, sinks)
        full = full_attention(query, key, value, call, kind)
        local = local_attention(query, key, value, call, 2, 3, kind)
        return mix(full, local, alpha_H)[:, :, 3:]

    assert torch.autograd.gradcheck(mixed, inputs, fast_mode=True)


def test_the_softmax_of_bfloat16_is_float32() -> None:
    call = make_call([(0, 0)], 200)
    states = [state.detach().bfloat16() for state in make_states(call)]
    products = states[0][:, :3] @ states[1].mT
    weights = KINDS["both"].weights(products, None, KINDS["both"].sinks_of(3, 200))
    assert weights.dtype == torch.float32
    expected = reference(*states, call.dense_local_mask(200, 0, CPU), KINDS["both"])
    found = full_attention(*states, call, KINDS["both"])
    assert found.dtype == torch.bfloat16
    # products, weights and outputs of 8 bits
    assert (found - expected).abs().max() < 0.02


# --- layers without a gate


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_without_a_gate_computes_them(kind: str) -> None:
    call = make_call([(0, 0)], 30)
    states = make_states(call)
    window = call.dense_local_mask(0, 4, CPU)
    own = {"softcap": KINDS[kind].cap, "s_aux": KINDS[kind].sinks_N}
    everything = call.dense_local_mask(30, 0, CPU)
    for mask, seen in ((window, window), (None, everything), (call, everything)):
        found, _ = plain_attention(layer(False), *states, mask, KINDS[kind].scale, **own)
        expected = reference(*states, seen, KINDS[kind]).transpose(1, 2)
        assert (found - expected).abs().max() < TOLERANCE
    one = make_call([(0, 0)], 30, 1)
    found, _ = plain_attention(layer(False), states[0][:, :, -1:], *states[1:], one, 0.25, **own)
    alone, _ = plain_attention(layer(False), *states, None, 0.25, **own)
    torch.testing.assert_close(found, alone[:, -1:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout": 0.1}, "has no dropout"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"is_causal": False}, "is_causal=False"),
        ({"s_aux": torch.zeros(3)}, r"s_aux has shape \[3\], but the layer has 6 query heads"),
    ],
)
def test_what_it_has_not(arguments: dict[str, Any], message: str) -> None:
    call = make_call([(0, 0)], 30)
    with pytest.raises(ValueError, match=message):
        plain_attention(layer(False), *make_states(call), None, **{"s_aux": SINKS} | arguments)
