"""Results of an evaluation from its rows: accuracy per task and method, differences to the full cache, bytes, texts."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from statistics import fmean
from typing import Any

from rlkv.evaluation.run.methods import FULL
from rlkv.evaluation.stats.error_modes import MODES, error_mode
from rlkv.evaluation.stats.metrics import (
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
    groups = groupby(sorted(rows, key=itemgetter("key")), itemgetter("key"))
    return {key: [row["correct"] for row in samples] for key, samples in groups}


def summarize(task: str, method: str, rows: list[Row], full_rows: list[Row] | None) -> Summary:
    """pass@1 with its interval, the difference to the full cache with its own, pass@k, lengths, bytes, error modes.

    Args:
        full_rows: of the full cache on the same problems; None if it was not run: no differences and error modes then.
    """
    verdicts = by_problem(rows)
    scores = problem_scores(list(verdicts.values()))
    estimate = mean_with_interval(scores)
    tokens, seconds = sum(len(row["token_ids"]) for row in rows), sum(row["seconds"] for row in rows)
    summary: Summary = {
        "task": task,
        "method": method,
        "n": len(scores),
        "samples": len(rows) // len(scores),
        "accuracy": estimate.mean,
        "ci_low": estimate.low,
        "ci_high": estimate.high,
        "pass_at_k": pass_at(list(verdicts.values())),
        "mean_output_tokens": tokens / len(rows),
        "kv_bytes": sum(row["kv_bytes"] for row in rows),
        "kv_bytes_full": sum(row["kv_bytes_full"] for row in rows),
        "seconds": round(seconds, 2),
        "tokens_per_second": tokens / max(1e-9, seconds),
        "smallest_provable_difference": smallest_provable_difference(len(scores)),
        **_texts(rows),
    }
    if full_rows is not None and method != FULL:
        full = by_problem(full_rows)
        if list(full) != list(verdicts):
            raise ValueError(f"{task}: {method} and the full cache were run on other problems: run both on the same")
        test = paired_difference(problem_scores(list(full.values())), scores)
        summary |= {"difference": test.difference, "difference_low": test.low, "difference_high": test.high}
        summary |= {"p_value": test.p_value, **_versus_full(rows, full_rows)}
    return summary


def pass_at(verdicts: list[list[bool]]) -> dict[str, dict[str, float]]:
    """pass@k for k = 1, 2, 4, ... up to the samples of each problem, with 95% intervals over problems."""
    powers = (2**i for i in range(min(map(len, verdicts)).bit_length()))
    estimates = {str(k): mean_with_interval(problem_scores(verdicts, k)) for k in powers}
    return {k: {"mean": of.mean, "low": of.low, "high": of.high} for k, of in estimates.items()}


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
    """On the samples that the full cache solves: error modes, and mean output tokens of both where both are right."""
    solved = {(row["key"], row["sample"]): len(row["token_ids"]) for row in full_rows if row["correct"]}
    common = [(row, solved[unit]) for row in rows if (unit := (row["key"], row["sample"])) in solved]
    both = [(len(row["token_ids"]), full) for row, full in common if row["correct"]]
    own, full = map(fmean, zip(*both, strict=True)) if both else (None, None)
    modes = [error_mode(row) for row, _ in common]
    return {
        **{"tokens_both_right": own, "full_tokens_both_right": full, "n_both_right": len(both)},
        "solved_in_full": len(solved),
        **{mode: modes.count(mode) for mode in MODES},
    }
