"""Tasks by name: maths from real files and published copies, IFEval, the hub, refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from rlkv.data.problems import load_problems
from rlkv.evaluation.evaluate import TaskOptions
from rlkv.evaluation.tasks import registry
from rlkv.evaluation.tasks.base import EvalProblem, fill
from rlkv.evaluation.tasks.registry import TASKS, find_tasks, load_task
from rlkv.gates.head_gates import HeadGates
from rlkv.models import builtin as hub
from rlkv.models.builtin import BUILT_IN
from rlkv.models.prompts import fill_template
from rlkv.utils.files import write_jsonl
from tests.helpers.paths import ROOT, SHARED

Load = Callable[..., list[EvalProblem]]

DATA = SHARED / "data"
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="the benchmarks' files (../shared/data) are not here"
)
needs_checkers = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="rlkv[ifeval] is not installed"
)
# two spaces, as published
INSTRUCTION = "Solve the following math problem efficiently and clearly.  The last line"


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
    for problem in problems:
        assert problem.prompt.startswith(INSTRUCTION)
        assert problem.prompt.count("final answer is") == 1
        assert "put your final answer within" not in problem.prompt
        assert problem.answer
        assert "####" not in problem.answer


@needs_data
def test_the_real_mbpp() -> None:
    problems = load_task("mbpp", DATA)
    assert (len(problems), problems[0].id) == (500, "mbpp/11")
    assert all(p.meta["tests"] and p.meta["setup"] == "" and "\r" not in p.answer for p in problems)
    assert 'assert remove_Occ("hello","l") == "heo"\nassert' in problems[0].prompt


@pytest.mark.parametrize(
    ("name", "row", "answer"),
    [
        ("gsm8k", {"question": "p", "answer": "So 7*1000 = <<7*1000=7000>>\n#### 7,000"}, "7000"),
        ("math500", {"problem": "p", "solution": r"\boxed{1}", "answer": r"\frac12"}, r"\frac12"),
        # Kurt232/bench
        ("math500", {"prompt": fill_template("p"), "answer": r"so \boxed{3}"}, "3"),
        # Maxwell-Jia, HuggingFaceH4, math-ai, opencompass, MathArena
        ("aime24", {"ID": "2024-I-1", "Problem": "p", "Solution": "s", "Answer": 204}, "204"),
        ("aime24", {"id": 60, "problem": "p", "solution": "s", "answer": "204"}, "204"),
        ("aime25", {"id": "0", "problem": "p", "answer": "70"}, "70"),
        ("aime25", {"question": "p", "answer": "70"}, "70"),
        ("aime26", {"problem_idx": 1, "problem": "p", "answer": 70, "problem_type": ["x"]}, "70"),
        ("hmmt25", {"problem_idx": 1, "answer": r"\sqrt{2}", "problem": "p"}, r"\sqrt{2}"),
    ],
)
def test_field_names_of_published_copies(
    load: Load, name: str, row: dict[str, Any], answer: str
) -> None:
    (problem,) = load(name, row)
    assert (problem.answer, problem.meta["problem"]) == (answer, "p")
    assert TASKS[name].grade(rf"The final answer is: $\boxed{{{answer}}}$.", problem)
    assert not TASKS[name].grade(r"\boxed{2}", problem)


MBPP = {"prompt": "p", "code": "c", "test": ["assert f(3) == 4"]}


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("gsm8k", [{"problem": "p", "answer": "1"}], "line 1.*question, prompt.*answer, problem"),
        ("math500", [{"problem": "p", "answer": ""}], "line 1.*problem"),
        ("mbpp", [{"prompt": "p", "code": "c", "test": []}], "line 1.*tests"),
        ("mbpp", [{"prompt": "p", "code": "c"}], "line 1.*tests"),
        ("mbpp", [MBPP | {"test": ["f(3)"]}], "line 1: .*has no assert"),
        ("mbpp", [MBPP | {"test_imports": "import re"}], "line 1.*test_imports"),
        ("mbpp", [MBPP | {"test_imports": [5]}], "line 1.*test_imports"),
        ("mbpp", [MBPP | {"test_setup_code": [5]}], "line 1.*'test_setup_code' is a list"),
        ("aime24", [{"id": 1, "problem": "p", "answer": "1"}] * 2, "line 2.*'1'"),
        ("gsm8k", [], "rows.jsonl"),
    ],
)
def test_broken_rows_are_named(
    load: Load, name: str, rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(name, *rows)


def test_built_in_tasks_are_drawn(tmp_path: Path) -> None:
    problems = load_task("tiny", limit=5)
    assert [p.prompt for p in problems] == [p.prompt for p in load_task("tiny", limit=5)]
    assert problems[0].prompt == fill_template(problems[0].meta["problem"])
    assert len(load_task("tiny", tmp_path)) == 400
    (problem,) = load_task("smol", limit=1)
    assert problem.prompt == problem.meta["problem"]
    for model in ("tiny", "smol"):
        config = yaml.safe_load((ROOT / f"configs/filter_{model}.yaml").read_text())
        trained = {
            p.problem for p in load_problems(model, config.get("num_problems"), config["seed"])
        }
        assert len(trained) > 100
        assert not trained & {problem.meta["problem"] for problem in load_task(model)}


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "connection_error", lambda *args: "no route")
    for name in TASKS:
        if name not in BUILT_IN:
            with pytest.raises(ValueError, match=r"\(no route\).*--data") as e:
                load_task(name)
            assert str(e.value).startswith(f"cannot load task {name!r} ({TASKS[name].hub.id}) from")  # type: ignore[union-attr]
    asked: list[Any] = []

    def load_dataset(*args: object, **options: object) -> list[dict[str, str]]:
        asked.append((*args, options))
        return [{"question": "q", "answer": "#### 3"}]

    monkeypatch.setattr(hub, "connection_error", lambda *args: "no route")
    config = SimpleNamespace(HF_HUB_OFFLINE=True)  # by HF_DATASETS_OFFLINE: its cache is asked
    datasets = SimpleNamespace(load_dataset=load_dataset, config=config)
    monkeypatch.setattr(hub, "require", lambda *args: datasets)
    assert load_task("gsm8k")[0].answer == "3"
    config.HF_HUB_OFFLINE = False
    monkeypatch.setattr(hub, "connection_error", lambda *args: None)
    assert load_task("gsm8k")[0].answer == "3"
    assert asked == 2 * [("openai/gsm8k", {"name": "main", "split": "test"})]


@pytest.mark.parametrize(
    ("name", "path", "limit", "message"),
    [
        ("gsm9k", None, None, "'gsm9k'.*gsm8k, math500"),
        ("gsm8k", "absent.jsonl", None, "absent.jsonl.*--data"),
        ("gsm8k", ".", None, "gsm8k_test.jsonl or gsm8k_test.parquet"),
        ("tiny", None, 0, "limit.* 0"),
    ],
)
def test_names_and_paths_that_are_none(
    tmp_path: Path, name: str, path: str | None, limit: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_task(name, None if path is None else tmp_path / path, limit)


def test_tasks_of_a_command(tmp_path: Path) -> None:
    file = tmp_path / "aime24.jsonl"
    write_jsonl(file, [{"problem": "1 + 1 ?", "answer": "2"}])
    with pytest.raises(ValueError, match=r"aime24\.jsonl.*--tasks"):
        find_tasks(["aime24", "math500"], file)
    for data in (tmp_path, None):
        found = find_tasks(["aime24", "math500"], data)
        assert [task.name for task in found] == ["aime24", "math500"]
    assert find_tasks(["aime24"], file) == [TASKS["aime24"]]
    with pytest.raises(ValueError, match="--tasks tiny tiny"):
        find_tasks(["tiny", "tiny"], None)


def test_templates() -> None:
    def gates(template: str | None) -> HeadGates:
        training = {} if template is None else {"template": template}
        return HeadGates(alpha=torch.ones(1, 2), training=training)

    options = TaskOptions()
    assert options.chosen_template([gates("plain"), gates("plain")]) == "plain"
    for others in ([gates("plain"), gates("boxed")], [gates("rlkv")], [gates(None)], []):
        assert options.chosen_template(others) is None
        assert TaskOptions(template="boxed").chosen_template(others) == "boxed"
    problem = load_task("tiny", limit=1, template="plain")[0]
    assert problem.prompt == problem.meta["problem"]
    texts = {"problem": "{tests} {x}", "tests": "{problem}"}
    assert fill("{problem} / {tests}", texts) == "{tests} {x} / {problem}"


# --- IFEval, with the checkers of lm-eval


@pytest.fixture
def sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NLTK's punkt_tab for English with three abbreviations: no package index has the real one."""
    import nltk

    folder = tmp_path / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    (folder / "abbrev_types.txt").write_text("dr\nmr\ne.g\n")
    (folder / "sent_starters.txt").write_text("")
    (folder / "collocations.tab").write_text("")
    (folder / "ortho_context.tab").write_text("the\t34\n")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    registry._checkers.cache_clear()
    yield
    registry._checkers.cache_clear()


