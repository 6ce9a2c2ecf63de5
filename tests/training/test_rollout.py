"""Rollouts and log-probabilities of the training loop against transformers' own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.rollout.base import Rows, Sample, SamplingParams
from rlkv.rollout.hf import GatedHFEngine, roll_out
from rlkv.training.trainer import judged
from tests.helpers import engine_run, random_run
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
                torch.tensor([prompt]),
                max_new_tokens=40,
                do_sample=False,
                eos_token_id=[2, 17, 44],
                pad_token_id=0,
            )
        assert completion == expected[0, len(prompt) :].tolist()


def test_a_row_is_sampled_alike_in_any_company() -> None:
    model = make_tiny_model("llama")
    ends = list(
        range(2, 12)
    )  # a tenth of the vocabulary: rows end at many different steps and the batch shrinks
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
    found = list(
        roll_out(model, Rows(PROMPTS, list(range(5)), 0), sampling, [2, 17], 0, max_rows=3)
    )
    assert len(found) == 5
    for row in found:
        prompt, ids, logprobs = PROMPTS[row.index], row.token_ids, row.logprobs
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        expected = (
            (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        )  # not truncated
        assert (torch.tensor(logprobs) - expected).abs().max() < 2e-5


def test_completions_are_judged_while_others_are_decoded() -> None:
    first_judged = threading.Event()

    def ended() -> Iterator[tuple[int, Sample]]:
        yield 1, Sample([7], [0.0], "stop", "v")
        assert first_judged.wait(20), (
            "the first completion was not judged before the second one ended"
        )
        yield 0, Sample([5], [0.0], "stop", "v")

    def judge(batch: list[tuple[int, Sample]]) -> list[float]:
        first_judged.set()
        return [float(sample.token_ids[0]) for _, sample in batch]

    found, seconds = judged(ended(), judge)
    assert [(sample.token_ids, reward) for sample, reward in found] == [([5], 5.0), ([7], 7.0)]
    assert seconds >= 0


def test_completions_that_end_while_others_are_judged_are_one_batch() -> None:
    begun, all_ended, batches = threading.Event(), threading.Event(), list[list[int]]()

    def ended() -> Iterator[tuple[int, Sample]]:
        for index in range(6):
            yield index, Sample([index], [0.0], "stop", "v")
            assert begun.wait(20)
        all_ended.set()

    def judge(batch: list[tuple[int, Sample]]) -> list[float]:
        batches.append([index for index, _ in batch])
        begun.set()
        assert all_ended.wait(20)
        return [0.0] * len(batch)

    assert [sample.token_ids for sample, _ in judged(ended(), judge)[0]] == [[i] for i in range(6)]
    assert batches == [[0], [1, 2, 3, 4, 5]]


def test_an_error_of_the_verifier_is_raised() -> None:
    def judge(batch: list[tuple[int, Sample]]) -> list[float]:
        raise ValueError("no verdict")

    with pytest.raises(ValueError, match="no verdict"):
        judged([(0, Sample([1], [0.0], "stop", "v"))], judge)


class OneServerOff(GatedHFEngine):
    """Every fourth row is the second server's, whose weights are others."""

    def sample(self, rows: Rows, *args: Any) -> Iterator[Any]:
        for index, sample in super().sample(rows, *args):
            if rows.numbers[index] % 4 == 3:
                yield (
                    index,
                    replace(sample, logprobs=[value - 0.9 for value in sample.logprobs], source=1),
                )
            else:
                yield index, sample


def test_a_server_with_other_weights_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_run.make_engine(OneServerOff)  # the mean over all rows is far from the limit
    monkeypatch.setattr("rlkv.training.grpo.open_engine", lambda *args: nullcontext(engine))
    servers = ["--rollout", "vllm-server", "--rollout_servers", "http://good:1, http://bad:2"]
    with pytest.raises(
        ValueError, match=r"by 0\.90 on average: the rollout engine at http://bad:2 must serve"
    ):
        random_run.run(tmp_path / "run", servers)
