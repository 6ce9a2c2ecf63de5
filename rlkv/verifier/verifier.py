"""Is this answer right?  Extraction of the answer from the output, in time linear in the text, then comparison.

Plain cases (same text, two integers, words) are decided here, others by math-verify in the processes of ``pool.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from numbers import Real

from rlkv.verifier.extraction import MAX_ANSWER_CHARS, extract_answer, last_box, reference_answer
from rlkv.verifier.pool import WorkerPool
from rlkv.verifier.reading import Pairs, pairs_to_compare

__all__ = ["Verifier", "are_correct", "extract_answer", "is_correct", "last_box", "reference_answer"]

Answer = str | int | float | None

_NEVER_EQUAL = {"", "nan", "none", "null"}
_INTEGER = re.compile(r"[-+]?\d{1,100}")


def _text(answer: Answer) -> str:
    """The answer as text; empty for what equals nothing: no number or text, NaN, infinity as a number."""
    if isinstance(answer, bool) or not isinstance(answer, (str, Real)):
        return ""
    if isinstance(answer, float) and not math.isfinite(answer):
        return ""
    text = str(answer).strip()
    if text.lower() in _NEVER_EQUAL or len(text) > MAX_ANSWER_CHARS or "\0" in text:
        return ""
    return text


def _decide(answer: str, candidate: str) -> bool | Pairs:
    """The verdict where no algebra is needed, else the pairs of which one must be equal."""
    if not answer or not candidate:
        return False
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(candidate):
        return int(answer) == int(candidate)
    if " ".join(answer.split()) == " ".join(candidate.split()):
        return bool(answer.strip("$. "))
    return pairs_to_compare(answer, candidate)


class Verifier:
    """Verdicts on batches of answers; see :class:`rlkv.verifier.pool.WorkerPool` for the processes behind it.

    A pair that takes longer than ``timeout`` seconds of CPU time (ten times that of wall time), or that crashes its
    worker, is not equal.
    """

    def __init__(self, num_workers: int = 2, timeout: float = 5.0) -> None:
        self.pool = WorkerPool(num_workers, timeout)

    def are_equal(self, pairs: Iterable[tuple[Answer, Answer]]) -> list[bool]:
        """Whether each ``(right answer, candidate)`` means the same; NaN, None, truth values and empty equal nothing.

        Of a right answer in GSM8K's form, what follows ``####`` counts.
        """
        decided: list[bool] = []
        jobs: list[Pairs] = []
        waiting: list[int] = []
        for answer, candidate in pairs:
            text = answer if not isinstance(answer, str) else reference_answer(answer)
            verdict = _decide(_text(text), _text(candidate))
            if not isinstance(verdict, bool):
                waiting.append(len(decided))
                jobs.append(verdict)
            decided.append(verdict is True)
        for i, verdict in zip(waiting, self.pool.run(jobs), strict=True):
            decided[i] = verdict
        return decided

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