def instructions(*given: tuple[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a row of IFEval."""
    return {
        "key": 1000,
        "prompt": "Write it.",
        "instruction_id_list": [name for name, _ in given],
        # copies on the hub give every instruction all arguments, most of them null
        "kwargs": [{"num_sections": None, **kwargs} for _, kwargs in given],
        **more,
    }


CHECKS: list[tuple[str, dict[str, Any], str, str]] = [
    ("punctuation:no_comma", {}, "One two.", "One, two."),
    (
        "length_constraints:number_sentences",
        {"relation": "less than", "num_sentences": 3},
        "Dr. Lee came. He left.",
        "He came. He sat. He left.",
    ),
    ("keywords:existence", {"keywords": ["cache"]}, "The cache is full.", "It is full."),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("change_case:english_lowercase", {}, "this is a sentence in english.", "This Is English."),
    ("language:response_language", {"language": "de"}, "Das ist ein deutscher Satz.", "It is not."),
    ("startend:end_checker", {"end_phrase": "That is all."}, "Hm. That is all.", "That is it."),
]


@needs_checkers
@pytest.mark.usefixtures("sentences")
def test_instructions(load: Load) -> None:
    grade = TASKS["ifeval"].grade
    for name, arguments, good, bad in CHECKS:
        (problem,) = load("ifeval", instructions((name, arguments)))
        assert grade(good, problem), name
        assert grade(f"<think>Well, let me see, {bad}</think>\n\n{good}", problem), name
        assert not grade(bad, problem), name
    both = [("punctuation:no_comma", {}), ("keywords:existence", {"keywords": ["red"]})]
    (problem,) = load("ifeval", instructions(*both))
    assert (problem.id, problem.prompt) == ("ifeval/1000", "Write it.")
    assert problem.meta["checkers"], "another version of the checkers is another run"
    answers = ("A red one.", "A red, blue one.", "")
    assert [grade(answer, problem) for answer in answers] == [True, False, False]


@needs_checkers
@pytest.mark.usefixtures("sentences")
@pytest.mark.parametrize(
    ("row", "message"),
    [
        (instructions(("no:such", {})), "no:such: KeyError"),
        (instructions(("length_constraints:number_words", {"relation": "about"})), "ValueError"),
        (instructions(("punctuation:no_comma", {"words": 3})), "no_comma: TypeError"),
        (instructions(("punctuation:no_comma", {}), kwargs=[]), "as many kwargs as"),
        (instructions(("punctuation:no_comma", {}), prompt=""), "it needs a prompt"),
        (instructions(("punctuation:no_comma", {}), kwargs=[5]), "no_comma: TypeError"),
        (instructions(("punctuation:no_comma", {}), instruction_id_list=5), "it needs a prompt"),
    ],
)
def test_broken_instructions_are_named(load: Load, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"line 1: .*{message}"):
        load("ifeval", row)


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        pytest.param("data", r"nltk\.downloader punkt_tab", marks=needs_checkers),
        ("package", r"rlkv\[ifeval\]"),
    ],
)
def test_what_is_not_installed_is_said(
    load: Load, monkeypatch: pytest.MonkeyPatch, lacking: str, message: str
) -> None:
    if lacking == "data":
        monkeypatch.setattr("nltk.data.path", [])
    else:
        monkeypatch.setitem(sys.modules, "nltk", None)
    registry._checkers.cache_clear()
    with pytest.raises(ValueError, match=message):
        load("ifeval", instructions(("punctuation:no_comma", {})))
