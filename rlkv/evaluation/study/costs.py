"""What finding the heads took: seconds of training from the log next to a gates file, and of re-ranking."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rlkv.evaluation.report.page import Page
from rlkv.evaluation.study.outcomes import Metrics
from rlkv.evaluation.study.rankings import Ranking
from rlkv.utils.jsonl import read_log

CPU, WALL = "CPU", "wall"
# fields of the training log and of the re-ranking's summary, the better unit first: CPU time does not depend on what
# else the machine does
_LOG = ((CPU, "time/step_cpu_s"), (WALL, "time/step_s"))
_RERANKED = ((CPU, "cpu_seconds"), (WALL, "seconds"))
COST_NOTE = (
    "Seconds of all optimizer steps (from the log next to the gates file), mean over seeds; CPU: processor time of the "
    "process without the verifier's helpers, wall: time on the clock, which other work on the machine makes longer. "
    "What came before (a curriculum, which DuoAttention does not need, gates to start from) is not included."
)


def identification_costs(ranking: Ranking) -> list[dict[tuple[str, str], float]]:
    """For each seed the seconds that are known, by step (``training``, ``re-ranking``) and unit."""
    found = []
    for file, gates in zip(ranking.files, ranking.gates, strict=True):
        log = Path(file).parent / "log.jsonl"
        steps: list[Any] = read_log(log) if log.is_file() else []
        summary = gates.training.get("reranked") or {}
        known = [("training", unit, [step.get(field) for step in steps]) for unit, field in _LOG]
        known += [("re-ranking", unit, [summary.get(field)]) for unit, field in _RERANKED]
        costs: dict[str, tuple[str, float]] = {}
        for step, unit, seconds in known:
            if seconds and None not in seconds:
                costs.setdefault(step, (unit, float(sum(seconds))))  # in the better unit
        found.append({(step, unit): seconds for step, (unit, seconds) in costs.items()})
    return found


def cost_metrics(ranking: Ranking) -> Metrics:
    """Mean and range over the seeds, for each step and unit."""
    by_step: dict[tuple[str, str], list[float]] = defaultdict(list)
    for costs in identification_costs(ranking):
        for key, seconds in costs.items():
            by_step[key].append(seconds)
    steps = [
        {"step": step, "unit": unit, "mean": fmean(v), "low": min(v), "high": max(v), "n": len(v)}
        for (step, unit), v in by_step.items()
    ]
    return {"seeds": len(ranking.orders), "steps": steps}


def cost_text(metrics: Metrics) -> str:
    """One phrase, such as ``370 s CPU (350 to 390, 3 seeds) + 55 s wall re-ranking``; empty if nothing is known."""
    parts = []
    for step in metrics["steps"]:
        several = f" ({step['low']:.0f} to {step['high']:.0f}, {step['n']} seeds)" if step["n"] > 1 else ""
        what = "" if step["step"] == "training" else f" {step['step']}"
        parts.append(f"{step['mean']:.0f} s {step['unit']}{what}{several}")
    return " + ".join(parts)


def write_costs(page: Page, costs: dict[str, Metrics]) -> None:
    """Add the costs of each method as a table."""
    page.heading("What finding the heads took", level=3)
    rows = [[name, str(of["seeds"]), cost_text(of) or "unknown"] for name, of in costs.items()]
    page.table(["method", "seeds", "seconds"], rows, COST_NOTE)
