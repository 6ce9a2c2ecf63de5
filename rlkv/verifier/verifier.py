"""Is this answer right?  Extraction of the answer from the output, in time linear in the text, then comparison.

Plain cases (same text, two integers) are decided here, others by math-verify in the processes of ``pool.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rlkv.verifier.pool import WorkerPool

Answer = str | int | float | None

MAX_ANSWER_CHARS = 1000  # no answer of the data sets has more than 160; longer text is not an answer
MAX_NESTED_BOXES = 16
_NEVER_EQUAL = {"", "nan", "none", "null"}

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
# \\boxed after a line break is a box, so the pair rule must not swallow its backslash
_BRACES = re.compile(_BOX.pattern + r"|\\\\(?!boxed|fbox|framebox)|\\[{}]|[{}]")
_SENTENCE = "final answer is"
_INTEGER = re.compile(r"[-+]?\d{1,100}")
_CHOICE = re.compile(r"\\(?:textbf|mathbf|text|mathrm)\s*\{\s*\([A-Z]\)\s*\}(?:\\[ ,;]|[\s~])*(?=\S)")
_BOLD = re.compile(r"\\(?:textbf|mathbf|boldsymbol|bm)\s*\{([^{}]*)\}")


def last_box(text: str) -> str | None:
    r"""Content of the last balanced ``\boxed{}`` (or ``\fbox{}``), the inner one where boxes are nested.

    Escaped braces (``\{``) do not count.  Boxes nested more than 16 deep are not an answer.
    """
    first = _BOX.search(text)
    if first is None:
        return None
    found: tuple[int, int] | None = None
    open_braces: list[int] = []  # where the content of a box starts; -1 for other braces
    open_boxes = 0
    for match in _BRACES.finditer(text, first.start()):
        token = match.group()
        if token == "}":
            if open_braces:
                start = open_braces.pop()
                if start >= 0:
                    open_boxes -= 1
                    if found is None or start > found[0]:
                        found = (start, match.start())
        elif token == "{":
            open_braces.append(-1)
        elif token[-1] == "{" and len(token) > 2:
            open_braces.append(match.end())
            open_boxes += 1
            if open_boxes > MAX_NESTED_BOXES:
                return None
    return None if found is None else text[found[0] : found[1]]


def _after_sentence(text: str) -> str | None:
    """What follows the last "final answer is": one ``$...$``, or the rest of the sentence."""
    start = text.lower().rfind(_SENTENCE)
    if start < 0:
        return None
    rest = text[start + len(_SENTENCE) :][: MAX_ANSWER_CHARS * 2].lstrip(" :*\n\t")
    formula = re.match(r"(\$\$?|\\\(|\\\[)(.*?)(\$\$?|\\\)|\\\])", rest, re.DOTALL)
    if formula:
        return formula.group(2)
    return re.split(r"\n|\.(?:\s|$)|\. ?I hope", rest, maxsplit=1)[0].strip(" *")


def extract_answer(output: str) -> str | None:
    """The answer that ``output`` gives in a box or after "final answer is", as text, or None.

    The last number of a text does not count: a text that was cut or that wandered off always ends in *some* number.
    Takes time linear in the length of the text.
    """
    found = last_box(output)
    if found is None:
        found = _after_sentence(output)
    if found is None or len(found) > MAX_ANSWER_CHARS or "\0" in found:
        return None
    return found.strip() or None


def _clean(answer: Answer) -> str:
    """One spelling for what LaTeX shows alike; empty for what equals nothing."""
    text = "" if answer is None else str(answer).strip()
    if len(text) > MAX_ANSWER_CHARS or "\0" in text:
        return ""
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text.strip("$")
    text = _BOLD.sub(r"\1", _CHOICE.sub("", text, count=1)).rstrip(".").strip()
    return "" if text.lower() in _NEVER_EQUAL else text


def _decide_plainly(answer: str, candidate: str) -> bool | None:
    """The verdict where no algebra is needed, else None."""
    if not answer or not candidate:
        return False
    if "".join(answer.split()) == "".join(candidate.split()):
        return True
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(candidate):
        return int(answer) == int(candidate)
    if min(len(answer), len(candidate)) > 3 and answer.isalpha() and candidate.isalpha():
        return answer.casefold() == candidate.casefold()  # as products of letters, anagrams would be equal
    return None


class Verifier:
    """Verdicts on batches of answers; see :class:`rlkv.verifier.pool.WorkerPool` for the processes behind it.

    A pair that takes longer than ``timeout`` seconds of CPU time (ten times that of wall time), or that crashes its
    worker, is not equal.
    """

    def __init__(self, num_workers: int = 2, timeout: float = 5.0) -> None:
        self.pool = WorkerPool(num_workers, timeout)

    def are_equal(self, pairs: Iterable[tuple[Answer, Answer]]) -> list[bool]:
        """Whether each ``(right answer, candidate)`` means the same; NaN, None and empty equal nothing."""
        cleaned = [(_clean(answer), _clean(candidate)) for answer, candidate in pairs]
        verdicts = [_decide_plainly(*pair) for pair in cleaned]
        open_pairs = [i for i, verdict in enumerate(verdicts) if verdict is None]
        for i, verdict in zip(open_pairs, self.pool.run([cleaned[i] for i in open_pairs]), strict=True):
            verdicts[i] = verdict
        return [bool(verdict) for verdict in verdicts]

    def are_correct(self, pairs: Iterable[tuple[str | None, Answer]]) -> list[bool]:
        """Whether each ``(output, right answer)`` ends in that answer."""
        return self.are_equal((answer, extract_answer(output) if output else None) for output, answer in pairs)

    def is_correct(self, output: str | None, answer: Answer) -> bool:
        """Whether ``output`` ends in the right ``answer``."""
        return self.are_correct([(output, answer)])[0]

    def close(self) -> None:
        """End the worker processes; they start again when needed."""
        self.pool.close()


_DEFAULT = Verifier()  # its workers start when first needed
are_correct = _DEFAULT.are_correct


def is_correct(output: str | None, answer: Answer) -> bool:
    """Whether ``output`` ends in the right ``answer``.

    Never hangs: a comparison that takes more than five seconds of CPU time counts as not equal.

    Raises:
        ValueError: if math-verify is needed and not installed (pip install 'rlkv[eval]').
    """
    return _DEFAULT.is_correct(output, answer)
