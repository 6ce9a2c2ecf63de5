"""Rollouts and log-probabilities of the training loop against transformers' own."""

from __future__ import annotations

import pytest
import torch

from rlkv.rollout.base import SamplingParams
from rlkv.rollout.gated import Rows
from rlkv.training.gate_loss import completion_logprobs, shift_left
from rlkv.training.rollout import roll_out
from tests.helpers.models import make_tiny_model

PROMPTS = [[5, 6, 7], [9] * 11, [30, 31], [40, 50, 60, 70, 80, 90], [12]]


def sample(
    model: object,
    prompts: list[list[int]],
    first: int,
    rollout: int,
    ends: list[int],
    temperature: float = 1.0,
    max_rows: int = 64,
) -> list:
    """Tokens only, of rows numbered from ``first`` on."""
    rows = Rows(prompts, list(range(first, first + len(prompts))), rollout)
    sampling = SamplingParams(40, temperature=temperature, seed=1)
    found = {row.index: row.token_ids for row in roll_out(model, rows, sampling, ends, 0, max_rows)}
    return [found[i] for i in range(len(prompts))]


def test_cold_rollouts_equal_greedy_generate(family: str) -> None:
    model = make_tiny_model(family)
    found = sample(model, PROMPTS, 0, 0, [2, 17, 44], temperature=1e-6)
    for prompt, completion in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            expected = model.generate(
                torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=[2, 17, 44], pad_token_id=0
            )
        assert completion == expected[0, len(prompt) :].tolist()


def test_a_row_is_sampled_alike_in_any_company() -> None:
    model = make_tiny_model("llama")
    ends = list(range(2, 12))  # a tenth of the vocabulary: rows end at many different steps and the batch shrinks
    together = sample(model, PROMPTS * 4, 0, 3, ends)
    assert len({len(completion) for completion in together}) > 5
    assert all(c[-1] in ends or len(c) == 40 for c in together)
    assert not any(token in ends for c in together for token in c[:-1])
    in_chunks = sample(model, PROMPTS * 4, 0, 3, ends, max_rows=3)
    second_half = sample(model, (PROMPTS * 4)[10:], 10, 3, ends)
    assert in_chunks == together
    assert second_half == together[10:]
    assert sample(model, PROMPTS * 4, 0, 4, ends) != together


def test_logprobs_are_those_of_the_tempered_distribution() -> None:
    model = make_tiny_model("llama")
    sampling = SamplingParams(20, temperature=0.7, top_p=0.6, top_k=9, seed=1)
    found = list(roll_out(model, Rows(PROMPTS, list(range(5)), 0), sampling, [2, 17], 0, max_rows=3))
    assert len(found) == 5
    for row in found:
        prompt, ids, logprobs = PROMPTS[row.index], row.token_ids, row.logprobs
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]  # not truncated
        assert (torch.tensor(logprobs) - expected).abs().max() < 2e-5


def make_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts padded on the left in 9 columns, completions on the right in 14."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 128, (6, 23), generator=generator)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate([(9, 14), (3, 1), (1, 14), (9, 2), (5, 7), (4, 13)]):
        mask[row, 9 - prompt : 9 + completion] = 1
    return ids * mask, mask


def test_shifting_moves_the_padding_only() -> None:
    ids, mask = make_rows()
    shifted, offset = shift_left(ids, mask)
    for row in range(6):
        real = ids[row][mask[row].bool()]
        assert torch.equal(shifted[row, : len(real)], real)
        assert offset[row] == mask[row].int().argmax()


@pytest.mark.parametrize("max_rows", [1, 4, 6])
def test_logprobs_equal_those_of_single_rows(max_rows: int) -> None:
    model = make_tiny_model("llama")
    ids, mask = make_rows()
    widths = []

    def score(rows: torch.Tensor, real: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        widths.append(rows.shape[1])
        logits = model(rows, attention_mask=real).logits[:, :-1].log_softmax(-1)
        picked = logits.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        return picked.masked_fill(labels[:, 1:] == -100, 0)

    logprobs = completion_logprobs(score, ids, mask, 14, max_rows)
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == 23
    for row in range(6):
        real = ids[row][mask[row].bool()]
        completion = int(mask[row, 9:].sum())
        single = model(real[None]).logits[0, :-1].log_softmax(-1)
        expected = single.gather(-1, real[1:, None])[-completion:, 0]
        assert (logprobs[row, :completion] - expected).abs().max() < 2e-5
        assert not logprobs[row, completion:].any()
    logprobs.sum().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0
