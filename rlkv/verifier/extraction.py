"""Place of the answer in a text: after the thoughts, in the last box or the last statement.

Everything here takes time linear in the length of the text.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_ANSWER_CHARS = 1000  # no answer of the data sets has more than 160
MAX_NESTED_BOXES = 16
MAX_JOINED_BOXES = 8
GSM8K_MARK = "####"
NEVER_EQUAL = {"", "nan", "none", "null"}  # how tables write an answer that is missing
THINKING = "<think>"
THINKING_END = "</think>"

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])[ \t]*")
# \\boxed after a line break is a box, so the pair rule must not swallow its backslash
_BRACES = re.compile(_BOX.pattern + r"\{?|\\\\(?!boxed|fbox|framebox)|\\[{}]|[{}]")
_ARGUMENT = r"\s{0,3}(?:\{[^{}\n]{1,99}\}|\d)"
_BARE = re.compile(rf"-?\d[\d.,]*(?<=\d)|\\[dt]?frac{_ARGUMENT}{_ARGUMENT}|[A-Za-z]\b")
# between boxes that are one answer together: $x = \boxed{2}$ or $x = \boxed{3}$
_DELIMITERS = r"[\s$]|\\[()\[\]]"
_JOIN = re.compile(
    rf"(?:{_DELIMITERS})*(?:,|;|,?\s*(?:and|or)\b)(?:{_DELIMITERS}|[A-Za-z](?:_\{{?\d\}}?)?\s*=)*"
)
_FINAL = re.compile(
    r"\bfinal\s{1,9}answer(?:\s{1,9}(?:is|equals)\b|\s{0,9}=|[\s*_#:]{0,9}?[:\n])"
    r"(?:\s{1,9}(?:therefore|thus|then|simply|indeed|also|still|now)\b)?",
    re.IGNORECASE,
)
# how a value begins that replaces a box before it: not "given to 2 decimal places", not "confirmed
# by 3 + 4 = 7", not "an integer between 0 and 999"
_VALUE = re.compile(
    r"\s*(?:(?:the|that|equal\s+to|exactly|actually|only|just|approximately|about)\s+)*"
    r"(?:[-+±\u2212\u2013≈~]?\s?(?:[\d.$£€¥\[{\\√∛π∠<>`]|\((?![a-z]{2}))"
    r"|[a-z\u03b1-\u03c9]\d*\s*[=<>≤≥≠∈^_+*/(\u2212-]|[a-z]\s+(?:is|equals)\s|[a-z]{1,4}\s*=|[a-z]{2,3}\s*[\^+]"
    r"|(?:sqrt|pi|ln|log|sin|cos|tan|binom)\b)",
    re.IGNORECASE,
)
_LAST_LINE = re.compile(r"(?:\W*|.*\b)answer\W{0,4}(?:\bis\b|:)|.*####\s", re.IGNORECASE)
_HEADING = re.compile(r"\W*answer\W*", re.IGNORECASE)
_BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*")
_FORMULA = re.compile(r"(\$\$?|\\\(|\\\[)(.*?)(\$\$?|\\\)|\\\])", re.DOTALL)
# not the first entries of a list in brackets: (1,250) is a pair
_DIGIT_GROUPS = re.compile(r"(?<![\d,.(\[{])\d{1,3}(?:,\d{3})+(?!,?\d)")
_REASON = re.compile(r"\n|(?<!\\)[.!](?:\s|$)|,?\s(?:which|because|since|where|as)\s|I hope")


class _Box(NamedTuple):
    start: int
    end: int
    content: str | None  # None: it never ends, or it holds other boxes


def after_thinking(text: str) -> str:
    """Return what follows the thoughts of a reasoning model.

    All of the text if it has none, nothing if they do not end.
    """
    rest = text.rpartition(THINKING_END)[2]
    return "" if THINKING in rest else rest


def opening(prompt: str) -> str:
    """Return the mark of thoughts that ``prompt`` opens, as some chat templates do, or nothing.

    Completions close it; with it in front they are read like those of other models.
    """
    return THINKING if prompt.rstrip().endswith(THINKING) else ""


def _boxes(text: str) -> list[_Box]:
    """Return all boxes, in the order in which they open; none if they are nested too deep."""
    found: list[_Box] = []
    # number of the box and start of its content; -1 for other braces
    open_braces: list[tuple[int, int]] = []
    open_boxes = 0
    first = _BOX.search(text)
    for match in _BRACES.finditer(text, first.start()) if first else ():
        token = match[0]
        if token == "}":
            number, start = open_braces.pop() if open_braces else (-1, 0)
            if number >= 0:
                open_boxes -= 1
                if number == len(found) - 1:  # no other box in it
                    found[number] = _Box(
                        found[number].start, match.end(), text[start : match.start()]
                    )
        elif token == "{":
            open_braces.append((-1, 0))
        elif token[-1] == "{" and len(token) > 2:
            open_braces.append((len(found), match.end()))
            found.append(_Box(match.start(), len(text), None))
            open_boxes += 1
            if open_boxes > MAX_NESTED_BOXES:
                return []
        elif len(token) > 2:  # \boxed 7
            bare = _BARE.match(text, match.end())
            if bare:
                found.append(_Box(match.start(), bare.end(), bare[0]))
    return found


def last_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{}`` or ``\fbox{}``; None if it never ends.

    The inner one counts where boxes are nested.  Escaped braces (``\{``) do not count.  Boxes
    nested more than 16 deep are not an answer.
    """
    boxes = _boxes(text)
    return boxes[-1].content if boxes else None


