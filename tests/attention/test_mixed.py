"""The chain of equalities of mixed attention.

Against the stock model, an explicit mask, single rows, teacher forcing and finite differences.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from rlkv.attention import mixed
from rlkv.attention.head_gate import gate_parameters
from tests.helpers.gated import SINK, WINDOW, fill_gates, make_batch, make_gated, positions
from tests.helpers.mixed_reference import local_mask
from tests.helpers.models import FAMILIES, SOFTMAXES, make_tiny_model

LENGTHS = [(0, 0), (7, 0), (60, 0), (150, 0)]
TOTAL = 230  # beyond S + W + 2 blocks: the banded form runs
# float32 through three layers of random weights, logits of size ~10: what two orders of summation
# differ by
TOLERANCE = 2e-5
EVERY_SOFTMAX = pytest.mark.parametrize("family", [*FAMILIES, *SOFTMAXES])


def logits_of(model: Any, ids: Tensor, mask: Tensor, gradients: bool = False) -> Tensor:
    with torch.set_grad_enabled(gradients):
        return model(ids, attention_mask=mask, position_ids=positions(mask)).logits


@EVERY_SOFTMAX
def test_all_ones_equals_the_unpatched_model(family: str) -> None:
    stock, gated = make_tiny_model(family), make_gated(family, 1.0)
    ids, mask = make_batch(LENGTHS, TOTAL)
    expected = logits_of(stock, ids, mask)
    for gradients in (False, True):  # with them both branches run
        found = logits_of(gated, ids, mask, gradients)
        assert (found - expected)[mask.bool()].abs().max() < TOLERANCE
    with torch.no_grad():
        assert (gated(ids[:1]).logits - stock(ids[:1]).logits).abs().max() < TOLERANCE


def test_all_zeros_equals_an_explicit_mask(family: str) -> None:
    stock, gated = make_tiny_model(family), make_gated(family, 0.0)
    ids, mask = make_batch(LENGTHS, TOTAL)
    # padding queries see themselves: any finite value will do
    seen = local_mask(mask.bool(), SINK, WINDOW) | torch.eye(TOTAL, dtype=torch.bool)
    with torch.no_grad():
        own = {"attention_mask": seen[:, None], "position_ids": positions(mask)}
        expected = stock(ids, **own).logits
    for gradients in (False, True):
        found = logits_of(gated, ids, mask, gradients)
        assert (found - expected)[mask.bool()].abs().max() < TOLERANCE
    # the mask hides something that matters
    assert (expected - logits_of(stock, ids, mask))[mask.bool()].abs().max() > 0.1


def counting_heads(branch: Any, heads: list[int]) -> Any:
    def count(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        heads.append(key.shape[1])
        return branch(query, key, *args, **kwargs)

    return count


@pytest.mark.parametrize("lengths", [LENGTHS, [(0, 0), (0, 40)]])
def test_a_mask_of_heads_computes_each_head_once(
    lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gradients, one branch per head; with them, both, of which the gates take one."""
    heads: list[int] = []
    gated = make_gated("qwen3", 1.0)
    for branch in ("full_attention", "local_attention"):
        monkeypatch.setattr(mixed, branch, counting_heads(getattr(mixed, branch), heads))
    parameters = [parameter for _, parameter in gate_parameters(gated)]
    for layer, parameter in enumerate(parameters):
        parameter.data[layer % len(parameter)] = 0.0
    ids, mask = make_batch(lengths, TOTAL)
    found = logits_of(gated, ids, mask)
    assert sum(heads) == sum(map(len, parameters))
    both = logits_of(gated, ids, mask, gradients=True)
    assert sum(heads) == 3 * sum(map(len, parameters))
    assert (found - both)[mask.bool()].abs().max() < TOLERANCE


