"""The figures of one method on one task, from the rows of its texts."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from statistics import fmean
from typing import Any

from rlkv.evaluation.run.methods import FULL
from rlkv.evaluation.stats.metrics import (
    MODES,
    NGRAMS,
    Estimate,
    Floats,
    error_mode,
    mean_with_interval,
    ngram_entropy,
    paired_difference,
    problem_scores,
    repetition_rate,
    sentence_redundancy,
    smallest_provable_difference,
)
from rlkv.evaluation.stats.samples import ratio_with_interval, sign_test, strict_scores

Row = dict[str, Any]
Summary = dict[str, Any]


def by_problem(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of each problem, in the order of their keys."""
    groups = groupby(sorted(rows, key=itemgetter("key")), itemgetter("key"))
    return {key: list(samples) for key, samples in groups}


def summarize(
    task: str, method: str, rows: list[Row], full_rows: list[Row] | None, baseline_rows: list[Row] | None = None
) -> Summary:
    """Accuracy with its interval, the difference to the full cache with its own, lengths, times, bytes, error modes.

    Args:
        full_rows: of the full cache on the same problems; None if it was not run: no differences and error modes then.
        baseline_rows: of another method on the same problems: ``versus_baseline`` has the tests against it.
    """
    problems = by_problem(rows)
    accuracy = mean_with_interval(_scores(problems))
    summary: Summary = {
        "task": task,
        "method": method,
        "n": len(problems),
        "samples": len(rows) // len(problems),
        "accuracy": accuracy.mean,
        "ci_low": accuracy.low,
        "ci_high": accuracy.high,
        "kv_bytes": sum(row["kv_bytes"] for row in rows),
        "kv_bytes_full": sum(row["kv_bytes_full"] for row in rows),
        "smallest_provable_difference": smallest_provable_difference(len(problems)),
        **_samples(problems),
        **_cost(rows),
        **_texts(rows),
    }
    if full_rows is not None and method != FULL:
        full = by_problem(full_rows)
        if list(full) != list(problems):
            raise ValueError(f"{task}: {method} and the full cache were run on other problems: run both on the same")
        summary |= {**_tests(_scores(full), _scores(problems)), **_versus_full(rows, full_rows)}
    if baseline_rows is not None:
        summary["versus_baseline"] = _tests(_scores(by_problem(baseline_rows)), _scores(problems))
    return summary


def _verdicts(problems: dict[str, list[Row]]) -> list[list[bool]]:
    return [[row["correct"] for row in samples] for samples in problems.values()]


def _scores(problems: dict[str, list[Row]]) -> Floats:
    """pass@1 of each problem."""
    return problem_scores(_verdicts(problems))


def _interval(of: Estimate) -> dict[str, float]:
    return {"mean": of.mean, "low": of.low, "high": of.high}


def pass_at(verdicts: list[list[bool]]) -> dict[str, dict[str, float]]:
    """pass@k for k = 1, 2, 4, ... up to the samples of each problem, with 95% intervals over problems."""
    powers = (2**i for i in range(min(map(len, verdicts)).bit_length()))
    return {str(k): _interval(mean_with_interval(problem_scores(verdicts, k))) for k in powers}


def _samples(problems: dict[str, list[Row]]) -> Row:
    """pass@k, strict accuracy, and the accuracy of the texts that ended by themselves (None if none did)."""
    verdicts = _verdicts(problems)
    ended = [[row["correct"] for row in rows if row["finish_reason"] == "stop"] for rows in problems.values()]
    right = ratio_with_interval(list(map(sum, ended)), list(map(len, ended)))
    return {
        "pass_at_k": pass_at(verdicts),
        "strict": _interval(mean_with_interval(strict_scores(verdicts))),
        "share_terminated": sum(map(len, ended)) / sum(map(len, verdicts)),
        "right_of_terminated": None if right is None else _interval(right),
    }


def _cost(rows: list[Row]) -> Row:
    """Output tokens, wall-clock time of decoding (summed over processes) and their quotient."""
    tokens, seconds = sum(len(row["token_ids"]) for row in rows), sum(row["seconds"] for row in rows)
    return {
        "mean_output_tokens": tokens / len(rows),
        "seconds": round(seconds, 2),
        "seconds_per_text": seconds / len(rows),
        "tokens_per_second": tokens / max(1e-9, seconds),
    }


def _tests(full: Floats, scores: Floats) -> Row:
    """Paired comparison of the scores of the same problems."""
    found, signs = paired_difference(full, scores), sign_test(full, scores)
    return {
        **{"difference": found.difference, "difference_low": found.low, "difference_high": found.high},
        "p_value": found.p_value,
        **{"problems_better": signs.better, "problems_worse": signs.worse, "sign_p_value": signs.p_value},
    }


def _texts(rows: list[Row]) -> Row:
    """How the texts repeat themselves, each a mean over texts, and how many were ended early for it."""
    return {
        "share_repetitive": fmean(row["repetitive"] for row in rows),
        "stopped_for_repetition": sum(row["finish_reason"] == "repetition" for row in rows),
        "share_at_limit": fmean(row["finish_reason"] == "length" for row in rows),
        "sentence_redundancy": fmean(sentence_redundancy(row["text"]) for row in rows),
        **{f"entropy_{n}_gram": fmean(ngram_entropy(row["token_ids"], n) for row in rows) for n in NGRAMS},
        **{f"repeated_{n}_grams": fmean(repetition_rate(row["token_ids"], n) for row in rows) for n in NGRAMS},
    }


def _versus_full(rows: list[Row], full_rows: list[Row]) -> Row:
    """Cost relative to the full cache; where that is right: error modes, and mean output tokens of both if both are."""
    solved = {(row["key"], row["sample"]): len(row["token_ids"]) for row in full_rows if row["correct"]}
    common = [(row, solved[unit]) for row in rows if (unit := (row["key"], row["sample"])) in solved]
    both = [(len(row["token_ids"]), full) for row, full in common if row["correct"]]
    own, full = map(fmean, zip(*both, strict=True)) if both else (None, None)
    modes = [error_mode(row) for row, _ in common]
    cost, cost_full = _cost(rows), _cost(full_rows)
    return {
        "tokens_times_full": cost["mean_output_tokens"] / cost_full["mean_output_tokens"],
        "seconds_times_full": cost["seconds_per_text"] / max(1e-9, cost_full["seconds_per_text"]),
        **{"tokens_both_right": own, "full_tokens_both_right": full, "n_both_right": len(both)},
        "solved_in_full": len(solved),
        **{mode: modes.count(mode) for mode in MODES},
    }
