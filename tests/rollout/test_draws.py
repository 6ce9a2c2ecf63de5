"""Draws per row, and tokens from draws."""

from __future__ import annotations

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from rlkv.rollout.draws import draw_tokens, row_draws


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
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.6, 0.95, 20), (1.3, 0.5, 0), (1.0, 1.0, 3)]
)
def test_tokens_follow_the_distribution_of_transformers(temperature: float, top_p: float, top_k: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 30) * 2
    scores = logits / temperature
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    expected = scores.softmax(-1)[0]
    draws = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000  # an even grid: no chance left
    tokens = torch.cat(
        [draw_tokens(logits.expand(10_000, -1), part, temperature, top_p, top_k) for part in draws.split(10_000)]
    )
    found = torch.bincount(tokens, minlength=30) / 100_000
    assert (found - expected).abs().max() < 5e-5  # two ends of an interval, each within half a grid step, and rounding
    assert set(tokens.tolist()) <= set(expected.nonzero()[:, 0].tolist())


def test_draws_at_the_ends_find_possible_tokens() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]]).expand(2, -1)
    draws = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    assert draw_tokens(logits, draws, 1.0, 1.0, 0).tolist() == [1, 2]
