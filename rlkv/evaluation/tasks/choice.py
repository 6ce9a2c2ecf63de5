"""Multiple choice: MMLU-Pro, and the letter that a completion ends in."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from string import ascii_uppercase
from typing import Any

import numpy as np

from rlkv.data.deepscaler import text_field
from rlkv.evaluation.tasks.base import EvalProblem, EvalTask, HubData, ParsedRow, Row
from rlkv.evaluation.tasks.letters import extract_letter

# of lighteval (tasks/mmlu_pro.py), whose maths prompt the published evaluation has
TEMPLATE = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is one of {letters}. Think step by step before answering.\n\n"
    "{problem}\n\n{options}\n\nAnswer:"
)
SAMPLE = 500
SAMPLE_SEED = 42  # of the published evaluation
CATEGORIES = ("chemistry", "computer_science", "law", "physics")
PADDING = "N/A"  # early copies of the data pad every list of options to ten


def grade_choice(text: str, problem: EvalProblem) -> bool:
    """Whether ``text`` ends in the right letter."""
    return extract_letter(text, len(problem.meta["options"])) == problem.answer


def parse_choice(row: dict[str, Any], where: str, number: int) -> ParsedRow:
    """A row of MMLU-Pro: question, options, answer (a letter) or answer_index (from 0), perhaps question_id."""
    options = row.get("options")
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise ValueError(f"{where}: field 'options' must be a list of texts")
    while options and options[-1] == PADDING:
        options = options[:-1]
    if not 2 <= len(options) <= len(ascii_uppercase):
        raise ValueError(f"{where}: {len(options)} options, expected 2 to {len(ascii_uppercase)}")
    letters = ascii_uppercase[: len(options)]
    question = text_field(row, "question", where)
    return ParsedRow(
        key=text_field(row, "question_id", where) if "question_id" in row else str(number),
        texts={
            "problem": question,
            "letters": letters,
            "options": "\n".join(f"{letter}: {option}" for letter, option in zip(letters, options, strict=True)),
        },
        answer=_answer(row, letters, where),
        meta={"problem": question, "options": options, "category": row.get("category")},
    )


def _answer(row: dict[str, Any], letters: str, where: str) -> str:
    index = row.get("answer_index")
    if index is not None and not (isinstance(index, int) and 0 <= index < len(letters)):
        raise ValueError(f"{where}: answer_index {index!r} is not one of the {len(letters)} options")
    if index is not None and "answer" not in row:
        return letters[index]
    answer = text_field(row, "answer", where).strip()
    if len(answer) != 1 or answer not in letters or (index is not None and answer != letters[index]):
        raise ValueError(f"{where}: answer {answer!r} and answer_index {index!r} do not name one of {letters}")
    return answer


def select_category(rows: Iterable[Row], category: str) -> list[Row]:
    """The rows of a category, in the file's order; of more than 500 the same 500 in every run.

    The sample is that of the published evaluation if the rows are in the hub's order.
    """
    wanted = category.replace("_", " ")
    rows = list(rows)
    found = [row for row in rows if str(row[1].get("category", "")).strip().lower().replace("_", " ") == wanted]
    if not found:
        seen = sorted({str(row[1].get("category")) for row in rows})
        raise ValueError(f"no row has the category {wanted!r}: found {', '.join(seen[:20]) or 'no rows'}")
    if len(found) <= SAMPLE:
        return found
    chosen = np.random.default_rng(SAMPLE_SEED).permutation(len(found))[:SAMPLE]
    return [found[i] for i in sorted(chosen)]


MMLU_PRO = tuple(
    EvalTask(
        name=f"mmlu_pro:{category}",
        kind="choice",
        template=TEMPLATE,
        max_new_tokens=8192,
        file="mmlu_pro",
        fields="question, options, answer and category",
        hub=HubData("TIGER-Lab/MMLU-Pro"),
        parse=parse_choice,
        grade=grade_choice,
        select=partial(select_category, category=category),
    )
    for category in CATEGORIES
)
