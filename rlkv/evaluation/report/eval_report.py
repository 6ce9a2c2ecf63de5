"""Figures of an evaluation from its rows: accuracy per task and method, differences to the full cache, bytes, texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

from rlkv.evaluation.run.methods import FULL
from rlkv.evaluation.stats.error_modes import MODES, wrong_mode
from rlkv.evaluation.stats.metrics import (
    lengths_when_both_right,
    mean_with_interval,
    ngram_entropy,
    paired_difference,
    problem_scores,
    repetition_rate,
    sentence_redundancy,
    smallest_provable_difference,
)

NGRAMS = (1, 2, 3)
Row = dict[str, Any]
Summary = dict[str, Any]


def by_problem(rows: list[Row]) -> dict[str, list[bool]]:
    """Verdicts on the samples of each problem, in the order of their keys."""
    found: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        found[row["key"]].append(row["correct"])
    return {key: found[key] for key in sorted(found)}


def summarize(task: str, method: str, rows: list[Row], full_rows: list[Row] | None, seed: int = 0) -> Summary:
    """pass@1 with its interval, the difference to the full cache with its own, pass@k, lengths, bytes, error modes.

    Args:
        full_rows: of the full cache on the same problems; None if it was not run: no differences and error modes then.

    Raises:
        ValueError: if the full cache was run on other problems.
    """
    verdicts = by_problem(rows)
    scores = problem_scores(list(verdicts.values()))
    estimate = mean_with_interval(scores, seed)
    summary: Summary = {
        "task": task,
        "method": method,
        "n": len(scores),
        "samples": len(rows) // len(scores),
        "accuracy": estimate.mean,
        "ci_low": estimate.low,
        "ci_high": estimate.high,
        "pass_at_k": pass_at(list(verdicts.values()), seed),
        "mean_output_tokens": _mean(rows, lambda row: len(row["token_ids"])),
        "kv_bytes": sum(row["kv_bytes"] for row in rows),
        "kv_bytes_full": sum(row["kv_bytes_full"] for row in rows),
        "seconds": round(sum(row["seconds"] for row in rows), 2),
        "tokens_per_second": sum(len(row["token_ids"]) for row in rows)
        / max(1e-9, sum(row["seconds"] for row in rows)),
        "smallest_provable_difference": smallest_provable_difference(len(scores)),
        **_texts(rows),
    }
    if full_rows is not None and method != FULL:
        full = by_problem(full_rows)
        if list(full) != list(verdicts):
            raise ValueError(f"{task}: {method} and the full cache were run on other problems: run both on the same")
        test = paired_difference(problem_scores(list(full.values())), scores, seed=seed)
        summary |= {"difference": test.difference, "difference_low": test.low, "difference_high": test.high}
        summary |= {"p_value": test.p_value, **_common_lengths(rows, full_rows)}
        solved = {(row["key"], row["sample"]) for row in full_rows if row["correct"]}
        summary["solved_in_full"] = len(solved)
        summary |= _modes([row for row in rows if (row["key"], row["sample"]) in solved and not row["correct"]])
    return summary


def pass_at(verdicts: list[list[bool]], seed: int = 0) -> dict[str, dict[str, float]]:
    """pass@k for k = 1, 2, 4, ... up to the samples of each problem, with 95% intervals over problems."""
    found = {}
    k = 1
    while k <= min(map(len, verdicts)):
        estimate = mean_with_interval(problem_scores(verdicts, k), seed)
        found[str(k)] = {"mean": estimate.mean, "low": estimate.low, "high": estimate.high}
        k *= 2
    return found


def _mean(rows: list[Row], figure: Callable[[Row], float]) -> float:
    return sum(figure(row) for row in rows) / len(rows)


def _texts(rows: list[Row]) -> Row:
    """How the texts repeat themselves, each a mean over texts, and how many were ended early for it."""
    found: Row = {"share_repetitive": _mean(rows, lambda row: row["repetitive"])}
    found["stopped_for_repetition"] = sum(row["finish_reason"] == "repetition" for row in rows)
    found["share_at_limit"] = _mean(rows, lambda row: row["finish_reason"] == "length")
    for n in NGRAMS:
        found[f"entropy_{n}_gram"] = _mean(rows, partial(_of_tokens, ngram_entropy, n))
        found[f"repeated_{n}_grams"] = _mean(rows, partial(_of_tokens, repetition_rate, n))
    found["sentence_redundancy"] = _mean(rows, lambda row: sentence_redundancy(row["text"]))
    return found


def _of_tokens(figure: Callable[[list[int], int], float], n: int, row: Row) -> float:
    return figure(row["token_ids"], n)


def _common_lengths(rows: list[Row], full_rows: list[Row]) -> Row:
    """Mean output tokens of both on the samples that both solve."""
    units = sorted({(row["key"], row["sample"]) for row in rows} & {(row["key"], row["sample"]) for row in full_rows})
    columns = []
    for found in (rows, full_rows):
        named = {(row["key"], row["sample"]): row for row in found}
        columns.append([(named[unit]["correct"], len(named[unit]["token_ids"])) for unit in units])
    own, full = columns
    both = lengths_when_both_right([c for c, _ in own], [c for c, _ in full], [n for _, n in own], [n for _, n in full])
    return {"tokens_both_right": both.first, "full_tokens_both_right": both.second, "n_both_right": both.n}


def _modes(wrong: list[Row]) -> dict[str, int]:
    counts = dict.fromkeys(MODES, 0)
    for row in wrong:
        counts[wrong_mode(row["repetitive"], row["finish_reason"] == "length")] += 1
    return counts
