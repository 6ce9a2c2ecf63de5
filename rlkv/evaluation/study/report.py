"""The files of a study: ``results.json``, ``report.md``, ``report.html``, ``table.md``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rlkv.evaluation.report.page import Page, provenance_facts
from rlkv.evaluation.stats.metrics import FEW_CHANGED
from rlkv.evaluation.study.base import Analysis, Study
from rlkv.evaluation.study.outcomes import Metrics
from rlkv.evaluation.study.sweep import Sweep, write_table
from rlkv.evaluation.study.text import SAME, SEEDS_FIXED
from rlkv.utils.atomic import write_json
from rlkv.utils.provenance import provenance

NOT_SAID = "its file does not say"


def write_report(
    title: str, study: Study, analyses: Sequence[Analysis], metrics: dict[str, Metrics], seconds: float
) -> None:
    """All files of a study but its rows; ``seconds``: wall-clock time of this run."""
    folder, conditions = study.config.output_dir, study.measurements.describe()
    measured = sum(condition["seconds"] for condition in conditions)
    settings = next(iter(study.measurements.tasks.values())).settings
    content = {
        "config": asdict(study.config),
        "resolved": {
            "cache": {name: getattr(settings.cache, name) for name in ("sink", "window", "protect_prompt")},
            "max_new_tokens": [task.settings.sampling.max_new_tokens for task in study.measurements.tasks.values()],
            "top_heads": study.top_heads,
            "policies": {name: policy.describe() for name, policy in study.policies.items()},
            "dtype": str(study.measurements.model.dtype),
            "device": str(study.measurements.model.device),
        },
        **provenance(),
        "seconds": {"this run, wall": round(seconds, 1), "decoding of all conditions, wall": round(measured, 1)},
        "full_cache": {
            task: {"accuracy": float(study.full(task).correct.mean()), "n": int(study.full(task).correct.size)}
            for task in study.tasks
        },
        "training": _training(study),
        "findings": {analysis.name: analysis.findings(metrics[analysis.name]) for analysis in analyses},
        "findings_note": SEEDS_FIXED,
        "analyses": metrics,
        "conditions": conditions,
    }
    write_json(folder / "results.json", content)
    page = Page(title)
    _write_findings(page, content)
    for analysis in analyses:
        page.heading(analysis.title)
        analysis.write(metrics[analysis.name], page, folder)
    page.heading("How it was measured")
    page.code(content["command"])
    took = (
        f"This run took {seconds:.0f} s of wall time; decoding all conditions, also those of earlier runs and of other "
        f"processes, {measured:.0f} s."
    )
    page.bullets([*provenance_facts(content), took])
    options = {**content["config"], **content["resolved"]}
    page.table(["option", "value"], [[name, _value(value)] for name, value in options.items()], "Configuration")
    _write_training(page, content["training"])
    page.write_report(folder)
    if Sweep.name in metrics:
        table = Page(title)
        for task, found in metrics[Sweep.name]["tasks"].items():
            write_table(table, task, found, metrics[Sweep.name])
        table.bullets(provenance_facts(content))
        table.write(folder / "table.md")


def _write_findings(page: Page, content: dict[str, Any]) -> None:
    page.heading("What the study finds")
    for task, full in content["full_cache"].items():
        measured = sum(condition["task"] == task for condition in content["conditions"])
        page.paragraph(
            f"{task}: {full['n']} problems, of which the full cache solves {round(full['accuracy'] * full['n'])} "
            f"({full['accuracy']:.3f}), decoded greedily. {measured} different conditions were measured, each draw of "
            "random heads counted as one."
        )
    lines = [line for lines in content["findings"].values() for line in lines]
    page.bullets(lines or ["The requested analyses have no findings."])
    page.paragraph(
        "Every sentence above is made from the numbers below by fixed rules: 'better' and 'worse' are used where a "
        f"paired permutation test gives p < 0.05 (not corrected for the number of tests), '{SAME}' everywhere else. "
        f"{FEW_CHANGED} {SEEDS_FIXED}"
    )


def _training(study: Study) -> dict[str, list[dict[str, Any]]]:
    """For each name and seed what its gates file says about its training, without lists."""
    return {
        ranking.name: [
            {key: value for key, value in gates.training.items() if not isinstance(value, list | dict)}
            for gates in ranking.gates
        ]
        for ranking in [*study.rankings, *study.ablations]
        if ranking.gates
    }


def _write_training(page: Page, training: dict[str, list[dict[str, Any]]]) -> None:
    """The first name's settings, and where each other one's differ."""
    (first, base), *others = ((name, seeds[0]) for name, seeds in training.items())
    rows = [[first, _settings(base) or NOT_SAID]]
    for name, settings in others:
        shown = _settings(settings) or NOT_SAID
        if settings and settings.get("method") == base.get("method"):
            differing = {key: value for key, value in settings.items() if base.get(key) != value}
            shown = _settings(differing) or f"as {first}"
        rows.append([name, shown])
    page.table(
        ["gates", "training"],
        rows,
        "How the heads were found, according to the gates files of the first seeds; for methods trained like "
        f"{first}, what differs.",
    )


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_value(of)}" for name, of in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
