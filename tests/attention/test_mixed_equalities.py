"""Mixed attention against the stock model, an explicit mask, single rows, teacher forcing and
finite differences.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlkv.attention import mixed
from rlkv.attention.head_gate import gate_parameters
from tests.helpers.gated import SINK, WINDOW, make_batch, make_gated, positions, set_gates
from tests.helpers.mixed_reference import local_mask
from tests.helpers.models import make_tiny_model

LENGTHS = [(0, 0), (7, 0), (60, 0), (150, 0)]
TOTAL = 230  # beyond S + W + 2 blocks: the banded form runs
# float32 through three layers of random weights, logits of size ~10: what two orders of summation
# differ by
TOLERANCE = 2e-5


def test_all_ones_equals_the_unpatched_model(family: str) -> None:
    stock, gated = make_tiny_model(family), make_gated(family, 1.0)
    ids, mask = make_batch(LENGTHS, TOTAL)
    with torch.no_grad():
        expected = stock(ids, attention_mask=mask, position_ids=positions(mask)).logits
        unpadded = stock(ids[:1]).logits
        found = gated(ids, attention_mask=mask, position_ids=positions(mask)).logits
        found_unpadded = gated(ids[:1]).logits
    with torch.enable_grad():  # both branches run
        both = gated(ids, attention_mask=mask, position_ids=positions(mask)).logits
    real = mask.bool()
    for name, error in {
        "padded": (found - expected)[real].abs().max().item(),
        "unpadded": (found_unpadded - unpadded).abs().max().item(),
        "both branches": (both - expected)[real].abs().max().item(),
    }.items():
        print(f"{family}: gates 1 vs unpatched, {name}: max error {error:.2e}")
        assert error < TOLERANCE


def test_all_zeros_equals_an_explicit_mask(family: str) -> None:
    stock, gated = make_tiny_model(family), make_gated(family, 0.0)
    ids, mask = make_batch(LENGTHS, TOTAL)
    explicit = local_mask(mask.bool(), SINK, WINDOW)[:, None]
    explicit = explicit | torch.eye(
        TOTAL, dtype=torch.bool
    )  # padding queries: any finite value will do
    with torch.no_grad():
        expected = stock(ids, attention_mask=explicit, position_ids=positions(mask)).logits
        everything = stock(ids, attention_mask=mask, position_ids=positions(mask)).logits
        found = gated(ids, attention_mask=mask, position_ids=positions(mask)).logits
    both = gated(ids, attention_mask=mask, position_ids=positions(mask)).logits
    real = mask.bool()
    error = max(
        (found - expected)[real].abs().max().item(), (both - expected)[real].abs().max().item()
    )
    print(f"{family}: gates 0 vs explicit mask: max error {error:.2e}")
    assert error < TOLERANCE
    assert (expected - everything)[real].abs().max() > 0.1  # the mask hides something that matters


def counting_heads(branch: Any, heads: list[int]) -> Any:
    def count(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        heads.append(key.shape[1])
        return branch(query, key, *args, **kwargs)

    return count


@pytest.mark.parametrize("lengths", [LENGTHS, [(0, 0), (0, 40)]])
def test_a_mask_of_heads_computes_each_head_once(
    family: str, lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gradients, one branch per head; with them, both, of which the gates take one."""
    heads = []
    gated = make_gated(family, 1.0)
    for branch in ("full_attention", "local_attention"):
        monkeypatch.setattr(mixed, branch, counting_heads(getattr(mixed, branch), heads))
    parameters = [parameter for _, parameter in gate_parameters(gated)]
    for layer, parameter in enumerate(parameters):
        parameter.data[layer % len(parameter)] = 0.0
    assert {tuple(parameter.unique().tolist()) for parameter in parameters} == {(0.0, 1.0)}
    ids, mask = make_batch(lengths, TOTAL)
    with torch.no_grad():
        found = gated(ids, attention_mask=mask, position_ids=positions(mask)).logits
    assert sum(heads) == sum(map(len, parameters))
    both = gated(ids, attention_mask=mask, position_ids=positions(mask)).logits
    assert sum(heads) == 3 * sum(map(len, parameters))
    assert (found - both)[mask.bool()].abs().max() < TOLERANCE


