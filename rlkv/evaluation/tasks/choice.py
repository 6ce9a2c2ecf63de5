"""Multiple choice: MMLU-Pro, GPQA-Diamond, LongReason, and the letter that a text ends in."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from functools import partial
from string import ascii_uppercase
from typing import Any

import numpy as np

from rlkv.data.problems import text_field
from rlkv.evaluation.tasks.base import EvalProblem, EvalTask, HubData, ParsedRow, Row
from rlkv.verifier.extraction import after_thinking, last_box

MAX_NESTED = 8
# LaTeX and Markdown that may stand around a letter
_WRAPPED = re.compile(
    r"\\(?:text|textbf|textrm|mathrm|mathbf|mathsf|mathit|boldsymbol)\s*\{([^{}]{0,200})\}"
)
_MARKS = re.compile(r"[*`$#]|\\[()\[\],;!]|__|(?<!\w)_|_(?!\w)")
_ASCII = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"}
)
_OPEN = r"(?:[(\[{\"']\s{0,3})"
_CLOSE = r"(?:\s{0,3}[)\]}\"'])"
_KIND = r"(?:(?:option|choice|letter|answer)\s{1,3})?"


def _letter(name: str) -> str:
    """Return a pattern of one letter, in groups ``name1`` to ``name4``.

    In brackets or quotes; as a capital; A and I, which are words, not before a word in lower case
    unless it begins a reason; in lower case only at the end of a line or a clause.
    """
    alone = r"(?<![\w'])"
    reason = r"(?=\s+(?:because|since|as|and|or|with|due|for|based|rather|which|from|not|is|but)\b)"
    return (
        rf"(?:{_OPEN}(?P<{name}1>[A-Za-z]){_CLOSE}"
        rf"|{alone}(?P<{name}2>[B-HJ-Z])(?![\w'])"
        rf"|{alone}(?P<{name}3>[AI])(?![\w'])(?:(?=\s*(?:[^\sa-z=]|$))|{reason})"
        rf"|{alone}(?P<{name}4>[a-z])(?=\s*(?:[.,;:)\]!]\s|[.,;:)\]!]?\s*$)))"
    )


_STATED = re.compile(
    r"(?i:(?<!\bif the )(?<!\bwhether the )(?<!\bthe other )"
    r"\b(?:answer|option|choice|letter)\b"
    r"(?:,?\s+[a-z']{1,15},?){0,6}?"  # to this question
    r"\s{0,3}(?:\([^()\n]{0,40}\)\s{0,3})?"
    r"(?:\b(?:is|are|was|(?:would|must|should|will|has to)(?:\s+(?:therefore|thus|then))? be)\b"
    r"|[=:-])(?:\s{0,3}(?:therefore|thus|then|hence|clearly|probably|most likely|likely|simply"
    r"|indeed|definitely),?)?"
    r"(?:\s{0,3}:)?\s{0,5})"
    rf"(?:(?i:not)\s+{_OPEN}?[A-Za-z]{_CLOSE}?,?\s+(?i:but)\s+(?i:rather\s+)?)?"
    rf"(?i:{_KIND}){_letter('stated')}",
    re.MULTILINE,
)
_PREFERRED = re.compile(
    rf"(?<!tatement )(?<!tem ){_letter('judged')}[.):]?\s{{0,3}}"
    r"(?i:(?:is|must be|should be|seems|looks)\s+(?:the\s+|indeed\s+)?(?:(?:most|best|only)\s+)?"
    r"(?:correct|right|best|true|appropriate|answer))(?!\w)"
    r"|(?i:\b(?:choose|pick|select|selecting|choosing|picking|go with|going with|settle on)\s+"
    rf"(?:the\s+)?{_KIND}){_letter('chosen')}"
    r"|(?i:\b(?:so|thus|hence|therefore)[,:]?\s+(?:(?:it is|it's|it must be)\s+)?"
    rf"{_KIND}){_letter('concluded')}(?=\s*[.!]?\s*$)",
    re.MULTILINE,
)
_SECOND = re.compile(
    rf"\s*(?:(?:or|and|/|&)\s*(?:{_OPEN}[A-Za-z]{_CLOSE}|[A-J](?![\w']))(?!\s+(?:is|are|was)\b)"
    rf"|,\s*(?:{_OPEN}[A-Za-z]{_CLOSE}|[A-J])\s*(?:[.,]|$))",
    re.MULTILINE,
)
_FIRST_ON_LINE = re.compile(
    rf"^\s{{0,8}}(?:[-•]\s+)?(?:{_OPEN}([A-Za-z]){_CLOSE}|([A-Za-z])\s{{0,3}}(?:[.):]|$))"
)
_IN_BOX = re.compile(
    rf"^\s*(?i:{_KIND})(?:{_OPEN}([A-Za-z]){_CLOSE}(?:\s.*)?|([A-Za-z])(?:\s*[.):].*)?)\s*$",
    re.DOTALL,
)
_TWO_IN_BOX = re.compile(r"^\W*[A-J]\W*(?:,|/|&|\band\b|\bor\b)\W*[A-J]\W*$")


def extract_letter(text: str, num_options: int) -> str | None:
    """Return the chosen option, A for the first.

    None if the text chooses none of ``num_options``, or more than one.
    """
    text = after_thinking(text)
    plain = _plain(text)
    found = _boxed(text)
    if found is None:
        found = _last(_STATED, plain)
    if found is None:
        found = _last(_PREFERRED, plain)
    if found is None:
        found = _last_line(plain)
    letter = (found or "").upper()
    return letter if letter and letter in ascii_uppercase[:num_options] else None


def _plain(text: str) -> str:
    for _ in range(MAX_NESTED):
        text, changed = _WRAPPED.subn(r" \1 ", text)
        if not changed:
            break
    return _MARKS.sub("", text).translate(_ASCII)


def _boxed(text: str) -> str | None:
    """Return the letter of the last box, or of a statement behind it; None without one."""
    box = last_box(text)
    content = "" if box is None else _plain(box)
    one = _IN_BOX.match(content)
    if not one and not _TWO_IN_BOX.match(content):
        return None
    start = max(text.rfind(command) for command in ("\\boxed", "\\fbox", "\\framebox"))
    behind = _last(_STATED, _plain(text[start:]))
    if behind is not None:
        return behind
    return (one[1] or one[2]) if one else ""


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the letter of the last match, an empty text if it names two; None without one."""
    found: str | None = None
    for match in pattern.finditer(text):
        letter = next(value for value in match.groups() if value)
        found = "" if _SECOND.match(text, match.end()) else letter
    return found


