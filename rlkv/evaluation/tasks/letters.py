"""The option that a completion chooses, found in the text that models write around it.

Searched in this order in all that follows the thoughts: what is stated ("the answer is (C)", "Answer: C",
``\\boxed{C}``; the last statement counts), what is preferred ("C is correct", "I choose C"; the last), a last line that
begins with a letter ("C. 42 m/s", "(C) because ...") unless the line before is another option of a list.  A statement
of two letters ("C or D") is not an answer, nor is a letter beyond the options.
"""

from __future__ import annotations

import re

from rlkv.verifier.extraction import after_thinking, last_box

MAX_NESTED = 8

# LaTeX and Markdown that may stand around a letter
_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mathsf|mathit|boldsymbol)\s*\{([^{}]{0,200})\}")
_MARKS = re.compile(r"[*`$#]|\\[()\[\],;!]|__|(?<!\w)_|_(?!\w)")

_ASCII = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"})

_OPEN = r"(?:[(\[{\"']\s{0,3})"
_CLOSE = r"(?:\s{0,3}[)\]}\"'])"
_KIND = r"(?:(?:option|choice|letter|answer)\s{1,3})?"


def _letter(name: str) -> str:
    """A pattern of one letter, in groups ``name1`` to ``name4``.

    In brackets or quotes; as a capital; A and I, which are words, only before punctuation or a reason; in lower case
    only at the end of a line or a clause.
    """
    alone = r"(?<![\w'])"
    reason = r"(?=\s+(?:because|since|as|and|or|with|due|for|based|rather|which|from|not|is|but)\b)"
    return (
        rf"(?:{_OPEN}(?P<{name}1>[A-Za-z]){_CLOSE}"
        rf"|{alone}(?P<{name}2>[B-HJ-Z])(?![\w'])"
        rf"|{alone}(?P<{name}3>[AI])(?:(?=\s*(?:[.,;:)\]!?/&-]|$))|{reason})"
        rf"|{alone}(?P<{name}4>[a-z])(?=\s*(?:[.,;:)\]!]\s|[.,;:)\]!]?\s*$)))"
    )


_STATED = re.compile(
    r"(?i:(?<!\bif the )(?<!\bwhether the )\b(?:answer|option|choice|letter)\b"
    r"(?:,?\s+[a-z']{1,15},?){0,6}?"  # to this question
    r"\s{0,3}(?:\([^()\n]{0,40}\)\s{0,3})?"
    r"(?:\b(?:is|are|was|(?:would|must|should|will|has to)(?:\s+(?:therefore|thus|then))? be)\b|[=:-])"
    r"(?:\s{0,3}(?:therefore|thus|then|hence|clearly|probably|most likely|likely|simply|indeed|definitely),?)?"
    r"(?:\s{0,3}:)?\s{0,5})"
    rf"(?:(?i:not)\s+{_OPEN}?[A-Za-z]{_CLOSE}?,?\s+(?i:but)\s+(?i:rather\s+)?)?"
    rf"(?i:{_KIND}){_letter('stated')}",
    re.MULTILINE,
)
_PREFERRED = re.compile(
    rf"(?<!tatement )(?<!tem ){_letter('judged')}[.):]?\s{{0,3}}"
    r"(?i:(?:is|must be|should be|seems|looks)\s+(?:the\s+|indeed\s+)?(?:(?:most|best|only)\s+)?"
    r"(?:correct|right|best|true|appropriate|answer))(?!\w)"
    r"|(?i:\b(?:choose|pick|select|selecting|choosing|picking|go with|going with|settle on)\s+(?:the\s+)?"
    rf"{_KIND}){_letter('chosen')}"
    r"|(?i:\b(?:so|thus|hence|therefore)[,:]?\s+(?:(?:it is|it's|it must be)\s+)?"
    rf"{_KIND}){_letter('concluded')}(?=\s*[.!]?\s*$)",
    re.MULTILINE,
)
_SECOND = re.compile(
    rf"\s*(?:(?:or|and|/|&)\s*(?:{_OPEN}[A-Za-z]{_CLOSE}|[A-J](?![\w']))(?!\s+(?:is|are|was)\b)"
    rf"|,\s*(?:{_OPEN}[A-Za-z]{_CLOSE}|[A-J])\s*(?:[.,]|$))",
    re.MULTILINE,
)
_FIRST_ON_LINE = re.compile(rf"^\s{{0,8}}(?:[-•]\s+)?(?:{_OPEN}([A-Za-z]){_CLOSE}|([A-Za-z])\s{{0,3}}(?:[.):]|$))")
_IN_BOX = re.compile(
    rf"^\s*(?i:{_KIND})(?:{_OPEN}([A-Za-z]){_CLOSE}(?:\s.*)?|([A-Za-z])(?:\s*[.):].*)?)\s*$", re.DOTALL
)
_TWO_IN_BOX = re.compile(r"^\W*[A-J]\W*(?:,|/|&|\band\b|\bor\b)\W*[A-J]\W*$")


def extract_letter(text: str, num_options: int) -> str | None:
    """The chosen option, A for the first; None if the text chooses none of ``num_options``, or more than one."""
    text = after_thinking(text)
    found = _stated(text)
    if found is None:
        plain = _plain(text)
        found = _last(_PREFERRED, plain)
        if found is None:
            found = _last_line(plain)
    letter = (found or "").upper()
    return letter if letter and ord("A") <= ord(letter) < ord("A") + num_options else None


def _plain(text: str) -> str:
    for _ in range(MAX_NESTED):
        text, changed = _WRAPPED.subn(r" \1 ", text)
        if not changed:
            break
    return _MARKS.sub("", text).translate(_ASCII)


def _stated(text: str) -> str | None:
    """The letter of the last statement; an empty text if that names two, None if nothing is stated."""
    box = last_box(text)
    content = "" if box is None else _plain(box)
    one, two = _IN_BOX.match(content), _TWO_IN_BOX.match(content)
    if not one and not two:
        return _last(_STATED, _plain(text))
    behind = text[max(text.rfind("\\boxed"), text.rfind("\\fbox"), text.rfind("\\framebox")) :]
    stated = _last(_STATED, _plain(behind))
    if stated is not None:
        return stated
    return (one.group(1) or one.group(2)) if one else ""


def _last(pattern: re.Pattern[str], text: str) -> str | None:
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
