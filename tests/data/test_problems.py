"""Loading problems: the same from every kind of source, and errors that name file and row."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rlkv import smol, tiny
from rlkv.data.problems import Problem, load_problems, read_curriculum
from rlkv.utils.files import write_jsonl

ROWS = [
    {"problem": "1+1?", "answer": "2", "solution": r"\boxed{2}"},
    {"problem": "a\ud800b", "answer": 4, "solution": None},
    {"problem": "no answer known", "answer": None, "extra": 1},
]
LOADED = [Problem("1+1?", "2", r"\boxed{2}"), Problem("a?b", "4"), Problem("no answer known", "")]


def test_every_source(tmp_path: Path) -> None:
    lines = tmp_path / "p.jsonl"
    lines.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    assert load_problems(str(lines)) == LOADED
    assert load_problems(str(lines), limit=2) == LOADED[:2]
    table = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([vars(p) for p in LOADED]), table)
    assert load_problems(str(table)) == LOADED
    for name, task in (("tiny", tiny), ("smol", smol)):
        loaded = load_problems(name, num_problems=7, seed=3)
        assert [{"problem": p.problem, "answer": p.answer} for p in loaded] == task.problems(7, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"problem": "a", "answer": "1"}\n{nonsense', "line 2.*JSON"),
        ('{"problem": "a", "answer": "1"}\n[1]', "line 2.*list"),
        ('{"question": "a", "answer": "1"}', "line 1.*'problem'.*answer, question"),
        ('{"problem": "a"}', "line 1.*'answer'"),
        ('{"problem": "a", "answer": ["1"]}', "line 1.*'answer'.*list"),
        ('{"problem": " ", "answer": "1"}', "line 1.*'problem'"),
        ("", "holds no problems"),
    ],
)
def test_broken_rows_name_file_and_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        load_problems(str(path))
    assert "broken.jsonl" in str(raised.value)


@pytest.mark.parametrize("name", ["absent.jsonl", "p.csv", "p.parquet"])
def test_other_broken_sources(tmp_path: Path, name: str) -> None:
    (tmp_path / "p.csv").write_text("a")
    (tmp_path / "p.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=name):
        load_problems(str(tmp_path / name))


def test_a_curriculum_has_text(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    right = {"problem": "p", "answer": 7}
    write_jsonl(path, [right, right | {"answer": True}])
    with pytest.raises(ValueError, match=r"line 2.*'answer' is a bool"):
        read_curriculum(path)
    write_jsonl(path, [right])
    assert read_curriculum(path) == [right | {"answer": "7"}]


def test_no_network_names_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkv.models.builtin.connection_error", lambda *asked: f"no way to {asked}")
    with pytest.raises(ValueError, match=r"'dataset'.*--input.*--model"):
        load_problems("agentica-org/DeepScaleR-Preview-Dataset")
