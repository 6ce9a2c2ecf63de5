"""Tasks whose answer is a number or an expression: GSM8K, MATH-500, AIME, the tiny task."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rlkv.data.deepscaler import text_field
from rlkv.evaluation.tasks.base import EvalProblem, EvalTask, HubData, ParsedRow, Row, first_field
from rlkv.models.prompts import TEMPLATES
from rlkv.tiny.task import problems as tiny_problems
from rlkv.verifier.verifier import is_correct, last_box

# the published evaluation has two spaces here, as lighteval has; one space is the paper's (appendix B)
MATH_TEMPLATE = TEMPLATES["rlkv"].replace("clearly. The", "clearly.  The")
GSM8K_MARK = "####"
AIME_TOKENS = 16384
TOKENS = 8192
TINY_TOKENS = 1024


def grade_math(text: str, problem: EvalProblem) -> bool:
    """Whether the answer that ``text`` ends in equals the reference (see :mod:`rlkv.verifier.verifier`)."""
    return is_correct(text, problem.answer)


def unwrap(text: str) -> str:
    """The problem in a text that already holds a known instruction (published copies with a field ``prompt``)."""
    for template in (MATH_TEMPLATE, TEMPLATES["rlkv"], TEMPLATES["boxed"]):
        before, after = template.split("{problem}")
        if text.startswith(before) and text.endswith(after):
            return text[len(before) : len(text) - len(after)]
    return text


def reference_answer(text: str) -> str:
    """The answer in a reference: behind ``####`` without thousands separators (GSM8K), in the last box, or all of it.

    A published copy of MATH-500 (Kurt232/bench) has the whole solution in its field ``answer``.
    """
    if GSM8K_MARK in text:
        return text.rpartition(GSM8K_MARK)[2].strip().replace(",", "")
    box = last_box(text)
    return (text if box is None else box).strip()


def parse_math(
    row: dict[str, Any], where: str, number: int, text_names: tuple[str, ...], id_names: tuple[str, ...]
) -> ParsedRow:
    """A row with a problem under one of ``text_names`` and an answer; the row's number is its id if it has none."""
    problem = unwrap(text_field(row, first_field(row, text_names, where), where))
    reference = text_field(row, first_field(row, ("answer", "Answer"), where), where)
    answer = reference_answer(reference)
    if not problem.strip() or not answer:
        raise ValueError(f"{where}: the problem or its answer is empty")
    solution = next((text_field(row, name, where) for name in ("solution", "Solution") if name in row), "")
    if not solution and reference.strip() != answer:
        solution = reference
    key = next((text_field(row, name, where) for name in id_names if name in row), str(number))
    return ParsedRow(key, {"problem": problem}, answer, {"problem": problem, "solution": solution})


def _parser(text_names: tuple[str, ...], id_names: tuple[str, ...] = ()) -> Callable[..., ParsedRow]:
    return partial(parse_math, text_names=text_names, id_names=id_names)


def draw_tiny(number: int, seed: int) -> list[Row]:
    """Fresh problems of the tiny task."""
    return [(f"tiny problem {i}", dict(row)) for i, row in enumerate(tiny_problems(number, seed), start=1)]


GSM8K = EvalTask(
    name="gsm8k",
    kind="math",
    template=MATH_TEMPLATE,
    max_new_tokens=TOKENS,
    file="gsm8k_test",
    fields="question and answer",
    hub=HubData("openai/gsm8k", "main"),
    parse=_parser(("question", "prompt")),
    grade=grade_math,
)
MATH500 = EvalTask(
    name="math500",
    kind="math",
    template=MATH_TEMPLATE,
    max_new_tokens=TOKENS,
    file="math500",
    fields="problem and answer",
    hub=HubData("HuggingFaceH4/MATH-500"),
    parse=_parser(("problem", "prompt"), ("unique_id",)),
    grade=grade_math,
)
AIME24 = EvalTask(
    name="aime24",
    kind="math",
    template=MATH_TEMPLATE,
    max_new_tokens=AIME_TOKENS,
    file="aime24",
    fields="problem and answer",
    hub=HubData("HuggingFaceH4/aime_2024", split="train"),
    parse=_parser(("problem", "Problem", "prompt"), ("id", "ID")),
    grade=grade_math,
)
AIME25 = EvalTask(
    name="aime25",
    kind="math",
    template=MATH_TEMPLATE,
    max_new_tokens=AIME_TOKENS,
    file="aime25",
    fields="problem (or prompt) and answer",
    hub=HubData("math-ai/aime25"),
    parse=_parser(("problem", "question", "prompt"), ("id", "problem_idx")),
    grade=grade_math,
)
TINY = EvalTask(
    name="tiny",
    kind="math",
    template=TEMPLATES["rlkv"],
    max_new_tokens=TINY_TOKENS,
    file="tiny",
    fields="problem and answer",
    hub=None,
    parse=_parser(("problem",)),
    grade=grade_math,
    draw=draw_tiny,
)
