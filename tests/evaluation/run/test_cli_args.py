"""What the comparisons read with ``--input``, and the one sentence for what they do not."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from rlkv.evaluation.run.cli_args import read_order, read_truth, repetition_rule, study_problems
from rlkv.evaluation.stats.error_modes import RepetitionRule
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from tests.helpers.paths import ROOT

PROGRAM = ROOT / "inference" / "sweep_heads.py"
ROWS = [
    {"problem": "1 + 1 ?", "answer": "2", "id": 7},
    {"problem": "1 + 2 ?", "answer": 3},
    {"problem": "?", "answer": "4"},
]
READ = [{"problem": "1 + 1 ?", "answer": "2"}, {"problem": "1 + 2 ?", "answer": "3"}]


def test_jsonl_and_parquet(tmp_path: Path) -> None:
    lines = tmp_path / "p.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n\n" for row in ROWS))
    assert study_problems(lines, 2, 0, "") == READ
    assert len(study_problems(lines, 10, 0, "")) == 3
    table = pyarrow.Table.from_pylist([{**row, "answer": str(row["answer"])} for row in ROWS])
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    assert study_problems(tmp_path / "p.parquet", 2, 0, "") == READ


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", '{"problem": "a", "answer": "1"}\n{"problem": \n', r"p\.jsonl line 2 is not JSON"),
        ("p.jsonl", "[1, 2]\n", r"p\.jsonl line 1 is a list: expected an object with problem and answer"),
        ("p.jsonl", "7\n", r"p\.jsonl line 1 is a int"),
        ("p.jsonl", '{"problem": "a"}\n', r"p\.jsonl line 1 has no field 'answer'"),
        ("p.jsonl", '{"problem": ["a"], "answer": "1"}\n', r"line 1: field 'problem' is a list, expected text"),
        ("p.jsonl", '{"problem": "a", "answer": null}\n', r"1 of 1 problems have no answer to compare with"),
        ("p.jsonl", "\n", r"p\.jsonl holds no problems"),
        ("p.parquet", "no parquet", r"p\.parquet is not a readable Parquet file"),
        ("p.txt", "x", r"p\.txt is neither \.jsonl nor \.parquet"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        study_problems(tmp_path / name, 10, 0, "")
    assert "\n" not in str(raised.value)


def test_absent_files_are_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    for name in ("p.jsonl", "owner/data"):
        with pytest.raises(ValueError, match=r"does not exist: give a \.jsonl or \.parquet file"):
            study_problems(tmp_path / name, 10, 0, "")


def test_the_program_ends_with_the_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    HeadGates(torch.rand(4, 6, generator=torch.Generator().manual_seed(0))).save(tmp_path / "gates.tsv")
    (tmp_path / "p.jsonl").write_text("{")
    arguments = ["--gates", str(tmp_path / "gates.tsv"), "--model", "tiny", "--input", str(tmp_path / "p.jsonl")]
    monkeypatch.setattr(sys, "argv", ["sweep_heads.py", *arguments, "--output-dir", str(tmp_path / "out")])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert "p.jsonl line 1 is not JSON" in line
    assert not (tmp_path / "out").exists()


def test_repetition_rules() -> None:
    assert repetition_rule("40,8") == RepetitionRule(40, 8)
    assert repetition_rule("8,8") == RepetitionRule(8, 8)
    for text in ("400.5,40", "400,4.5", "400", "1,2,3"):
        with pytest.raises(ValueError, match="must be two whole numbers"):
            repetition_rule(text)
    with pytest.raises(ValueError, match="never holds 400 distinct ones"):
        repetition_rule("40,400")


SHAPE = ModelShape("m", "llama", 2, 3, 6, 8)
LOST: list[list[object]] = [[0.1, 0.0, 0.2], [0.3, -0.1, 0]]


def truth_file(folder: Path, **content: object) -> Path:
    steps = [{"layer": 0, "head": 1}, {"layer": 1, "head": 2}]
    (folder / "t.json").write_text(json.dumps({"elimination": steps, **content}))
    return folder / "t.json"


def test_a_ground_truth_is_read_whole(tmp_path: Path) -> None:
    found = read_truth(truth_file(tmp_path, accuracy_lost_by_single_head=LOST), SHAPE)
    assert found["accuracy_lost_by_single_head"] == LOST
    assert read_order(tmp_path / "t.json", SHAPE) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("lost", [None, 3, [], LOST[:1], [[0.1, 0.2], [0.3, 0.4]], [LOST[0], ["a", 0, 0]], [1, 2]])
def test_a_ground_truth_without_single_heads_is_refused(tmp_path: Path, lost: object) -> None:
    with pytest.raises(ValueError, match="accuracy_lost_by_single_head must be 2 lists of 3 numbers"):
        read_truth(truth_file(tmp_path, accuracy_lost_by_single_head=lost), SHAPE)


def test_a_head_goes_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="eliminates a head twice"):
        read_order(truth_file(tmp_path, elimination=[{"layer": 0, "head": 1}] * 2), SHAPE)
