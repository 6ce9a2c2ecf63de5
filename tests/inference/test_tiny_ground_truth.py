"""inference/tiny_ground_truth.py on two problems, the elimination itself left out: what it
measures, and of what.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from rlkv import tiny
from rlkv.cache import CacheSettings
from rlkv.evaluation.elimination import Elimination, Score
from rlkv.gates.allocation import HeadAllocation
from rlkv.tiny import longest_solution
from rlkv.utils.runtime import provenance
from tests.helpers.plain_decoding import decode
from tests.helpers.programs import load_program

PROGRAM = load_program("inference/tiny_ground_truth.py")
CONFIG = PROGRAM.GroundTruthConfig(
    model="tiny", num_problems=2, num_traces=2, longest=3, random_draws=1, device="cpu"
)
ORDER = [(layer, head) for head in range(6) for layer in (2, 0, 3, 1)]


def test_accuracies_belong_to_their_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    scores: list[tuple[float, float]] = []

    def in_a_fixed_order(
        score: Score, start: HeadAllocation, on_call: Callable[[], None]
    ) -> list[Elimination]:
        scores.append(score(start))
        return [Elimination(layer, head, (0.5, -1.0)) for layer, head in ORDER]

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
    assert found["random_half_mean"] == found["random_half_accuracy"][0]
    steps = found["elimination"]
    lost = found["accuracy_lost_by_single_head"]
    assert [len(row) for row in lost] == [6] * 4
    first_layer, first_head = ORDER[0]
    assert lost[first_layer][first_head] == 1 - steps[0]["accuracy"]
    assert [(step["layer"], step["head"]) for step in steps] == ORDER
    assert {(step["traces_reproduced"], step["mean_log_probability"]) for step in steps} == {
        (0.5, -1.0)
    }
    curve = [step["accuracy"] for step in steps]
    assert {k: curve[k - 1] for k in (1, 9, 24)} == {k: accuracy(after(k)) for k in (1, 9, 24)}
    assert found["heads_removable_before_0.95"] == next(
        k for k, share in enumerate(curve) if share < 0.95
    )
    assert len(set(curve)) > 1, "the order takes heads that are needed"
