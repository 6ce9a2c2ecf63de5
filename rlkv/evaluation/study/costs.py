"""What finding the heads took: seconds of training from the log beside a gates file, and of re-ranking."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rlkv.evaluation.report.sweep_report import training_seconds
from rlkv.evaluation.study.base import Figures
from rlkv.evaluation.study.rankings import Ranking

CPU, WALL = "CPU", "wall"
# fields of the training log and of the re-ranking's summary, the better unit first: CPU time does not depend on what
# else the machine does
_LOG = ((CPU, "time/step_cpu_s"), (WALL, "time/step_s"))
_RERANKED = ((CPU, "cpu_seconds"), (WALL, "seconds"))


@dataclass(frozen=True)
class Cost:
    """Seconds of one step, in one unit (``CPU``: processor time; ``wall``: time on the clock)."""

    step: str
    seconds: float
    unit: str


def identification_costs(ranking: Ranking) -> list[list[Cost]]:
    """For each seed the costs that are known; empty where none is."""
    found = []
    for file, gates in zip(ranking.files, ranking.gates, strict=True):
        costs = []
        for unit, field in _LOG:
            seconds = training_seconds(file, field)
            if seconds is not None:
                costs.append(Cost("training", seconds, unit))
                break
        reranked = gates.training.get("reranked") or {}
        for unit, field in _RERANKED:
            if isinstance(reranked.get(field), int | float):
                costs.append(Cost("re-ranking", float(reranked[field]), unit))
                break
        found.append(costs)
    return found


def cost_figures(ranking: Ranking) -> Figures:
    """Mean and range over the seeds, for each step and unit."""
    by_step: dict[tuple[str, str], list[float]] = defaultdict(list)
    for costs in identification_costs(ranking):
        for cost in costs:
            by_step[cost.step, cost.unit].append(cost.seconds)
    return {
        "seeds": len(ranking.orders),
        "steps": [
            {
                "step": step,
                "unit": unit,
                "mean": sum(values) / len(values),
                "low": min(values),
                "high": max(values),
                "n": len(values),
            }
            for (step, unit), values in by_step.items()
        ],
    }


def cost_text(figures: Figures) -> str:
    """One phrase, such as ``370 s CPU (350 to 390, 3 seeds) + 55 s wall re-ranking``; empty if nothing is known."""
    parts = []
    for step in figures["steps"]:
        several = f" ({step['low']:.0f} to {step['high']:.0f}, {step['n']} seeds)" if step["n"] > 1 else ""
        what = "" if step["step"] == "training" else f" {step['step']}"
        parts.append(f"{step['mean']:.0f} s {step['unit']}{what}{several}")
    return " + ".join(parts)