def _last_line(text: str) -> str | None:
    lines = [line for line in text.splitlines() if line.strip()]
    last = _FIRST_ON_LINE.match(lines[-1]) if lines else None
    if last is None or (len(lines) > 1 and _FIRST_ON_LINE.match(lines[-2])):
        return None
    return last.group(1) or last.group(2)


# of lighteval (tasks/mmlu_pro.py), whose maths prompt the published evaluation has
TEMPLATE = (
    "Answer the following multiple choice question. The last line of your response should be of "
    "the following format: 'Answer: $LETTER' (without quotes) where LETTER is one of {letters}. "
    "Think step by step before answering.\n\n{problem}\n\n{options}\n\nAnswer:"
)
LONG_TEMPLATE = (
    "{problem}\n\nThink step by step before answering. The last line of your response should be of "
    "the following format: 'Answer: $LETTER' (without quotes) where LETTER is that of the right "
    "option."
)
LENGTHS = ("8k", "16k", "32k", "64k", "128k")  # splits: tokens of a prompt
SAMPLE = 500
SAMPLE_SEED = 42  # of the published evaluation
CATEGORIES = ("chemistry", "computer_science", "law", "physics")
PADDING = "N/A"  # early copies of the data pad every list of options to ten


def grade_choice(text: str, problem: EvalProblem) -> bool:
    """Return whether ``text`` ends in the right letter."""
    return extract_letter(text, len(problem.meta["options"])) == problem.answer


def parse_choice(row: dict[str, Any], where: str) -> ParsedRow:
    """Parse a row of MMLU-Pro.

    Its fields: question, options, answer (a letter) or answer_index (from 0), category.
    """
    options = row.get("options")
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise ValueError(f"{where}: field 'options' must be a list of texts")
    while options and options[-1] == PADDING:
        options = options[:-1]
    if not 2 <= len(options) <= len(ascii_uppercase):
        raise ValueError(f"{where}: {len(options)} options, expected 2 to {len(ascii_uppercase)}")
    letters = ascii_uppercase[: len(options)]
    index = row.get("answer_index")
    if index is not None and not (isinstance(index, int) and 0 <= index < len(letters)):
        raise ValueError(
            f"{where}: answer_index {index!r} is not one of the {len(letters)} options"
        )
    if index is not None and "answer" not in row:
        answer = letters[index]
    else:
        answer = text_field(row, "answer", where).strip()
    if len(answer) != 1 or answer not in letters or index not in (None, letters.index(answer)):
        raise ValueError(
            f"{where}: answer {answer!r} and answer_index {index!r} do not name one of {letters}"
        )
    question = text_field(row, "question", where)
    return _parsed(question, options, answer, category=row.get("category"))


