"""Rollouts of the training loop against transformers' own."""

from __future__ import annotations

import pytest
import torch

from rlkv.attention import LocalSizes
from rlkv.rollout.base import Rows, SamplingParams
from rlkv.rollout.hf import GatedHFEngine, roll_out
from tests.helpers.models import make_tiny_model

PROMPTS = [[5, 6, 7], [9] * 11, [30, 31], [40, 50, 60, 70, 80, 90], [12]]


def sample(
    model: object,
    prompts: list[list[int]],
    ends: list[int],
    first: int = 0,
    rollout: int = 0,
    temperature: float = 1.0,
    max_rows: int = 64,
) -> list[list[int]]:
    """Return tokens, of rows numbered from ``first`` on."""
    rows = Rows(prompts, list(range(first, first + len(prompts))), rollout)
    sampling = SamplingParams(40, temperature=temperature, seed=1)
    found = {row.index: row.token_ids for row in roll_out(model, rows, sampling, ends, 0, max_rows)}
    return [found[i] for i in range(len(prompts))]


def test_cold_rollouts_equal_greedy_generate(family: str) -> None:
    model = make_tiny_model(family)
    ends = [2, 17, 44]
    found = sample(model, PROMPTS, ends, temperature=1e-6)
    for prompt, completion in zip(PROMPTS, found, strict=True):
        options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": ends}
        with torch.no_grad():
            expected = model.generate(torch.tensor([prompt]), pad_token_id=0, **options)
        assert completion == expected[0, len(prompt) :].tolist()


def test_a_row_is_sampled_alike_in_any_company() -> None:
    model = make_tiny_model("llama")
    # a tenth of the vocabulary: rows end at many different steps and the batch shrinks
    ends = list(range(2, 12))
    together = sample(model, PROMPTS * 4, ends, rollout=3)
    assert len({len(completion) for completion in together}) > 5
    for completion in together:
        assert completion[-1] in ends or len(completion) == 40
        assert not any(token in ends for token in completion[:-1])
    assert sample(model, PROMPTS * 4, ends, rollout=3, max_rows=3) == together
    assert sample(model, (PROMPTS * 4)[10:], ends, first=10, rollout=3) == together[10:]
    assert sample(model, PROMPTS * 4, ends, rollout=4) != together


def test_logprobs_are_those_of_the_tempered_distribution() -> None:
    model = make_tiny_model("llama")
    sampling = SamplingParams(20, temperature=0.7, top_p=0.6, top_k=9, seed=1)
    rows = Rows(PROMPTS, list(range(5)), 0)
    found = list(roll_out(model, rows, sampling, [2, 17], 0, max_rows=3))
    assert len(found) == 5
    for row in found:
        prompt = PROMPTS[row.index]
        logits = model(torch.tensor([prompt + row.token_ids])).logits[0, len(prompt) - 1 : -1]
        picked = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(row.token_ids)[:, None])
        # before top-k and top-p
        assert (torch.tensor(row.logprobs) - picked[:, 0]).abs().max() < 2e-5


def test_gates_of_another_shape_are_refused() -> None:
    engine = GatedHFEngine(make_tiny_model("llama"), LocalSizes(2, 6), pad_id=0)
    with pytest.raises(ValueError, match=r"gates \[3, 4\], got \[2, 4\]"):
        engine.set_gates(torch.ones(2, 4))