def test_left_padded_rows_equal_single_rows(family: str) -> None:
    gated = make_gated(family, "random")
    ids, mask = make_batch(LENGTHS, TOTAL)
    error = 0.0
    with torch.no_grad():
        batched = gated(ids, attention_mask=mask, position_ids=positions(mask)).logits
        for row, (left, _) in enumerate(LENGTHS):
            single = gated(ids[row : row + 1, left:]).logits
            error = max(error, (batched[row, left:] - single[0]).abs().max().item())
    print(f"{family}: left-padded batch vs single rows: max error {error:.2e}")
    assert error < TOLERANCE


def test_right_padded_rows_equal_single_rows(family: str) -> None:
    gated = make_gated(family, "random")
    ids, mask = make_batch([(0, 0), (0, 40), (0, 190)], TOTAL)
    with torch.no_grad():
        batched = gated(ids, attention_mask=mask).logits
        for row, length in enumerate(mask.sum(-1).tolist()):
            single = gated(ids[row : row + 1, :length]).logits
            assert (batched[row, :length] - single[0]).abs().max() < TOLERANCE


@pytest.mark.parametrize("value", [0.0, 1.0, "random"])
def test_generate_equals_teacher_forcing(family: str, value: float | str) -> None:
    gated = make_gated(family, value)
    ids, mask = make_batch([(0, 0), (3, 0), (9, 0)], 12)
    new = 30  # K passes S + W = 20 on the way: the gathered form takes over
    with torch.no_grad():
        out = gated.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        full_mask = torch.cat([mask, torch.ones(3, new, dtype=torch.long)], dim=1)
        forced = gated(
            out.sequences, attention_mask=full_mask, position_ids=positions(full_mask)
        ).logits
    error = (forced[:, 11:-1] - torch.stack(out.logits, 1)).abs().max().item()
    print(f"{family}: cached decode vs teacher forcing, gates {value}: max error {error:.2e}")
    assert error < TOLERANCE


class DoubleNorm(torch.nn.Module):
    """RMSNorm in the input's own dtype: the stock one passes through float32."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def test_gate_gradient_equals_finite_differences(family: str) -> None:
    gated = make_gated(family, "random")
    for parent in list(gated.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, DoubleNorm(child))
    gated.double()
    ids, mask = make_batch([(0, 0), (9, 0)], 200)

    def score() -> torch.Tensor:
        logits = gated(ids, attention_mask=mask, position_ids=positions(mask)).logits
        return logits[mask.bool()].log_softmax(-1)[:, 5].mean()

    gates = [gate for _, gate in gate_parameters(gated)]
    assert all(gate.dtype == torch.float64 for gate in gates)
    score().backward()
    step, worst = 1e-5, 0.0
    for gate in gates:
        for head in range(len(gate)):
            start = gate[head].item()
            values = []
            with torch.no_grad():
                for moved in (start + step, start - step):
                    gate[head] = moved
                    values.append(score().item())
                gate[head] = start
            difference = (values[0] - values[1]) / (2 * step)
            gradient = gate.grad[head].item()
            assert abs(gradient) > 1e-5
            worst = max(worst, abs(gradient - difference) / abs(gradient))
    print(f"{family}: gate gradient vs finite differences, float64: max relative error {worst:.2e}")
    assert worst < 1e-5  # rounding 1e-16 / 1e-5 over gradients of 1e-5 and larger


def test_two_models_with_different_sizes_live_side_by_side() -> None:
    small, large = (
        make_gated("llama", 0.0, sink=1, window=4),
        make_gated("llama", 0.0, sink=8, window=64),
    )
    ids, mask = make_batch([(0, 0)], 150)
    stock = make_tiny_model("llama")
    with torch.no_grad():
        for model, sink, window in [(small, 1, 4), (large, 8, 64), (small, 1, 4)]:
            expected = stock(
                ids, attention_mask=local_mask(mask.bool(), sink, window)[:, None]
            ).logits
            assert (model(ids).logits - expected).abs().max() < TOLERANCE


def test_float32_gates_on_a_bfloat16_base() -> None:
    gated = make_gated("llama", 0.999).to(torch.bfloat16)
    gates = [gate for _, gate in gate_parameters(gated)]
    assert all(gate.dtype == torch.float32 for gate in gates)
    assert gates[0][0].item() == pytest.approx(0.999, abs=1e-7)  # bfloat16(0.999) is 1.0
    ids, _ = make_batch([(0, 0)], 40)
    assert gated(ids).logits.dtype == torch.bfloat16
    gated(ids).logits.float().sum().backward()
    assert gates[0].grad.dtype == torch.float32
    set_gates(gated, 1.0)
    assert torch.equal(gates[0], torch.ones(4))