def _boxed(text: str, boxes: list[_Box]) -> str | None:
    """Return the last box, with those before it that belong to it: the roots are [2] and [3]."""
    content = boxes[-1].content
    start = boxes[-1].start
    if content is None or not content.strip():
        return None
    contents = [content]
    for box in boxes[-2 : -MAX_JOINED_BOXES - 1 : -1]:
        if box.content is None or not _JOIN.fullmatch(text, box.end, start):
            break
        start = box.start
        if box.content not in contents:
            contents.insert(0, box.content)
    return ", ".join(contents)


def _stated(text: str, start: int) -> str | None:
    """Return what the last "final answer is" after ``start`` states."""
    rest = None
    for match in _FINAL.finditer(text, start):
        rest = match.end()
    return None if rest is None else _statement(text[rest : rest + 2 * MAX_ANSWER_CHARS])


def _statement(said: str) -> str:
    """Return the formula that ``said`` begins with and a few words, or its first sentence."""
    said = said.replace("**", "").lstrip(" :*_#=\n\t").removeprefix("- ")
    if formula := _FORMULA.match(said):
        more = _REASON.split(said[formula.end() :], maxsplit=1)[0]
        is_part = re.search(r"\d|[$\\]", more) or len(more.split()) < 4
        return f"{formula[2]} {more if is_part else ''}".strip()
    return _REASON.split(said, maxsplit=1)[0].strip(" *_")


def _is_value(stated: str) -> bool:
    return re.search(r"[\d\\]", stated) is not None and _VALUE.match(stated) is not None


def _last_line(text: str) -> str | None:
    """Return what the last line gives after "answer:" or below "Answer", or its only bold value."""
    lines = text.rstrip()[-4 * MAX_ANSWER_CHARS :].rsplit("\n", 3)
    above = [line for line in lines[:-1] if line.strip()]
    stated = _LAST_LINE.match(lines[-1])
    if stated:
        return _statement(lines[-1][stated.end() :])
    if above and _HEADING.fullmatch(above[-1]):
        return _statement(lines[-1])
    bold = _BOLD.findall(lines[-1])
    return bold[0] if len(bold) == 1 and re.search(r"\d|\\", bold[0]) else None


def extract_answer(output: str) -> str | None:
    """Return the answer that ``output`` gives, as text, or None.

    Read is what follows the thoughts, or all of it where they do not end.  The last box counts,
    boxes that are joined by commas or "and" together, or a sentence like "The final answer is 7"
    after it; without both, "answer: 7" or the only bold value in the last line.  A last box that is
    empty or never ends is not an answer, nor is one in the middle of thoughts that were opened in
    ``output`` and never end.  The last number of a text does not count: a text that was cut or that
    wandered off always ends in *some* number.
    """
    text = after_thinking(output)
    is_thinking = not text and THINKING in output.rpartition(THINKING_END)[2]
    if is_thinking:
        text = output
    boxes = _boxes(text)
    found = _boxed(text, boxes) if boxes else None
    end = boxes[-1].end if boxes else 0
    stated = _stated(text, boxes[-1].start if boxes else 0)
    if stated is None and found is None:
        stated = _last_line(text[end:])
    if stated is not None and (found is None or _is_value(stated)):
        end = len(text)
        found = stated
    if found is None or len(found) > MAX_ANSWER_CHARS or "\0" in found:
        return None
    if is_thinking and re.search(r"\w", text[end:]):
        return None
    return found.strip() or None


def reference_answer(text: str) -> str:
    """Return the answer in a reference: behind ``####`` (GSM8K), in the last box, or all of it.

    Behind ``####`` is the rest of the last line; elsewhere it is a heading of Markdown.
    A published copy of MATH-500 (Kurt232/bench) has the whole solution in its field ``answer``.
    Boxes that belong together are one answer, as in outputs.  Empty for what equals nothing, such
    as the NaN that pandas writes for a missing answer, or a whole proof.
    """
    _, mark, last = text.rstrip().rpartition(GSM8K_MARK)
    if mark and "\n" not in last.strip():
        found = _DIGIT_GROUPS.sub(lambda group: group[0].replace(",", ""), last)
    else:
        boxes = _boxes(text)
        is_boxed = bool(boxes) and boxes[-1].content is not None
        found = (_boxed(text, boxes) or "") if is_boxed else text
    found = found.strip()
    too_long = len(found) > MAX_ANSWER_CHARS
    return "" if too_long or "\0" in found or found.lower() in NEVER_EQUAL else found
