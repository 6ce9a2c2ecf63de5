"""Tasks whose answer is a number or an expression: GSM8K, MATH-500, AIME, HMMT, tiny, smol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rlkv.evaluation.tasks.base import EvalProblem, EvalTask, HubData, ParsedRow, first_text
from rlkv.models.prompts import TEMPLATES
from rlkv.smol import MAX_NEW_TOKENS
from rlkv.smol import problems as smol_problems
from rlkv.tiny import problems as tiny_problems
from rlkv.verifier import is_correct, reference_answer

# two spaces as in the published evaluation and in lighteval; the paper (appendix B) has one
MATH_TEMPLATE = TEMPLATES["rlkv"].replace("clearly. The", "clearly.  The")
HELD_OUT_SEED = 2_000_003  # curricula are drawn with other seeds


def grade_math(text: str, problem: EvalProblem) -> bool:
    """Return whether the answer that ``text`` ends in equals the reference."""
    return is_correct(text, problem.answer)


def parse_math(row: dict[str, Any], where: str, text: Sequence[str]) -> ParsedRow:
    """Parse a row with a problem under one of ``text``, and an answer."""
    problem = unwrap(first_text(row, text, where))
    reference = first_text(row, ("answer", "Answer"), where)
    answer = reference_answer(reference)
    if not problem.strip() or not answer:
        raise ValueError(f"{where}: the problem is empty, or no output can equal its answer")
    solution = first_text(row, ("solution", "Solution"), where, default="")
    if not solution and reference.strip() != answer:
        solution = reference
    return ParsedRow({"problem": problem}, answer, {"problem": problem, "solution": solution})


def unwrap(text: str) -> str:
    """Return the problem in a text that may hold a known instruction, as published copies do."""
    for template in (MATH_TEMPLATE, TEMPLATES["rlkv"], TEMPLATES["boxed"]):
        before, after = template.split("{problem}")
        if text.startswith(before) and text.endswith(after):
            return text[len(before) : len(text) - len(after)]
    return text


def math_task(
    name: str,
    hub: HubData | None = None,
    *,
    file: str | None = None,
    text: Sequence[str] = ("problem", "prompt"),
    ids: Sequence[str] = ("id",),
    max_new_tokens: int = 8192,
    template: str = MATH_TEMPLATE,
    draw: Callable[[int], Sequence[Mapping[str, Any]]] | None = None,
) -> EvalTask:
    """Make a task whose answers the verifier compares.

    Its name is enough where problems are in a local file.

    Args:
        file: name of the local file without its suffix; default: ``name``.
        text: names that the field with the problem may have; the answer is in ``answer``.
    """
    return EvalTask(
        name=name,
        kind="math",
        template=template,
        max_new_tokens=max_new_tokens,
        file=file or name,
        fields=f"{' or '.join(text)} and answer",
        ids=ids,
        hub=hub,
        parse=partial(parse_math, text=text),
        grade=grade_math,
        draw=draw,
    )


MATHS = (
    math_task(
        "gsm8k",
        HubData("openai/gsm8k", "main"),
        file="gsm8k_test",
        text=("question", "prompt"),
        ids=(),
    ),
    math_task("math500", HubData("HuggingFaceH4/MATH-500"), ids=("unique_id",)),
    math_task(
        "aime24",
        HubData("HuggingFaceH4/aime_2024", split="train"),
        text=("problem", "Problem", "prompt"),
        ids=("id", "ID"),
        max_new_tokens=16384,
    ),
    math_task(
        "aime25",
        HubData("math-ai/aime25"),
        text=("problem", "question", "prompt"),
        ids=("id", "problem_idx"),
        max_new_tokens=16384,
    ),
    math_task(
        "aime26",
        HubData("MathArena/aime_2026", split="train"),
        ids=("problem_idx", "id"),
        max_new_tokens=16384,
    ),
    math_task(
        "hmmt25",
        HubData("MathArena/hmmt_feb_2025", split="train"),
        ids=("problem_idx",),
        max_new_tokens=16384,
    ),
    math_task(
        "tiny",
        text=("problem",),
        ids=(),
        max_new_tokens=440,  # the longest solution has 418 tokens
        template=TEMPLATES["rlkv"],
        draw=partial(tiny_problems, seed=HELD_OUT_SEED),
    ),
    math_task(
        "smol",
        text=("problem",),
        ids=(),
        max_new_tokens=MAX_NEW_TOKENS,
        template=TEMPLATES["plain"],
        draw=partial(smol_problems, seed=HELD_OUT_SEED, min_steps=4, max_steps=10),
    ),
)
