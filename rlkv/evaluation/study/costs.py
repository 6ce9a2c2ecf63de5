"""What finding the heads took: seconds of training from the log next to a gates file, and of re-ranking."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from rlkv.evaluation.study.outcomes import Metrics
from rlkv.evaluation.study.rankings import Ranking

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


def training_seconds(gates_file: str, field: str) -> float | None:
    """Seconds of all optimizer steps, from the log next to a gates file; None if it lacks ``field`` or is absent."""
    log = Path(gates_file).parent / "log.jsonl"
    found = [json.loads(line).get(field) for line in log.read_text().splitlines()] if log.is_file() else []
    return None if not found or None in found else float(sum(found))


def identification_costs(ranking: Ranking) -> list[dict[tuple[str, str], float]]:
    """For each seed the seconds that are known, by step (``training``, ``re-ranking``) and unit."""
    found = []
    for file, gates in zip(ranking.files, ranking.gates, strict=True):
        summary = gates.training.get("reranked") or {}
        trained = {("training", unit): training_seconds(file, field) for unit, field in _LOG}
        reranked = {("re-ranking", unit): summary.get(field) for unit, field in _RERANKED}
        costs: dict[tuple[str, str], float] = {}
        for candidates in (trained, reranked):
            known = [(key, float(seconds)) for key, seconds in candidates.items() if seconds is not None]
            costs.update(known[:1])  # in the better unit
        found.append(costs)
    return found


def cost_metrics(ranking: Ranking) -> Metrics:
    """Mean and range over the seeds, for each step and unit."""
    by_step: dict[tuple[str, str], list[float]] = defaultdict(list)
    for costs in identification_costs(ranking):
        for key, seconds in costs.items():
            by_step[key].append(seconds)
    steps = [
        {"step": step, "unit": unit, "mean": sum(v) / len(v), "low": min(v), "high": max(v), "n": len(v)}
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
