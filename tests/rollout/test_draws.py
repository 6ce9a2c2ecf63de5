"""Draws per row, and tokens from draws."""

from __future__ import annotations

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from rlkv.rollout.decoding import AT_ONCE, draw_tokens, row_draws


def test_draws_belong_to_the_row_and_the_rollout() -> None:
    together = row_draws(3, 5, range(0, 6), 40)
    assert together.shape == (6, 40)
    assert torch.equal(together[4:], row_draws(3, 5, range(4, 6), 40))
    assert torch.equal(together[:, :7], row_draws(3, 5, range(0, 6), 7))
    assert together.unique().numel() == 240
    for other in (row_draws(4, 5, range(0, 6), 40), row_draws(3, 6, range(0, 6), 40)):
        assert not (other == together).any()
    assert 0 <= together.min() < together.max() < 1


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(1.0, 1.0, 0), (0.6, 0.95, 20), (1.3, 0.5, 0), (1.0, 1.0, 3)],
)
def test_tokens_follow_the_distribution_of_transformers(
    temperature: float, top_p: float, top_k: int
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 30) * 2
    scores = logits / temperature
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    expected = scores.softmax(-1)[0]
    draws = (
        torch.arange(100_000, dtype=torch.float64) + 0.5
    ) / 100_000  # an even grid: no chance left
    tokens = torch.cat(
        [
            draw_tokens(logits.expand(10_000, -1), part, temperature, top_p, top_k)
            for part in draws.split(10_000)
        ]
    )
    found = torch.bincount(tokens, minlength=30) / 100_000
    assert (
        found - expected
    ).abs().max() < 5e-5  # two ends of an interval, each within half a grid step, and rounding
    assert set(tokens.tolist()) <= set(expected.nonzero()[:, 0].tolist())


def of_a_sorted_vocabulary(
    logits: torch.Tensor, draws: torch.Tensor, kinds: tuple[float, float, int]
) -> torch.Tensor:
    """The definition: sort all tokens, of equal ones the first comes first."""
    temperature, top_p, top_k = kinds
    probs, tokens = torch.softmax(logits.double() / temperature, dim=-1).sort(
        descending=True, stable=True
    )
    if top_k:
        probs[:, top_k:] = 0
    probs[probs.cumsum(-1) - probs >= top_p * probs.sum(-1, keepdim=True)] = 0
    cumulative = probs.cumsum(-1)
    index = (cumulative <= draws[:, None] * cumulative[:, -1:]).sum(-1)
    return tokens.gather(1, index[:, None])[:, 0]


@pytest.mark.parametrize(
    ("spread", "kinds", "sorted_tokens"),
    [
        (6.0, (1.0, 0.95, 0), AT_ONCE),
        (6.0, (0.6, 0.93, 20), AT_ONCE),
        (6.0, (1.0, 1.0, 2000), 5000),
        (1.0, (1.0, 0.95, 0), 5000),
        (1.0, (1.3, 0.93, 20), AT_ONCE),
        (0.0, (1.0, 0.93, 20), 5000),
    ],
)
def test_few_tokens_are_sorted_and_equal_ones_keep_their_order(
    spread: float,
    kinds: tuple[float, float, int],
    sorted_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits in bfloat16 have many equal ones, and a flat distribution needs more than the most
    likely tokens.
    """
    logits = (spread * torch.randn(7, 5000, generator=torch.Generator().manual_seed(0))).bfloat16()
    draws = torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted, widths, sort = of_a_sorted_vocabulary(logits, draws, kinds), [], torch.Tensor.sort
    monkeypatch.setattr(
        torch.Tensor, "sort", lambda self, **how: widths.append(self.shape[1]) or sort(self, **how)
    )
    assert torch.equal(draw_tokens(logits, draws, *kinds), wanted)
    assert max(widths) == sorted_tokens


def test_draws_at_the_ends_find_possible_tokens() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]]).expand(2, -1)
    draws = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    assert draw_tokens(logits, draws, 1.0, 1.0, 0).tolist() == [1, 2]
