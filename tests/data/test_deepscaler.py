"""Loading problems: the same from every kind of source, and errors that name file and row."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rlkv import smol, tiny
from rlkv.data.problems import Problem, load_problems

ROWS = [
    {"problem": "1+1?", "answer": "2", "solution": r"\boxed{2}"},
    {"problem": "2+2?", "answer": 4, "solution": None},
    {"problem": "no answer known", "answer": None, "extra": 1},
]
LOADED = [Problem("1+1?", "2", r"\boxed{2}"), Problem("2+2?", "4"), Problem("no answer known", "")]


def write_jsonl(path: Path, rows: list) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return str(path)


def test_jsonl(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "p.jsonl", ROWS)
    assert load_problems(source) == LOADED
    assert load_problems(source, limit=2) == LOADED[:2]


def test_half_surrogates_become_text(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "p.jsonl", [{"problem": "a\ud800b", "answer": "1\0"}])
    assert load_problems(source) == [Problem("a?b", "1\0")]


def test_parquet(tmp_path: Path) -> None:
    rows = [
        {**row, "answer": None if row["answer"] is None else str(row["answer"])} for row in ROWS
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    assert load_problems(str(tmp_path / "p.parquet")) == LOADED


@pytest.mark.parametrize(("name", "problems"), [("tiny", tiny.problems), ("smol", smol.problems)])
def test_built_in_tasks(name: str, problems: Callable[..., list[dict[str, str]]]) -> None:
    loaded = load_problems(name, num_problems=7, seed=3)
    assert [{"problem": p.problem, "answer": p.answer} for p in loaded] == problems(7, seed=3)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"problem": "a", "answer": "1"}', "{nonsense"], "line 2.*JSON"),
        (['{"problem": "a", "answer": "1"}', "[1]"], "line 2.*list"),
        (['{"question": "a", "answer": "1"}'], "line 1.*'problem'.*answer, question"),
        (['{"problem": "a"}'], "line 1.*'answer'"),
        (['{"problem": "a", "answer": ["1"]}'], "line 1.*'answer'.*list"),
        (['{"problem": " ", "answer": "1"}'], "line 1.*'problem'"),
        ([], "broken.jsonl"),
    ],
)
def test_broken_rows_name_file_and_line(tmp_path: Path, lines: list[str], message: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message) as raised:
        load_problems(str(path))
    assert "broken.jsonl" in str(raised.value)


def test_other_broken_sources(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.jsonl"):
        load_problems(str(tmp_path / "absent.jsonl"))
    (tmp_path / "p.csv").write_text("a")
    with pytest.raises(ValueError, match=r"p\.csv"):
        load_problems(str(tmp_path / "p.csv"))
    (tmp_path / "p.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"p\.parquet"):
        load_problems(str(tmp_path / "p.parquet"))


def test_no_network_names_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rlkv.models.builtin.connection_error", lambda *asked: f"no route to {asked}"
    )
    with pytest.raises(ValueError, match=r"'dataset'.*--input.*--model"):
        load_problems("agentica-org/DeepScaleR-Preview-Dataset")
