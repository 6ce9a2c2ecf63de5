"""The program that re-ranks a gates file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from rlkv.gates.head_gates import HeadGates
from rlkv.tiny import draw_problem
from rlkv.utils.files import write_jsonl
from tests.helpers.programs import run_program

PROGRAM = "inference/rerank_heads.py"


def test_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gates = HeadGates(torch.linspace(0, 1, 24).view(4, 6), deploy_sink=4, deploy_window=16)
    gates.save(tmp_path / "gates.pt")
    drawn = [draw_problem(random.Random(seed), 4) for seed in range(3)]
    rows = [{"problem": p.problem, "answer": p.answer, "output": p.solution} for p in drawn]
    write_jsonl(tmp_path / "curriculum.jsonl", rows)
    options = ["--gates", str(tmp_path / "gates.pt"), "--output", str(tmp_path / "out.pt")]
    options += ["--curriculum", str(tmp_path / "curriculum.jsonl"), "--low", "0.9", "--high", "1"]
    options += ["--num-traces", "3"]
    named = [*options, "--model", "tiny"]

    def refused(*given: str) -> str:
        assert run_program(PROGRAM, *given) == 2
        return capsys.readouterr().err

    assert "names no model: pass --model" in refused(*options)
    assert run_program(PROGRAM, *named) == 0
    result = HeadGates.load(tmp_path / "out.pt")
    kept = gates.alpha <= 0.9
    assert kept.sum() == 21
    assert result.alpha[kept].equal(gates.alpha[kept])
    facts = result.training["reranked"]
    assert (facts["low"], facts["high"], facts["traces"], facts["seed"]) == (0.9, 1.0, 3, 0)
    assert "out.pt exists" in refused(*named)
    assert HeadGates.load(tmp_path / "out.pt") == result
    assert "has only 3" in refused(*named, "--num-traces", "4", "--overwrite")
    assert "out.csv" in refused(*named, "--output", str(tmp_path / "out.csv"))
