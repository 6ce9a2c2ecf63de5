"""Re-ranking: the measured order within the span, the gates' own elsewhere."""

import json
import random
import runpy
import sys
from pathlib import Path

import pytest
import torch

from rlkv.evaluation.elimination import Span, rerank, with_order
from rlkv.gates.allocation import HeadAllocation, compression_order
from rlkv.gates.head_gates import HeadGates
from rlkv.tiny.task import draw_problem
from tests.helpers.paths import ROOT

# order of the gates: (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)
GATES = HeadGates(alpha=torch.tensor([[0.0, 0.0, 0.4], [0.5, 0.6, 0.9]]), mean_alpha=torch.arange(6).view(2, 3) / 10)
PROGRAM = ROOT / "inference" / "rerank_heads.py"
WORTH = torch.tensor([[9.0, 0.0, 0.7], [0.9, 0.1, 0.8]])


def worth(allocation: HeadAllocation) -> float:
    return float((WORTH * allocation.full).sum())


def test_measured_within_the_span() -> None:
    span = Span(GATES, 1 / 3, 2 / 3)
    calls: list[int] = []
    result, steps = rerank(span, worth, lambda: calls.append(1))
    assert [(s.layer, s.head) for s in steps] == [(1, 1), (0, 2)]
    # (0, 0) is worth the most, but the gates are trusted below the span
    assert compression_order(result) == [(0, 0), (0, 1), (1, 1), (0, 2), (1, 0), (1, 2)]
    assert len(calls) == span.cost == 4 + 3
    before, after = (HeadAllocation.from_gates(gates, 1 / 3) for gates in (GATES, result))
    assert before == after
    assert result.alpha.flatten().sort().values.equal(GATES.alpha.flatten().sort().values)


def test_the_whole_order() -> None:
    result, steps = rerank(Span(GATES, 0, 1), worth, lambda: None)
    assert len(steps) == 6
    assert compression_order(result) == [(0, 1), (1, 1), (0, 2), (1, 2), (1, 0), (0, 0)]


def test_order_survives_equal_gates() -> None:
    flat = HeadGates(alpha=torch.full((2, 3), 0.5))
    order = [(1, 2), (0, 1), (1, 0), (0, 0), (0, 2), (1, 1)]
    assert compression_order(with_order(flat, order)) == order


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.5), (0.6, 0.5), (0.5, 0.51)])
def test_empty_span(low: float, high: float) -> None:
    with pytest.raises(ValueError, match=f"{low} and {high}"):
        Span(GATES, low, high)


def run_program(monkeypatch: pytest.MonkeyPatch, *options: str) -> object:
    monkeypatch.setattr(sys, "argv", ["rerank_heads.py", *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    return ended.value.code


def test_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On the built-in model head (1, 1) goes last (its ground truth), whatever the gates say of it."""
    alpha = torch.arange(24).view(4, 6) / 24
    alpha[1, 1], alpha[0, 2] = 0.98, 0.99  # the gates would let it go before (0, 2), which nothing needs
    gates = HeadGates(alpha=alpha, sink=4, window=16, deploy_sink=4, deploy_window=16)
    gates.save(tmp_path / "gates.pt")
    drawn = [draw_problem(random.Random(seed), 5) for seed in range(6)]
    rows = [{"problem": p.problem, "answer": p.answer, "output": p.solution} for p in drawn]
    (tmp_path / "curriculum.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--gates", str(tmp_path / "gates.pt"), "--output", str(tmp_path / "out.pt"), "--model", "tiny"]
    options += ["--curriculum", str(tmp_path / "curriculum.jsonl"), "--low", "0.92", "--high", "1"]
    assert run_program(monkeypatch, *options, "--num-traces", "6") == 0
    result = HeadGates.load(tmp_path / "out.pt")
    assert compression_order(gates)[-2:] == [(1, 1), (0, 2)]
    assert compression_order(result) == [*compression_order(gates)[:-2], (0, 2), (1, 1)]
    facts = result.training["reranked"]
    assert facts.pop("seconds") > 0
    assert facts.pop("cpu_seconds") > 0
    assert facts == {"low": 0.92, "high": 1.0, "traces": 6, "seed": 0, "scores": 3}
    assert "2 of 2 candidates, 3 scores of 6 traces" in capsys.readouterr().out
    assert run_program(monkeypatch, *options, "--num-traces", "7") == 2
    assert "has only 6 solutions" in capsys.readouterr().err
