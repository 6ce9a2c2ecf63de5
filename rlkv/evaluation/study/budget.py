"""Token eviction at matched bytes of KV: in all heads or under a ranking, with dynamic or fixed budgets.

A dynamic budget is a share of the text read so far; a fixed one is a share of the length of the same problem's text
with the full cache (RLKV, figure 16).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from rlkv.evaluation.report.page import LEVEL, Cell, Page
from rlkv.evaluation.report.plots import Panel, point
from rlkv.evaluation.stats.metrics import MODES, paired_difference
from rlkv.evaluation.study.base import Analysis, Study
from rlkv.evaluation.study.matching import FIXED, Match, matched_methods
from rlkv.evaluation.study.measurements import Condition, ConditionRequests
from rlkv.evaluation.study.outcomes import Metrics, Outcome, accuracy_of, compare
from rlkv.evaluation.study.outputs import mode_shares
from rlkv.evaluation.study.text import (
    BYTES_NOTE,
    LEGEND,
    NOT_AVAILABLE,
    SAME,
    accuracy_cell,
    difference_cell,
    p_number,
    verdict,
)

HELD = "bytes of KV in use / bytes of the full cache"


class Budget(Analysis):
    """Accuracy, bytes, error modes and lengths of every method at each saving."""

    name = "budget"
    title = "Eviction at matched bytes"

    def __init__(self) -> None:
        self._matches: dict[str, list[Match]] = {}

    def _matched(self, study: Study, task: str) -> list[Match]:
        if task not in self._matches:
            self._matches[task] = matched_methods(study, task)  # walks all texts for each budget: once
        return self._matches[task]

    def conditions(self, study: Study) -> ConditionRequests:
        for task in study.tasks:
            for match in self._matched(study, task):
                for condition in match.conditions:
                    yield f"{match.method}, {match.saved:.0%} saved", condition

    def settings(self, study: Study) -> Metrics:
        config = study.config
        sizes = {name: getattr(config, name) for name in ("head_share", "buffer", "observation", "extra")}
        return {
            "first": study.first.name,
            "savings": config.each("savings"),
            "policies": list(config.policies),
            **sizes,
        }

    def task_metrics(self, study: Study, task: str) -> Metrics:
        full = study.full(task)
        outcomes: dict[float, dict[str, Outcome]] = {saved: {} for saved in study.config.each("savings")}
        rows: dict[str, Metrics] = {}
        for match in self._matched(study, task):
            row = rows.setdefault(match.method, {"heads": match.heads, "savings": []})
            if not match.conditions:
                row["savings"].append(None)
            else:
                (outcome,) = study.measurements.outcomes(match.conditions)
                outcomes[match.saved][match.method] = outcome
                row["savings"].append(_of(match.conditions[0], outcome, full))
        return {
            "full": accuracy_of([full]),
            "methods": rows,
            "dynamic_minus_fixed": _differences(outcomes, study.config.policies) if study.config.fixed_budgets else [],
            "best": [_best(measured) for measured in outcomes.values()],
        }

    def task_findings(self, task: str, found: Metrics, metrics: Metrics) -> list[str]:
        lines = []
        for saved, best in zip(metrics["savings"], found["best"], strict=True):
            if best is None:
                lines.append(f"{task}, {saved:.0%} of the bytes saved: no method fits.")
                continue
            alike = f"; {SAME} (p >= {LEVEL:g}): {', '.join(best['alike'])}" if best["alike"] else ""
            accuracy = f"{best['accuracy']:.3f} (n = {found['full']['n']})"
            lines.append(f"{task}, {saved:.0%} of the bytes saved: best is {best['method']} with {accuracy}{alike}.")
        tested = [row for row in found["dynamic_minus_fixed"] if row["difference"] is not None]
        parts = [f"{row['policy']} at {row['saved']:.0%} saved {verdict(row['difference'])}" for row in tested]
        if parts:
            lines.append(f"{task}: dynamic minus fixed budget at the same bytes, accuracy: {'; '.join(parts)}.")
        return lines

    def write_task(self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path) -> None:
        titles, full = [f"{saved:.0%} saved" for saved in metrics["savings"]], found["full"]
        differences, shares = found["dynamic_minus_fixed"], "each is a share of the text so far"
        if differences:
            shares = "a fixed one is a share of the problem's text there, a dynamic one of the text so far"
        page.table(
            ["method", *titles],
            _rows(found, _accuracy_cell),
            f"{task}: greedy accuracy on {full['n']} problems, in parentheses the difference to the full cache "
            f"({full['mean']:.3f}); then its 95% interval over problems, what the method's own texts held, and its "
            f"budget. {LEGEND} Budgets are the largest that hold at most the rest of the full cache's bytes over the "
            f"texts of the full-cache run; {shares}. {BYTES_NOTE}. A policy alone evicts in all heads; 'ranking + "
            f"policy' keeps heads full and gives the others about {metrics['head_share']:g} of the mean budget. "
            f"Rankings are their first seeds, random heads all draws. {NOT_AVAILABLE}: what must stay (the prompt, "
            f"{metrics['extra']} entries) is more than that.",
        )
        page.table(
            ["method", *titles],
            _rows(found, _failure_cell),
            f"{task}: problems that the full cache solves and the method does not ({' / '.join(MODES)}), and mean "
            "output tokens.",
        )
        if differences:
            page.table(
                ["policy in all heads", "dynamic minus fixed", "p"],
                [
                    [f"{of['policy']}, {of['saved']:.0%} saved", *_difference_cells(of["difference"])]
                    for of in differences
                ],
                f"{task}: paired difference in accuracy between a dynamic and a fixed budget of the same bytes (▲: "
                "dynamic is better, ▼: fixed is).",
            )
        panels = [
            _panel(f"{task}: {title}", found, some_full)
            for title, some_full in (("tokens dropped in all heads", False), ("some heads full", True))
        ]
        caption = f"{task}: accuracy over bytes held, 95% intervals{'; dashed: fixed budgets' if differences else ''}."
        self.add_plot(page, folder, task, caption, *panels)


def _panel(title: str, found: Metrics, some_full: bool) -> Panel:
    """Accuracy over bytes held of the methods with some, or without any, full heads."""
    curves = {}
    for name, row in found["methods"].items():
        if bool(row["heads"]) == some_full:
            measured = [of["accuracy"] for of in row["savings"] if of is not None]
            curves[name] = [point(accuracy["kv_share"], accuracy) for accuracy in measured]
    styles = {name: {"linestyle": "--" if name.endswith(FIXED) else "-"} for name in curves}
    return Panel(title, HELD, curves, styles=styles, reference=found["full"]["mean"], ticks=False)


def _rows(found: Metrics, cell: Callable[[Metrics], Cell | str]) -> list[list[Cell | str]]:
    return [
        [name, *(NOT_AVAILABLE if of is None else cell(of) for of in row["savings"])]
        for name, row in found["methods"].items()
    ]


def _of(condition: Condition, outcome: Outcome, full: Outcome) -> Metrics:
    policy, shares = condition.policy, mode_shares([outcome], full)
    solved = int(full.correct.sum())
    return {
        "full_heads": condition.allocation.num_full,
        "budget": None if policy is None else policy.describe(),
        "fixed": condition.planned is not None,
        "accuracy": accuracy_of([outcome], full),
        "modes": None if shares is None else {mode: round(of["mean"] * solved) for mode, of in shares.items()},
        "mean_output_tokens": float(np.mean(outcome.lengths)),
    }


def _best(outcomes: dict[str, Outcome]) -> Metrics | None:
    """The most accurate method, and those that a paired test does not separate from it."""
    if not outcomes:
        return None
    method = max(outcomes, key=lambda name: float(outcomes[name].correct.mean()))
    best = outcomes[method]
    tests = {name: paired_difference(best.correct, of.correct) for name, of in outcomes.items() if name != method}
    alike = [name for name, test in tests.items() if test.p_value >= LEVEL]
    return {"method": method, "accuracy": float(best.correct.mean()), "alike": alike}


def _differences(outcomes: dict[float, dict[str, Outcome]], policies: Sequence[str]) -> list[Metrics]:
    """Dynamic minus fixed budget of each policy at each saving; None where one of them does not fit."""
    found: list[Metrics] = []
    for policy, (saved, measured) in product(policies, outcomes.items()):
        pair = [measured[name] for name in (policy, f"{policy}, {FIXED}") if name in measured]
        test = compare(pair[:1], pair[1:])["difference"] if len(pair) == 2 else None
        found.append({"policy": policy, "saved": saved, "difference": test})
    return found


def _accuracy_cell(of: Metrics) -> Cell:
    cell, budget = accuracy_cell(of["accuracy"]), of["budget"]
    if budget is None:
        kept = f"{of['full_heads']} heads full"
    else:
        heads = f"{of['full_heads']} heads full, " if of["full_heads"] else ""
        kept = f"{heads}{budget['ratio']:.3f} of the {'full-cache text' if of['fixed'] else 'text'} + {budget['extra']}"
    return Cell(cell.text, cell.sign, f"{cell.note}\n{of['accuracy']['kv_share']:.0%} held: {kept}")


def _failure_cell(of: Metrics) -> str:
    modes = NOT_AVAILABLE if of["modes"] is None else " / ".join(str(of["modes"][mode]) for mode in MODES)
    return f"{modes}, {of['mean_output_tokens']:.0f}"


def _difference_cells(test: Metrics | None) -> list[Cell | str]:
    return [NOT_AVAILABLE] * 2 if test is None else [difference_cell(test), p_number(test["p_value"])]
