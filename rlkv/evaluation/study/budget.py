"""Fixed or dynamic budget (RLKV, figure 16): token eviction in all heads at the same bytes of KV.

A dynamic budget is a share of the text read so far, a fixed one a number of entries.  Both are set such that, over the
texts of the full-cache run, they hold at most the same share of the full cache's bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from rlkv.evaluation.report.html_page import Cell, Page
from rlkv.evaluation.stats.matching import match_budget, match_ratio
from rlkv.evaluation.study.base import Analysis, Figures, Study, Wanted
from rlkv.evaluation.study.bench import Cell as BenchCell
from rlkv.evaluation.study.comparison import compare
from rlkv.evaluation.study.outcomes import accuracy_of
from rlkv.evaluation.study.pictures import Panel, curves_picture, point
from rlkv.evaluation.study.text import LEGEND, accuracy_cell, difference_cell, p_number, verdict
from rlkv.eviction.base import EvictionPolicy
from rlkv.gates.allocation import HeadAllocation

KINDS = {"dynamic": match_ratio, "fixed": match_budget}
# policy, saving, kind of budget, the policy with that budget (None: it holds more, whatever the budget)
Match = tuple[str, float, str, EvictionPolicy | None]


class Budget(Analysis):
    """Accuracy of each policy with either kind of budget, at each saving."""

    name: ClassVar[str] = "budget"
    title: ClassVar[str] = "Fixed and dynamic budgets"

    def __init__(self) -> None:
        self._matches: dict[str, list[Match]] = {}

    def _matched(self, study: Study, task: str) -> list[Match]:
        """Every budget of a task; the texts are long walks, so once."""
        if task not in self._matches:
            lengths = study.bench.text_lengths(task, study.full(task))
            none_full = torch.zeros(study.first.shape, dtype=torch.bool)
            self._matches[task] = [
                (name, saved, kind, match(template, 1 - saved, none_full, study.entry_size, lengths))
                for name, template in study.options.policies.items()
                for saved in study.options.savings
                for kind, match in KINDS.items()
            ]
        return self._matches[task]

    def _cell(self, study: Study, task: str, policy: EvictionPolicy) -> BenchCell:
        return BenchCell(task, HeadAllocation(torch.zeros(study.first.shape, dtype=torch.bool)), policy)

    def cells(self, study: Study) -> Wanted:
        for task in study.tasks:
            for name, saved, kind, policy in self._matched(study, task):
                if policy is not None:
                    yield f"{name}, {kind}, {saved:.0%} saved", self._cell(study, task, policy)

    def figures(self, study: Study) -> Figures:
        tasks: dict[str, Any] = {}
        for task in study.tasks:
            full = study.full(task)
            rows: dict[tuple[str, float], Figures] = {}
            found = {}
            for name, saved, kind, policy in self._matched(study, task):
                row = rows.setdefault((name, saved), {"policy": name, "saved": saved})
                if policy is None:
                    row[kind] = None
                    continue
                outcome = study.bench.outcome(self._cell(study, task, policy))
                found[name, saved, kind] = outcome
                row[kind] = {"budget": policy.describe(), "accuracy": accuracy_of([outcome], full).to_dict()}
            for (name, saved), row in rows.items():
                both = [found.get((name, saved, kind)) for kind in KINDS]
                compared = None if None in both else compare([both[0]], [both[1]])  # type: ignore[list-item]
                row["difference"] = None if compared is None else compared["difference"]
            tasks[task] = {"full": accuracy_of([full]).to_dict(), "rows": list(rows.values())}
        return {"savings": list(study.options.savings), "tasks": tasks}

    def findings(self, figures: Figures) -> list[str]:
        lines = []
        for task, found in figures["tasks"].items():
            parts = [
                f"{row['policy']} at {row['saved']:.0%} saved {verdict(row['difference'])}"
                for row in found["rows"]
                if row["difference"] is not None
            ]
            if parts:
                lines.append(
                    f"{task}: dynamic minus fixed budget at the same bytes, accuracy, n = {found['full']['n']}: "
                    f"{'; '.join(parts)}."
                )
        return lines

    def write(self, figures: Figures, page: Page, folder: Path) -> None:
        for task, found in figures["tasks"].items():
            rows: list[list[Cell | str]] = []
            for row in found["rows"]:
                cells: list[Cell | str] = []
                for kind in KINDS:
                    of = row[kind]
                    cells += (
                        ["cannot", "-", "-"] if of is None else [_budget(of), accuracy_cell(of["accuracy"]), _held(of)]
                    )
                test = row["difference"]
                cells += ["-", "-"] if test is None else [difference_cell(test), p_number(test["p_value"])]
                rows.append([f"{row['policy']}, {row['saved']:.0%} saved", *cells])
            columns = [f"{kind}{what}" for kind in KINDS for what in (" budget", ": accuracy", ": KV held")]
            page.table(
                ["policy in all heads", *columns, "dynamic minus fixed", "p"],
                rows,
                f"{task}: greedy accuracy on {found['full']['n']} problems, in parentheses the difference to the full "
                f"cache ({found['full']['mean']:.3f}), in brackets 95% intervals over problems. {LEGEND} Both budgets "
                "are the largest that hold at most the asked share of the full cache's bytes over the texts of the "
                "full-cache run; KV held: bytes in use at the end of the method's own texts, over the full cache's for "
                "the same tokens. 'cannot': what must stay is more than that. Last columns: the paired difference "
                "(green: dynamic is better, red: fixed is).",
            )
            curves = {
                f"{policy}, {kind}": [
                    point(row["saved"], row[kind]["accuracy"])
                    for row in found["rows"]
                    if row["policy"] == policy and row[kind] is not None
                ]
                for policy in dict.fromkeys(row["policy"] for row in found["rows"])
                for kind in KINDS
            }
            policies = list(dict.fromkeys(row["policy"] for row in found["rows"]))
            panel = Panel(
                f"{task}: budgets at the same bytes, 95% intervals",
                "share of the full cache's bytes that is saved",
                "greedy accuracy",
                curves,
                dashed=frozenset(name for name in curves if name.endswith(", fixed")),
                reference=found["full"]["mean"],
                limits=(-0.03, 1.03),
                colours={name: f"C{policies.index(name.rpartition(', ')[0]) % 10}" for name in curves},
            )
            picture = folder / f"budget-{task.replace(':', '_')}.png"
            curves_picture(picture, [panel])
            page.picture(
                picture, f"{task}: token eviction in all heads with a dynamic (solid) and a fixed budget (dashed)."
            )


def _budget(of: Figures) -> str:
    budget = of["budget"]
    if budget["budget"] is not None:
        return f"{budget['budget']} entries"
    return f"{budget['ratio']:.3f} of the text + {budget['extra']}"


def _held(of: Figures) -> str:
    return f"{of['accuracy']['kv_share']:.0%}"
