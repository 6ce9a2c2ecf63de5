"""IFEval on rows made by hand, with the checkers of lm-eval and sentence data written here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlkv.evaluation.tasks import registry as ifeval
from rlkv.evaluation.tasks.base import EvalProblem
from rlkv.evaluation.tasks.registry import TASKS, load_task

needs_checkers = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="rlkv[ifeval] is not installed"
)


@pytest.fixture
def sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NLTK's punkt_tab for English with three abbreviations.

    The real one is not on the package index.
    """
    import nltk

    folder = tmp_path / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name, content in {
        "abbrev_types.txt": "dr\nmr\ne.g\n",
        "sent_starters.txt": "",
        "collocations.tab": "",
    }.items():
        (folder / name).write_text(content)
    (folder / "ortho_context.tab").write_text("the\t34\n")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    ifeval._checkers.cache_clear()
    yield
    ifeval._checkers.cache_clear()


def load(folder: Path, *instructions: tuple[str, dict[str, Any]], **more: Any) -> EvalProblem:
    names, arguments = [name for name, _ in instructions], [kwargs for _, kwargs in instructions]
    row = {
        "key": 1000,
        "prompt": "Write it.",
        "instruction_id_list": names,
        "kwargs": arguments,
        **more,
    }
    file = folder / "ifeval.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return load_task("ifeval", file)[0]


@needs_checkers
@pytest.mark.usefixtures("sentences")
@pytest.mark.parametrize(
    ("name", "arguments", "good", "bad"),
    [
        ("punctuation:no_comma", {}, "One two.", "One, two."),
        (
            "length_constraints:number_words",
            {"relation": "at least", "num_words": 4},
            "a b c d",
            "a b c",
        ),
        (
            "length_constraints:number_sentences",
            {"relation": "less than", "num_sentences": 3},
            "Dr. Lee came. He left.",
            "He came. He sat. He left.",
        ),
        ("keywords:existence", {"keywords": ["cache"]}, "The cache is full.", "It is full."),
        (
            "keywords:forbidden_words",
            {"forbidden_words": ["head"]},
            "All of it.",
            "Every head of it.",
        ),
        ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n* b", "* a"),
        (
            "change_case:english_lowercase",
            {},
            "this is a sentence in english.",
            "This is a sentence in English.",
        ),
        (
            "language:response_language",
            {"language": "de"},
            "Das ist ein ganz normaler deutscher Satz.",
            "It is not.",
        ),
        (
            "startend:end_checker",
            {"end_phrase": "That is all."},
            "Hm. That is all.",
            "That is all. Hm.",
        ),
        ("startend:quotation", {}, '"quoted"', "not quoted"),
    ],
)
def test_checkers(
    tmp_path: Path, name: str, arguments: dict[str, Any], good: str, bad: str
) -> None:
    # copies on the hub give every instruction all arguments, most of them null
    problem = load(tmp_path, (name, {"num_sections": None, **arguments}))
    grade = TASKS["ifeval"].grade
    assert grade(good, problem)
    assert grade(f"<think>Well, let me see, {bad}</think>\n\n{good}", problem), (
        "thoughts do not count"
    )
    assert not grade(bad, problem)


@needs_checkers
@pytest.mark.usefixtures("sentences")
def test_all_instructions_must_be_followed(tmp_path: Path) -> None:
    problem = load(
        tmp_path, ("punctuation:no_comma", {}), ("keywords:existence", {"keywords": ["red"]})
    )
    assert (problem.id, problem.prompt) == ("ifeval/1000", "Write it.")
    assert problem.meta["checkers"], "another version of the checkers is another run"
    assert TASKS["ifeval"].grade("A red one.", problem)
    assert not TASKS["ifeval"].grade("A red, blue one.", problem)
    assert not TASKS["ifeval"].grade("", problem)


@needs_checkers
@pytest.mark.usefixtures("sentences")
@pytest.mark.parametrize(
    ("instruction", "more"),
    [
        (("no:such", {}), {}),
        (("length_constraints:number_words", {"relation": "about", "num_words": 4}), {}),
        (("punctuation:no_comma", {"words": 3}), {}),
        (("punctuation:no_comma", {}), {"kwargs": []}),
        (("punctuation:no_comma", {}), {"prompt": ""}),
    ],
)
def test_broken_rows_are_named(
    tmp_path: Path, instruction: tuple[str, dict[str, Any]], more: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="line 1"):
        load(tmp_path, instruction, **more)


@needs_checkers
def test_without_sentence_data_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    ifeval._checkers.cache_clear()
    with pytest.raises(ValueError, match=r"nltk\.downloader punkt_tab"):
        load(tmp_path, ("punctuation:no_comma", {}))


def test_without_the_checkers_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nltk", None)
    ifeval._checkers.cache_clear()
    with pytest.raises(ValueError, match=r"rlkv\[ifeval\]"):
        load(tmp_path, ("punctuation:no_comma", {}))
