"""Problems of the tasks: from the real files, from rows with the hub's fields, and errors that say
what to give.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from rlkv.data.problems import load_problems
from rlkv.evaluation.tasks.base import fill
from rlkv.evaluation.tasks.registry import TASKS, find_tasks, load_task, trained_template
from rlkv.gates.head_gates import HeadGates
from rlkv.models import builtin as hub
from rlkv.models.builtin import BUILT_IN
from rlkv.models.prompts import fill_template
from tests.helpers.paths import ROOT, SHARED

DATA = SHARED / "data"
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="the benchmarks' files (../shared/data) are not here"
)

# two spaces, as published
INSTRUCTION = "Solve the following math problem efficiently and clearly.  The last line"


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@needs_data
@pytest.mark.parametrize(
    ("name", "count", "first_id", "first_answer"),
    [
        ("gsm8k", 1319, "gsm8k/1", "18"),
        ("math500", 500, "math500/test/precalculus/807.json", r"\left( 3, \frac{\pi}{2} \right)"),
        ("aime24", 30, "aime24/60", "204"),
        ("aime25", 30, "aime25/1", "70"),
    ],
)
def test_the_real_maths_files(name: str, count: int, first_id: str, first_answer: str) -> None:
    problems = load_task(name, DATA)
    assert (len(problems), problems[0].id, problems[0].answer) == (count, first_id, first_answer)
    assert len({p.id for p in problems}) == count
    for problem in problems:
        assert problem.prompt.startswith(INSTRUCTION)
        assert problem.prompt.count("final answer is") == 1
        assert problem.answer
        assert "####" not in problem.answer


@needs_data
def test_aime25_prompts_lose_the_instruction_of_the_file() -> None:
    first = load_task("aime25", DATA / "aime25.jsonl", limit=1)[0]
    assert first.meta["problem"].endswith("is a divisor of $97_b.$")
    assert "put your final answer within" not in first.prompt


@needs_data
def test_the_real_mbpp() -> None:
    problems = load_task("mbpp", DATA)
    assert (len(problems), problems[0].id) == (500, "mbpp/11")
    assert all(p.meta["tests"] and p.meta["setup"] == "" and "\r" not in p.answer for p in problems)
    assert 'assert remove_Occ("hello","l") == "heo"\nassert' in problems[0].prompt


def test_hub_fields_of_gsm8k_and_thousands(tmp_path: Path) -> None:
    rows = [{"question": "How many?", "answer": "So 7*1000 = <<7*1000=7000>>7,000\n#### 7,000"}]
    problem = load_task("gsm8k", write(tmp_path / "x.jsonl", *rows))[0]
    assert (problem.answer, problem.meta["problem"]) == ("7000", "How many?")
    assert problem.meta["solution"].endswith("#### 7,000")


@pytest.mark.parametrize(
    ("name", "row", "answer"),
    [
        (
            "math500",
            {"problem": "p", "solution": r"\boxed{\frac{1}{2}}", "answer": r"\frac{1}{2}"},
            r"\frac{1}{2}",
        ),
        (
            "math500",
            {"prompt": fill_template("p"), "answer": r"so \boxed{3}"},
            "3",
        ),  # Kurt232/bench
        (
            "aime24",
            {"ID": "2024-I-1", "Problem": "p", "Solution": "s", "Answer": 204},
            "204",
        ),  # Maxwell-Jia
        (
            "aime24",
            {
                "id": 60,
                "problem": "p",
                "solution": "s",
                "answer": "204",
                "url": "u",
                "year": "2024",
            },
            "204",
        ),
        ("aime25", {"id": "0", "problem": "p", "answer": "70"}, "70"),  # math-ai
        ("aime25", {"question": "p", "answer": "70"}, "70"),  # opencompass
        (
            "aime25",
            {"problem_idx": 1, "problem": "p", "answer": 70, "problem_type": ["x"]},
            "70",
        ),  # MathArena
        ("aime26", {"problem_idx": 1, "answer": 70, "problem": "p"}, "70"),  # MathArena
        ("aime26", {"problem": "p", "answer": "70", "id": "1"}, "70"),  # math-ai
        (
            "hmmt25",
            {"problem_idx": 1, "answer": r"\sqrt{2}", "problem_type": ["Algebra"], "problem": "p"},
            r"\sqrt{2}",
        ),
    ],
)
def test_field_names_of_published_copies(tmp_path: Path, name: str, row: dict, answer: str) -> None:
    problem = load_task(name, write(tmp_path / "x.jsonl", row))[0]
    assert (problem.answer, problem.meta["problem"]) == (answer, "p")


def test_hub_fields_of_mbpp(tmp_path: Path) -> None:
    full = {
        "task_id": 11,
        "text": "Do it.",
        "code": "def f():\r\n    return 1",
        "test_list": ["assert f() == 1"],
    }
    problem = load_task("mbpp", write(tmp_path / "x.jsonl", {**full, "test_setup_code": "X = 1"}))[
        0
    ]
    assert (problem.id, problem.answer) == ("mbpp/11", "def f():\n    return 1")
    assert problem.meta["setup"] == "X = 1"
    sanitized = {
        "task_id": 2,
        "prompt": "Do it.",
        "code": "c",
        "test_list": ["assert f()"],
        "test_imports": ["import re"],
    }
    assert load_task("mbpp", write(tmp_path / "y.jsonl", sanitized))[0].meta["setup"] == "import re"


def mmlu_row(number: int, category: str = "law", **other: object) -> dict:
    row = {
        "question_id": number,
        "question": f"q{number}?",
        "options": ["w", "x", "y"],
        "answer": "B",
    }
    return {**row, "answer_index": 1, "category": category, **other}


def test_mmlu_pro_takes_its_category(tmp_path: Path) -> None:
    file = write(
        tmp_path / "mmlu_pro.jsonl", mmlu_row(1), mmlu_row(2, "computer science"), mmlu_row(3)
    )
    assert [p.id for p in load_task("mmlu_pro:law", tmp_path)] == [
        "mmlu_pro:law/1",
        "mmlu_pro:law/3",
    ]
    problem = load_task("mmlu_pro:computer_science", file)[0]
    assert problem.answer == "B"
    assert "LETTER is one of ABC." in problem.prompt
    assert problem.prompt.endswith("q2?\n\nA: w\nB: x\nC: y\n\nAnswer:")
    with pytest.raises(ValueError, match=r"'physics'.*computer science, law"):
        load_task("mmlu_pro:physics", file)


def test_mmlu_pro_from_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([mmlu_row(5)]), tmp_path / "mmlu_pro.parquet")
    assert load_task("mmlu_pro:law", tmp_path)[0].meta["options"] == ["w", "x", "y"]


def test_mmlu_pro_samples_500_once_and_for_all(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", *(mmlu_row(i) for i in range(700)))
    first, again = load_task("mmlu_pro:law", file), load_task("mmlu_pro:law", file)
    numbers = [int(p.id.rpartition("/")[2]) for p in first]
    assert [p.id for p in again] == [p.id for p in first]
    assert len(numbers) == 500
    assert numbers == sorted(set(numbers))
    assert numbers != list(range(500))
    assert len(load_task("mmlu_pro:law", file, limit=20)) == 20


def test_padded_options_are_dropped(tmp_path: Path) -> None:
    row = mmlu_row(1, options=["w", "x", "N/A", "N/A"])
    assert load_task("mmlu_pro:law", write(tmp_path / "x.jsonl", row))[0].meta["options"] == [
        "w",
        "x",
    ]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        (
            "gsm8k",
            {"problem": "p", "answer": "1"},
            "line 1.*question, prompt.*answer, problem",
        ),
        ("math500", {"problem": "p", "answer": ""}, "line 1.*problem"),
        ("mbpp", {"prompt": "p", "code": "c", "test": []}, "line 1.*tests"),
        ("mmlu_pro:law", mmlu_row(1, answer="Z"), "line 1.*'Z'.*answer_index 1.*ABC"),
        ("mmlu_pro:law", mmlu_row(1, answer="A"), "'A'.*answer_index 1"),
        ("mmlu_pro:law", mmlu_row(1, answer_index=3), "answer_index 3"),
        ("mmlu_pro:law", mmlu_row(1, options="abc"), "'options'"),
    ],
)
def test_broken_rows_are_named(tmp_path: Path, name: str, row: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_task(name, write(tmp_path / "x.jsonl", row))


def test_ids_must_differ(tmp_path: Path) -> None:
    row = {"id": 1, "problem": "p", "answer": "1"}
    with pytest.raises(ValueError, match=r"line 2.*'1'"):
        load_task("aime24", write(tmp_path / "x.jsonl", row, row))


def test_tiny_is_drawn(tmp_path: Path) -> None:
    problems = load_task("tiny", limit=5)
    assert [p.prompt for p in problems] == [p.prompt for p in load_task("tiny", limit=5)]
    assert problems[0].prompt == fill_template(problems[0].meta["problem"])
    assert len(load_task("tiny", tmp_path)) == 400


@pytest.mark.parametrize("model", ["tiny", "smol"])
def test_drawn_problems_are_not_those_of_a_curriculum(model: str) -> None:
    config = yaml.safe_load((ROOT / f"configs/filter_{model}.yaml").read_text())
    trained = {p.problem for p in load_problems(model, config["num_problems"], config["seed"])}
    assert len(trained) > 100
    assert not trained & {problem.meta["problem"] for problem in load_task(model)}


def test_without_hub_and_file_the_error_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "connection_error", lambda *args: "no route")
    for name in TASKS:
        if name not in BUILT_IN:
            with pytest.raises(ValueError, match=r"\(no route\).*--data") as e:
                load_task(name)
            assert str(e.value).startswith(f"cannot load task {name!r} ({TASKS[name].hub.id}) from")  # type: ignore[union-attr]


def test_the_hub_is_asked_for_the_documented_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list = []

    def load_dataset(*args: object, **options: object) -> list[dict]:
        asked.append((*args, options))
        return [{"question": "q", "answer": "#### 3"}]

    monkeypatch.setattr(hub, "connection_error", lambda *args: None)
    monkeypatch.setattr(hub, "require", lambda *args: SimpleNamespace(load_dataset=load_dataset))
    assert load_task("gsm8k")[0].answer == "3"
    assert asked == [("openai/gsm8k", {"name": "main", "split": "test"})]


def test_names_and_paths_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'gsm9k'.*gsm8k, math500"):
        load_task("gsm9k")
    with pytest.raises(ValueError, match=r"absent.jsonl.*--data"):
        load_task("gsm8k", tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match=r"gsm8k_test.jsonl or gsm8k_test.parquet"):
        load_task("gsm8k", tmp_path)
    with pytest.raises(ValueError, match=r"limit.* 0"):
        load_task("tiny", limit=0)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"empty.jsonl"):
        load_task("gsm8k", tmp_path / "empty.jsonl")


def test_the_tasks_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        TASKS["gsm8k"] = TASKS["tiny"]  # type: ignore[index]


def test_braces_in_problems_stay() -> None:
    assert (
        fill("{problem} / {tests}", {"problem": "{tests} {x}", "tests": "{problem}"})
        == "{tests} {x} / {problem}"
    )


def test_one_file_is_not_the_data_of_two_tasks(tmp_path: Path) -> None:
    file = write(tmp_path / "aime24.jsonl", {"problem": "1 + 1 ?", "answer": "2"})
    with pytest.raises(ValueError, match=r"aime24\.jsonl.*--tasks"):
        find_tasks(["aime24", "math500"], file)
    assert [task.name for task in find_tasks(["aime24", "math500"], tmp_path)] == [
        "aime24",
        "math500",
    ]
    assert [task.name for task in find_tasks(["aime24"], file)] == ["aime24"]
    assert len(find_tasks(["aime24", "math500"], None)) == 2


def test_a_task_is_named_once() -> None:
    with pytest.raises(ValueError, match="--tasks tiny tiny"):
        find_tasks(["tiny", "tiny"], None)


def test_a_maths_task_takes_the_template_of_the_gates() -> None:
    def gates(template: str | None) -> HeadGates:
        return HeadGates(
            alpha=torch.ones(1, 2), training={} if template is None else {"template": template}
        )

    assert trained_template([gates("plain"), gates("plain")]) == "plain"
    for others in ([gates("plain"), gates("boxed")], [gates("rlkv")], [gates(None)], []):
        assert trained_template(others) is None
    problem = load_task("tiny", limit=1, template="plain")[0]
    assert problem.prompt == problem.meta["problem"]


def test_smol_is_drawn_without_an_instruction() -> None:
    problem = load_task("smol", limit=1)[0]
    assert problem.prompt == problem.meta["problem"]
