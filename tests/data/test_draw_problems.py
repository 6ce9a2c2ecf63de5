"""Problems that no model filtered: test sets, and a draw from the pool of the filter."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkv.data.problems import load_problems
from rlkv.smol import problems as smol_problems
from rlkv.tiny import problems
from rlkv.utils.files import read_log, write_jsonl
from tests.helpers.programs import run_program


def draw(output: Path, *options: str) -> int:
    return run_program("data_prep/draw_problems.py", "--output", output, *options)


def test_a_test_set(tmp_path: Path) -> None:
    output = tmp_path / "new" / "problems.jsonl"
    assert draw(output, "--num-problems", "7", "--steps", "3-5", "--seed", "11") == 0
    assert read_log(output) == problems(7, 11, 3, 5)
    loaded = [{"problem": p.problem, "answer": p.answer} for p in load_problems(str(output))]
    assert loaded == read_log(output)
    options = ["--model", "smol", "--num-problems", "5", "--steps", "4-10", "--seed", "2"]
    before = output.read_bytes()
    assert draw(output, *options) == 2
    assert output.read_bytes() == before
    assert draw(output, *options, "--overwrite") == 0
    assert read_log(output) == smol_problems(5, 2, 4, 10)
    assert draw(output, *options, "--held-out-names", "--overwrite") == 0
    assert read_log(output) == smol_problems(5, 2, 4, 10, held_out_names=True)


def test_a_draw_from_the_pool_of_the_filter(tmp_path: Path) -> None:
    pool = problems(12, 3)
    config = tmp_path / "filter.yaml"
    config.write_text("model: tiny\ninput: tiny\nnum_problems: 12\nseed: 3\nbuckets: 0-99:5\n")
    curriculum = tmp_path / "curriculum.jsonl"
    write_jsonl(curriculum, pool[:5])
    options = ["--config", str(config), "--as-many-as", str(curriculum)]
    assert draw(tmp_path / "a.jsonl", *options) == 0
    assert draw(tmp_path / "b.jsonl", *options) == 0
    found = read_log(tmp_path / "a.jsonl")
    assert read_log(tmp_path / "b.jsonl") == found
    assert len({row["problem"] for row in found}) == 5
    assert all(row in pool for row in found)
    assert found != pool[:5]
    answers = {"p": None, "nan": "nan", "q": 2}  # two have none
    rows = [{"problem": problem, "answer": answer} for problem, answer in answers.items()]
    write_jsonl(tmp_path / "pool.jsonl", rows)
    assert draw(tmp_path / "c.jsonl", "--input", str(tmp_path / "pool.jsonl")) == 0
    assert read_log(tmp_path / "c.jsonl") == [{"problem": "q", "answer": "2"}]


@pytest.mark.parametrize(
    ("output", "options", "message"),
    [
        ("out.csv", [], "out.csv must end with .jsonl"),
        ("out.jsonl", ["--steps", "many"], "--steps 'many' is not a range"),
        ("out.jsonl", ["--steps", "2-9"], "definitions must satisfy"),
        ("out.jsonl", ["--input", "p.jsonl", "--steps", "3-5"], "--steps 3-5 belongs to"),
        ("out.jsonl", ["--held-out-names"], "--held-out-names belongs to"),
        ("out.jsonl", ["--input", "two.jsonl", "--num-problems", "1"], "--num-problems 1 belongs"),
        ("out.jsonl", ["--model", "smol", "--steps", "3-99"], "max_steps=99"),
        ("out.jsonl", ["--input", "absent.jsonl"], "absent.jsonl does not exist"),
        ("out.jsonl", ["--as-many-as", "absent.jsonl"], "absent.jsonl: there is no such file"),
        (
            "out.jsonl",
            ["--num-problems", "1", "--as-many-as", "two.jsonl"],
            "it has 2 problems, there are only 1",
        ),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    output: str,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("two.jsonl"), [{"problem": "p", "answer": "1"}] * 2)
    capsys.readouterr()
    assert draw(Path(output), *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not Path(output).exists()
