"""The first method against each other one, in pairs over the problems, and what finding the heads took."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from rlkv.evaluation.report.html_page import Cell, Page
from rlkv.evaluation.stats.metrics import paired_difference
from rlkv.evaluation.study.base import Analysis, Figures, Study, Wanted
from rlkv.evaluation.study.costs import cost_figures, cost_text
from rlkv.evaluation.study.outcomes import Outcome, accuracy_of, mean_scores
from rlkv.evaluation.study.text import accuracy_cell, difference_cell, p_number, seeds_of_sign, verdict

COST_NOTE = (
    "Seconds of all optimizer steps (from the log beside the gates file), mean over seeds; CPU: processor time of the "
    "process without the verifier's helpers, wall: time on the clock, which other work on the machine makes longer. "
    "What came before (a curriculum, which DuoAttention does not need, gates to start from) is not in it."
)


class Comparison(Analysis):
    """Paired differences at chosen sparsities."""

    name: ClassVar[str] = "comparison"
    title: ClassVar[str] = "Comparison in pairs"

    def cells(self, study: Study) -> Wanted:
        return study.cells(study.rankings, study.options.compare_at)

    def figures(self, study: Study) -> Figures:
        rows = []
        for task in study.tasks:
            for sparsity in study.options.compare_at:
                first = study.runs(task, study.first, sparsity)
                for other in study.rankings[1:]:
                    rows.append(
                        {
                            "task": task,
                            "sparsity": sparsity,
                            "other": other.name,
                            "run": other.run,
                            **compare(first, study.runs(task, other, sparsity)),
                        }
                    )
        return {
            "first": study.first.name,
            "rows": rows,
            "costs": {ranking.name: cost_figures(ranking) for ranking in study.rankings if ranking.files},
        }

    def findings(self, figures: Figures) -> list[str]:
        lines = []
        places = dict.fromkeys((row["task"], row["sparsity"]) for row in figures["rows"])
        for task, sparsity in places:
            rows = [row for row in figures["rows"] if (row["task"], row["sparsity"]) == (task, sparsity)]
            others = "; ".join(_against(row, figures["first"]) for row in rows)
            first = rows[0]["first"]
            lines.append(
                f"{task} at {sparsity:g}, n = {first['n']}: {figures['first']} {first['mean']:.3f} against {others}."
            )
        known = {name: text for name, cost in figures["costs"].items() if (text := cost_text(cost))}
        if known:
            lines.append("Finding the heads took: " + "; ".join(f"{name} {text}" for name, text in known.items()) + ".")
        return lines

    def write(self, figures: Figures, page: Page, folder: Path) -> None:
        first = figures["first"]
        rows: list[list[Cell | str]] = []
        for row in figures["rows"]:
            test = row["difference"]
            rows.append(
                [
                    f"{row['task']}, s = {row['sparsity']:g}: {row['other']}",
                    accuracy_cell(row["first"]),
                    accuracy_cell(row["second"], row["run"]),
                    difference_cell(test),
                    p_number(test["p_value"]),
                    f"{test['changed']} of {test['n']}",
                    "yes" if row["same_heads"] else "no",
                ]
            )
        page.table(
            ["against", first, "the other", f"{first} minus the other", "p", "problems that differ", "same heads"],
            rows,
            "Accuracy, mean over seeds per problem; difference with its 95% interval (bootstrap over problems, paired) "
            f"and a two-sided sign-flip test. Green: {first} is better, red: worse (p < 0.05), grey: not told apart. "
            f"The table makes {len(rows)} tests, whose p values are not corrected for their number. Intervals are over "
            "problems, with the seeds as they are.",
        )
        page.heading("What finding the heads took", level=3)
        page.table(
            ["method", "seeds", "seconds"],
            [[name, str(cost["seeds"]), cost_text(cost) or "not known"] for name, cost in figures["costs"].items()],
            COST_NOTE,
        )


def _against(row: Figures, first: str) -> str:
    test = row["difference"]
    seeds = seeds_of_sign(row, first, row["other"])
    return f"{row['other']} {row['second']['mean']:.3f} ({verdict(test, row['same_heads'])}{seeds})"


def compare(first: list[Outcome], second: list[Outcome]) -> Figures:
    """Both accuracies and the paired difference, first minus second.

    ``per_seed`` has the difference of each set of heads to the other's mean over seeds, seeds with the same heads once.
    """
    means = [float(mean_scores(runs).mean()) for runs in (first, second)]
    distinct = [{run.key: float(run.correct.mean()) for run in runs}.values() for runs in (first, second)]
    test = paired_difference(mean_scores(second), mean_scores(first))
    return {
        "first": accuracy_of(first).to_dict(),
        "second": accuracy_of(second).to_dict(),
        "difference": {name: getattr(test, name) for name in ("difference", "low", "high", "p_value", "n", "changed")},
        "per_seed": {
            "first": [accuracy - means[1] for accuracy in distinct[0]],
            "second": [means[0] - accuracy for accuracy in distinct[1]],
        },
        # means over seeds may differ where the same sets of heads occur, but not equally often
        "same_heads": {run.key for run in first} == {run.key for run in second} and not test.changed,
    }