def parse_gpqa(row: dict[str, Any], where: str) -> ParsedRow:
    """Parse a row of GPQA.

    The options are shuffled with the question as the seed: the same order in every run and every
    copy of the data.
    """
    names = ("Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))
    question = text_field(row, "Question", where).strip()
    options = [text_field(row, name, where).strip() for name in names]
    if not question or not all(options):
        raise ValueError(f"{where}: the question or an answer is empty")
    order = random.Random(question).sample(range(4), 4)
    return _parsed(question, [options[i] for i in order], ascii_uppercase[order.index(0)])


def _parsed(question: str, options: list[str], answer: str, **meta: Any) -> ParsedRow:
    letters = ascii_uppercase[: len(options)]
    lines = [f"{letter}: {option}" for letter, option in zip(letters, options, strict=True)]
    texts = {"problem": question, "letters": letters, "options": "\n".join(lines)}
    return ParsedRow(texts, answer, {"problem": question, "options": options, **meta})


def parse_longreason(row: dict[str, Any], where: str) -> ParsedRow:
    """Parse a row of LongReason, whose prompt has context, question and options."""
    prompt = text_field(row, "prompt", where)
    answer = text_field(row, "answer", where).strip().upper()
    if not prompt.strip() or len(answer) != 1 or answer not in ascii_uppercase:
        raise ValueError(f"{where}: the prompt is empty, or answer {answer!r} is not a letter")
    meta = {"problem": prompt, "options": list(ascii_uppercase)}
    return ParsedRow({"problem": prompt}, answer, meta)


def select_category(rows: Iterable[Row], category: str) -> list[Row]:
    """Select the rows of a category, of more than 500 the same 500 in every run.

    The sample is that of the published evaluation if the rows are in the hub's order.
    """
    wanted = category.replace("_", " ")
    rows = list(rows)
    found = []
    for row in rows:
        if str(row[1].get("category", "")).strip().lower().replace("_", " ") == wanted:
            found.append(row)
    if not found:
        seen = sorted({str(row[1].get("category")) for row in rows})
        raise ValueError(
            f"no row has the category {wanted!r}: found {', '.join(seen[:20]) or 'no rows'}"
        )
    if len(found) <= SAMPLE:
        return found
    chosen = np.random.default_rng(SAMPLE_SEED).permutation(len(found))[:SAMPLE]
    return [found[i] for i in sorted(chosen)]


CHOICE = [
    EvalTask(
        name=f"mmlu_pro:{category}",
        kind="choice",
        template=TEMPLATE,
        max_new_tokens=8192,
        file="mmlu_pro",
        fields="question, options, answer and category",
        ids=("question_id",),
        hub=HubData("TIGER-Lab/MMLU-Pro"),
        parse=parse_choice,
        grade=grade_choice,
        select=partial(select_category, category=category),
    )
    for category in CATEGORIES
]
CHOICE.append(
    EvalTask(
        name="gpqa_diamond",
        kind="choice",
        template=TEMPLATE,
        max_new_tokens=32768,
        file="gpqa_diamond",
        fields="Question, Correct Answer and Incorrect Answer 1, 2 and 3",
        ids=("Record ID",),
        hub=HubData("Idavidrein/gpqa", "gpqa_diamond", "train"),
        parse=parse_gpqa,
        grade=grade_choice,
    )
)
for _length in LENGTHS:
    CHOICE.append(
        EvalTask(
            name=f"longreason:{_length}",
            kind="choice",
            template=LONG_TEMPLATE,
            max_new_tokens=8192,
            file=f"longreason_{_length}",
            fields="prompt and answer",
            ids=("example_idx",),
            hub=HubData("lz1bytedance/LongReason", split=_length),
            parse=parse_longreason,
            grade=grade_choice,
        )
    )
