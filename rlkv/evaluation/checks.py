"""How often the verifier is right on references, whose verdicts are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlkv.data.problems import Problem
from rlkv.evaluation.report import Page
from rlkv.utils.files import write_json
from rlkv.utils.runtime import hardware_line, provenance
from rlkv.utils.store import Row
from rlkv.verifier import Verifier, extract_answer

Check = dict[str, Any]  # JSON-able


def check_verifier(problems: list[Problem], verifier: Verifier, source: str) -> Check:
    """Compare every reference solution with its own answer and the next problem's.

    ``source`` names them in errors.

    Returns:
        ``own``: solutions compared with their own answer, of which ``refused`` were not accepted.
        ``next``: solutions compared with the answer of the following problem (the first one's after
        the last), where it is another text, of which ``accepted`` were accepted.  Problems without
        solution or answer are ``left_out``.
    """
    rows = [(i, p) for i, p in enumerate(problems) if p.solution.strip() and p.answer.strip()]
    if not rows:
        raise ValueError(
            f"{source}: no problem has both a solution and an answer, nothing to check the "
            "verifier on"
        )
    own = [(i, p.solution, p.answer) for i, p in rows]
    following = zip(rows, [*rows[1:], rows[0]], strict=True)
    swapped = [(i, p.solution, q.answer) for (i, p), (_, q) in following if p.answer != q.answer]

    def wrong(cases: list[tuple[int, str, str]], expected: bool) -> list[Check]:
        verdicts = verifier.are_correct([(solution, answer) for _, solution, answer in cases])
        return [
            {"index": index, "extracted": extract_answer(solution), "answer": answer}
            for (index, solution, answer), verdict in zip(cases, verdicts, strict=True)
            if verdict is not expected
        ]

    return {
        **{"own": len(own), "refused": wrong(own, True)},
        **{"next": len(swapped), "accepted": wrong(swapped, False)},
        "left_out": len(problems) - len(rows),
    }


def check_pairs(rows: list[Row], verifier: Verifier) -> list[Check]:
    """Verdicts on texts that are known to be right or wrong, by kind and in total.

    Args:
        rows: each with text, gold, right (whether the text gives the answer gold) and kind.
    """
    verdicts = verifier.are_correct([(row["text"], row["gold"]) for row in rows])
    counts: dict[str, Check] = {}
    for index, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
        for kind in (row["kind"], "total"):
            count = counts.setdefault(
                kind, {"kind": kind, "right": 0, "wrong": 0, "refused": [], "accepted": []}
            )
            count["right" if row["right"] else "wrong"] += 1
            if verdict != row["right"]:
                count["accepted" if verdict else "refused"].append(index)
    total = counts.pop("total")
    return [*(counts[kind] for kind in sorted(counts)), total]


def accepted(row: Check) -> str:
    """How many own answers were accepted."""
    return share_of(row["own"] - len(row["refused"]), row["own"])


def share_of(part: int, n: int) -> str:
    """A count with its percentage."""
    return f"{part} of {n} ({part / n:.2%})" if n else "none"


def write_checks(folder: Path, name: str, content: dict[str, Any], page: Page) -> None:
    """``NAME.json`` with the content and where it comes from, ``NAME.md`` with the page, which is
    printed too.
    """
    write_json(folder / f"{name}.json", {**content, **provenance()})
    page.paragraph(f"{hardware_line()}.")
    page.write(folder / f"{name}.md")
    print(page.markdown())