@EVERY_SOFTMAX
@pytest.mark.parametrize("lengths", [LENGTHS, [(0, 0), (0, 40), (0, 190)]], ids=["left", "right"])
def test_padded_rows_equal_single_rows(family: str, lengths: list[tuple[int, int]]) -> None:
    gated = make_gated(family, "random")
    ids, mask = make_batch(lengths, TOTAL)
    batched = logits_of(gated, ids, mask)
    for row, (left, right) in enumerate(lengths):
        with torch.no_grad():
            single = gated(ids[row : row + 1, left : TOTAL - right]).logits
        assert (batched[row, left : TOTAL - right] - single[0]).abs().max() < TOLERANCE


@EVERY_SOFTMAX
@pytest.mark.parametrize("value", [0.0, 1.0, "random"])
def test_generate_equals_teacher_forcing(family: str, value: float | str) -> None:
    gated = make_gated(family, value)
    ids, mask = make_batch([(0, 0), (3, 0), (9, 0)], 12)
    new = 30  # K passes S + W = 20 on the way: the gathered form takes over
    settings = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    with torch.no_grad():
        out = gated.generate(input_ids=ids, attention_mask=mask, **settings)
    forced = logits_of(gated, out.sequences, torch.cat([mask, mask.new_ones(3, new)], dim=1))
    assert (forced[:, 11:-1] - torch.stack(out.logits, 1)).abs().max() < TOLERANCE


class DoubleNorm(torch.nn.Module):
    """RMSNorm in the input's own dtype: the stock one passes through float32."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        is_gemma = hasattr(norm, "eps")
        self.weight = norm.weight + 1 if is_gemma else norm.weight
        self.eps = norm.eps if is_gemma else norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def in_double(gated: PeftModel) -> PeftModel:
    for parent in list(gated.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, DoubleNorm(child))
    return gated.double()


@EVERY_SOFTMAX
def test_gate_gradient_equals_finite_differences(family: str) -> None:
    gated = in_double(make_gated(family, "random"))
    ids, mask = make_batch([(0, 0), (9, 0)], 200)

    def score(gradients: bool = False) -> Tensor:
        logits = logits_of(gated, ids, mask, gradients)
        return logits[mask.bool()].log_softmax(-1)[:, 5].mean()

    gates = [gate for _, gate in gate_parameters(gated)]
    score(gradients=True).backward()
    step = 1e-5
    for gate in gates:
        for head, start in enumerate(gate.tolist()):
            values = []
            for moved in (start + step, start - step, start):
                gate.data[head] = moved
                values.append(score().item())
            difference = (values[0] - values[1]) / (2 * step)
            gradient = gate.grad[head].item()
            assert abs(gradient) > 1e-5
            # rounding 1e-16 / 1e-5 over gradients of 1e-5 and larger
            assert abs(gradient - difference) < 1e-5 * abs(gradient)


def test_two_models_with_different_sizes_live_side_by_side() -> None:
    sizes = [(1, 4), (8, 64)]
    models = [make_gated("llama", 0.0, sink=sink, window=window) for sink, window in sizes]
    ids, mask = make_batch([(0, 0)], 150)
    stock = make_tiny_model("llama")
    with torch.no_grad():
        for i in (0, 1, 0):
            seen = local_mask(mask.bool(), *sizes[i])[:, None]
            expected = stock(ids, attention_mask=seen).logits
            assert (models[i](ids).logits - expected).abs().max() < TOLERANCE


def test_float32_gates_on_a_bfloat16_base() -> None:
    gated = make_gated("llama", 0.999).to(torch.bfloat16)
    gates = [gate for _, gate in gate_parameters(gated)]
    assert all(gate.dtype == torch.float32 for gate in gates)
    assert gates[0][0].item() == pytest.approx(0.999, abs=1e-7)  # bfloat16(0.999) is 1.0
    ids, _ = make_batch([(0, 0)], 40)
    assert gated(ids).logits.dtype == torch.bfloat16
    gated(ids).logits.float().sum().backward()
    assert gates[0].grad.dtype == torch.float32
    fill_gates(gated, 1.0)
    assert torch.equal(gates[0], torch.ones(4))
