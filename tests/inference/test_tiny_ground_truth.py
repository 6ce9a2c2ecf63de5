"""The measured ground truth: scores of traces, the exhaustive elimination, and accuracies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv import tiny
from rlkv.cache import CacheSettings
from rlkv.gates.allocation import HeadAllocation
from rlkv.models.prompts import render_prompt
from rlkv.tiny import longest_solution
from rlkv.utils.runtime import provenance
from tests.helpers.plain_decoding import decode
from tests.helpers.programs import load_program

PROGRAM = load_program("inference/tiny_ground_truth.py")
CONFIG = PROGRAM.GroundTruthConfig(
    model="tiny", num_problems=2, num_traces=2, longest=3, random_draws=1, device="cpu"
)
ALL = HeadAllocation(torch.ones(2, 3, dtype=torch.bool))
WORTH = torch.tensor([[0.1, 0.5, 0.0], [0.3, 0.0, 0.2]])
ORDER = [(layer, head) for head in range(6) for layer in (2, 0, 3, 1)]


def test_accuracies_belong_to_their_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    scores: list[tuple[float, float]] = []

    def in_a_fixed_order(
        score: Any, start: HeadAllocation, on_call: Callable[[], None]
    ) -> list[Any]:
        scores.append(score(start))
        return [PROGRAM.Elimination(layer, head, (0.5, -1.0)) for layer, head in ORDER]

    monkeypatch.setattr(PROGRAM, "backward_elimination", in_a_fixed_order)
    found = PROGRAM.measure_ground_truth(CONFIG)
    assert set(found) == set(json.loads(tiny.GROUND_TRUTH.read_text())) - provenance().keys()
    assert json.loads(json.dumps(found)) == found
    assert (found["num_problems"], found["num_traces"], found["definitions"]) == (2, 2, [3, 3])
    assert scores[0][0] == 1, "the traces are what the full cache writes"

    model, tokenizer = tiny.load()
    drawn = tiny.problems(2, PROGRAM.SEEDS["accuracy"], max_definitions=3)

    def accuracy(allocation: HeadAllocation) -> float:
        _, correct = decode(
            model, tokenizer, drawn, allocation, CacheSettings(4, 16), longest_solution(3)
        )
        return sum(correct) / 2

    def after(steps: int) -> HeadAllocation:
        return HeadAllocation.from_order(ORDER, 4, 6, steps / 24)

    assert found["full_accuracy"] == accuracy(after(0)) == 1
    assert found["random_half_accuracy"] == [accuracy(HeadAllocation.random(4, 6, 0.5, 0))]
    steps = found["elimination"]
    lost = found["accuracy_lost_by_single_head"]
    assert [len(row) for row in lost] == [6] * 4
    first_layer, first_head = ORDER[0]
    assert lost[first_layer][first_head] == 1 - steps[0]["accuracy"]
    assert [(step["layer"], step["head"]) for step in steps] == ORDER
    assert (steps[0]["traces_reproduced"], steps[0]["mean_log_probability"]) == (0.5, -1.0)
    curve = [step["accuracy"] for step in steps]
    assert {k: curve[k - 1] for k in (1, 9, 24)} == {k: accuracy(after(k)) for k in (1, 9, 24)}
    removable = next(k for k, share in enumerate(curve) if share < 0.95)
    assert found["heads_removable_before_0.95"] == removable
    assert len(set(curve)) > 1, "the order takes heads that are needed"


def additive(allocation: HeadAllocation) -> float:
    return float((WORTH * allocation.full).sum())


def test_additive_worth_gives_ascending_order() -> None:
    calls = []
    steps = PROGRAM.backward_elimination(additive, ALL, lambda: calls.append(1))
    order = [(s.layer, s.head) for s in steps]
    assert order == [(0, 2), (1, 1), (0, 0), (1, 2), (1, 0), (0, 1)]  # ties to the lower index
    assert len(calls) == 6 * 7 // 2


def test_redundant_pair_is_seen_only_by_elimination() -> None:
    """Two heads that replace each other cost nothing alone, but one of them must stay."""

    def either(allocation: HeadAllocation) -> tuple[float, float]:
        one_left = bool(allocation.full[0, 0] or allocation.full[1, 0])
        return float(one_left), additive(allocation)

    for layer in (0, 1):
        assert either(PROGRAM.without_head(ALL.full, layer, 0))[0] == 1.0
    steps = PROGRAM.backward_elimination(either, ALL, lambda: None)
    assert (steps[-1].layer, steps[-1].head) == (1, 0)
    assert [s.score[0] for s in steps] == [1.0] * 5 + [0.0]


def test_share_of_traces_is_the_share_of_equal_decodings() -> None:
    model, tokenizer = tiny.load()
    problems = tiny.problems(24, seed=5, max_definitions=8)
    cache = CacheSettings(sink=4, window=16, prefill="local")
    full = HeadAllocation(torch.ones(4, 6, dtype=torch.bool))
    prompts = [
        tokenizer(render_prompt(tokenizer, p["problem"]), add_special_tokens=False).input_ids
        for p in problems
    ]
    whole, _ = decode(model, tokenizer, problems, full, cache, 130)
    traces = [(p, c.token_ids) for p, c in zip(prompts, whole, strict=True)]
    scorer = PROGRAM.TraceScorer(model, traces, sink=4, window=16)
    assert scorer(full)[0] == 1.0
    half = HeadAllocation.random(4, 6, 0.25, seed=1)
    decoded, _ = decode(model, tokenizer, problems, half, cache, 130)
    same = [c.token_ids == output for c, (_, output) in zip(decoded, traces, strict=True)]
    share, log_probability = scorer(half)
    assert 0 < sum(same) < len(same)  # a case in which the score could be wrong
    assert share == sum(same) / len(same)
    assert log_probability < scorer(full)[1]


def test_the_measurements_of_the_package_are_those_of_its_model(tmp_path: Path) -> None:
    PROGRAM.GroundTruthConfig(model="mine", output=tmp_path / "mine.json").check()
    with pytest.raises(ValueError, match=r"ground_truth\.json .* is that of tiny: .*--output"):
        PROGRAM.GroundTruthConfig(model="mine").check()


def test_needs_a_trace() -> None:
    with pytest.raises(ValueError, match="trace"):
        PROGRAM.TraceScorer(None, [], 4, 16)  # type: ignore[arg-type]
