"""A study from its options to its report, and what the analyses make of what was measured.

The functions in :data:`REPORTS` read outcomes from the study, which has measured what its method
:meth:`~rlkv.evaluation.study.Study.requests` names for them.  They add tables and plots to a page
and return the same numbers for ``results.json``.  How to read the tables: docs/evaluate.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from rlkv.evaluation.acceptance import (
    acceptance,
    acceptance_file,
    check_drafts,
    measure_acceptance,
)
from rlkv.evaluation.measurements import Ranking, accuracy_of, agreement, compare, mean_scores
from rlkv.evaluation.metrics import mean_with_interval, near_lossless, paired_difference
from rlkv.evaluation.published import find_published, write_published
from rlkv.evaluation.report import (
    AGAINST_FULL,
    FULL_CACHE,
    INTERVALS,
    NOT_AVAILABLE,
    SPARSITY,
    Metrics,
    Page,
    Panel,
    accuracy_cell,
    curves_of,
    difference_cell,
    estimate,
    levels,
    p_number,
    plot_curves,
    plot_heat_maps,
    provenance_facts,
)
from rlkv.evaluation.runner import name_unlike_rows
from rlkv.evaluation.study import ANALYSES, Study, StudyConfig, load_study
from rlkv.evaluation.text_analyses import budget, lengths, modes
from rlkv.gates.head_gates import HeadGates
from rlkv.models.builtin import PACKAGED_GATES
from rlkv.models.shape import ModelShape
from rlkv.utils.files import at_home, read_log, write_json
from rlkv.utils.runtime import provenance
from rlkv.utils.store import check_results

BETWEEN = (0.1, 0.9)  # gates in here are neither closed nor open
# Fields of the training log and of the re-ranking's summary, the better unit first: CPU time does
# not depend on what else the machine does.
COST_FIELDS = {
    "training": (("CPU", "time/step_cpu_s"), ("wall", "time/step_s")),
    "re-ranking": (("CPU", "cpu_seconds"),),
}


# --- the whole study


def run_study(config: StudyConfig) -> None:
    """Measure what is missing and, unless ``measure_only``, write the report."""
    started = time.monotonic()
    folder = config.output_dir
    check_results(folder, "results.json", ("report.html", "report.md", "table.md"), ("analyses",))
    check_results(folder, "measured.json", (), ("conditions",))
    study = load_study(config)
    drafts = "acceptance" in config.chosen_analyses
    if drafts:
        check_drafts(study.model)
    # the full cache first: matched budgets need its texts
    study.measure(FULL_CACHE, [(FULL_CACHE, study.full_condition(task)) for task in study.tasks])
    study.measure("conditions", study.requests(config.chosen_analyses))
    if drafts:
        measure_acceptance(study)
    measured = study.describe()
    if config.measure_only:
        write_json(folder / "measured.json", {"conditions": measured, **provenance()})
        return
    title = f"Study of KV heads: {ModelShape.from_config(study.model.config).model_id}"
    page = Page(title)
    metrics: dict[str, Metrics] = {}
    for name in config.chosen_analyses:
        page.heading(ANALYSES[name])
        metrics[name] = REPORTS[name](study, page)
    content = {
        **origin_of(study),
        **provenance(),
        "seconds": {
            "this run, wall": round(time.monotonic() - started, 1),
            "decoding of all conditions, wall": round(sum(of["seconds"] for of in measured), 1),
        },
        "analyses": metrics,
        "conditions": measured,
    }
    write_json(folder / "results.json", content)
    files: dict[str, list[Path]] = {}
    for each in measured:
        name = f"{each['task']} {each['requested_as'][0]}"
        files.setdefault(name, []).append(folder / "rows" / each["rows"])
    unlike = name_unlike_rows(files)
    if drafts:
        by_task = {f"{task} acceptance": [acceptance_file(folder, task)] for task in study.tasks}
        unlike += name_unlike_rows(by_task)
    write_origin(page, content, unlike)
    page.write_report(folder)
    (folder / "table.md").unlink(missing_ok=True)
    if "sweep" in metrics:
        table = Page(title)
        for task, numbers in metrics["sweep"]["tasks"].items():
            write_sweep_table(study, task, table, numbers)
        table.bullets([*provenance_facts(content), *unlike])
        table.write(folder / "table.md")


def origin_of(study: Study) -> dict[str, Any]:
    """Return the options, what was chosen for their defaults, and how the heads were found."""
    full_cache = {}
    for task in study.tasks:
        correct = study.full(task).correct
        full_cache[task] = {"accuracy": float(correct.mean()), "n": correct.size}
    found_by = (*study.rankings, *study.ablations)
    training: dict[str, list[Metrics]] = {}
    for ranking in found_by:
        for own in ranking.gates:
            scalars = {k: v for k, v in own.training.items() if not isinstance(v, list | dict)}
            training.setdefault(ranking.name, []).append(scalars)
    cache = study.cache
    limits = [of.sampling.max_new_tokens for of in study.settings.values()]
    resolved = {
        "cache": {name: getattr(cache, name) for name in ("sink", "window", "protect_prompt")},
        "max_new_tokens": limits,
        "sparsities": study.sparsities,
        "top_heads": study.top_heads,
        "policies": {name: policy.describe() for name, policy in study.policies.items()},
        "dtype": str(study.model.dtype),
        "device": str(study.model.device),
    }
    return {
        "config": asdict(study.config),
        "resolved": resolved,
        "full_cache": full_cache,
        "training": training,
        "costs": {of.name: cost_metrics(of) for of in found_by if of.files},
    }


def write_origin(page: Page, content: dict[str, Any], unlike: Sequence[str] = ()) -> None:
    """Add the command, where it ran, its options, and how the heads were found."""
    page.heading("How it was measured")
    page.code(content["command"])
    seconds = [f"{what}: {number:.0f} s" for what, number in content["seconds"].items()]
    page.bullets([*provenance_facts(content), f"Seconds: {'; '.join(seconds)}.", *unlike])
    options = {**content["config"], **content["resolved"]}
    rows = [[name, json.dumps(value, default=str)] for name, value in options.items()]
    page.table(["option", "value"], rows)
    rows = [[name, json.dumps(seeds[0])] for name, seeds in content["training"].items()]
    page.table(["gates", "training"], rows, "How the heads were found (first seeds).")


# --- sweep, comparison, threshold, sensitivity


def sweep(study: Study, task: str, page: Page) -> Metrics:
    """Measure accuracy under every ranking at every sparsity (RLKV, figure 5, tables 4 to 6).

    With other sinks and windows of the first ranking, ``share`` has their bytes over those of the
    full cache at the end of the full cache's texts, which are the same for all sizes; ``kv_share``,
    as everywhere, at the end of the own texts.
    """
    full = study.full(task)
    methods = study.sweep(task, accuracy_of)
    sizes: dict[str, list[Metrics]] = {}
    texts = study.full_texts(task)
    for size in study.config.parsed_sizes:
        sized = replace(texts, cache=replace(study.cache, **size._asdict()))
        accuracies = []
        for sparsity in study.sparsities:
            runs = study.outcomes_of(study.sized(task, size, sparsity))
            share = sized.held(None, study.first.allocations(sparsity)[0].full)
            accuracies.append({**accuracy_of(runs, full), "share": share})
        sizes[f"{study.first.name}, {size}"] = accuracies
    numbers: Metrics = {"full": accuracy_of([full]), "methods": methods, "sizes": sizes}
    write_sweep_table(study, task, page, numbers)
    panel = Panel(
        f"{task}: accuracy, 95% intervals",
        SPARSITY,
        curves_of(study.sparsities, {**methods, **sizes}),
        reference=numbers["full"]["mean"],
    )
    path = plot_curves(study.plot_file("sweep", task), panel)
    page.picture(path, f"{task}: greedy accuracy against sparsity, 95% intervals.")
    write_published(page, study.published, task)
    return numbers


def write_sweep_table(study: Study, task: str, page: Page, numbers: Metrics) -> None:
    """Add methods down, sparsities across, sizes below them, and what finding the heads took."""
    full = accuracy_cell(numbers["full"])
    rows = []
    for ranking in study.rankings:
        accuracies = map(accuracy_cell, numbers["methods"][ranking.name])
        rows.append([ranking.name, full, *accuracies, cost_text(cost_metrics(ranking))])
    held = {"kv_share": "KV held, of full", "kv_share_gated": "the same, layers with gates"}
    for name, label in held.items():
        cells = []
        for column in zip(*numbers["methods"].values(), strict=True):
            shares = [of[name] for of in column if name in of]
            if shares:
                low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
                cells.append(low if low == high else f"{low} to {high}")
        if cells:
            rows.append([label, "100%", *cells, ""])
    for name, accuracies in numbers["sizes"].items():
        gated = " of layers with gates" if study.first.heads else ""
        bytes_of = f"of the bytes{gated} at the full cache's lengths"
        cells = [f"{accuracy_cell(of)}; {of['share']:.1%} {bytes_of}" for of in accuracies]
        rows.append([name, full, *cells, ""])
    page.table(
        ["heads", "s = 0", *levels(study.sparsities), "seconds to find"],
        rows,
        f"{task}: greedy accuracy on {numbers['full']['n']} problems, {AGAINST_FULL}; {INTERVALS}.",
    )


def comparison(study: Study, task: str, page: Page) -> Metrics:
    """Compare the first ranking with each other one, paired by problem."""
    first = study.first
    found = []
    rows = []
    for sparsity, other in product(study.config.ascending("compare_at"), study.rankings[1:]):
        compared = compare(study.runs(task, first, sparsity), study.runs(task, other, sparsity))
        test = compared["difference"]
        found.append({"sparsity": sparsity, "other": other.name, **compared})
        accuracies = [accuracy_cell(compared["first"]), accuracy_cell(compared["second"])]
        differs = [difference_cell(test), p_number(test["p_value"])]
        differs += [f"{test['changed']} of {test['n']}", "yes" if compared["same_heads"] else "no"]
        rows.append([f"s = {sparsity:g}: {other.name}", *accuracies, *differs])
    columns = ["against", first.name, "the other", f"{first.name} minus the other", "p"]
    page.table(
        [*columns, "problems that differ", "same heads"],
        rows,
        f"{task}: accuracy, mean over seeds, and the paired difference; {INTERVALS}.",
    )
    return {"rows": found}


def threshold(study: Study, task: str, page: Page) -> Metrics:
    """Find the largest sparsity of every ranking that is near-lossless (RLKV, table 1)."""
    margin = study.config.margin
    full = study.full(task).correct
    methods = {}
    rows = []
    for ranking in study.rankings:
        scores = [mean_scores(study.runs(task, ranking, s)) for s in study.sparsities]
        found = near_lossless(full, np.stack(scores), study.sparsities, margin)
        methods[ranking.name] = found
        largest = f"{found['sparsity']:g} [{found['low']:g}, {found['high']:g}]"
        excluded = found["not_excluded"]
        points = NOT_AVAILABLE if excluded is None else f"{100 * excluded:.1f}"
        rows.append([ranking.name, largest, f"{found['support']:.0%}", str(found["n"]), points])
    columns = ["heads", "largest near-lossless sparsity", "resamples that agree", "problems"]
    page.table(
        [*columns, "points of loss not excluded"],
        rows,
        f"{task}: the largest measured sparsity up to which none loses more than {100 * margin:g} "
        f"points; {INTERVALS}.",
    )
    published = []
    if study.published:
        for number in find_published(study.published, task, "near_lossless_sparsity"):
            published.append([number.source.where, number.method, number.value])
            where = f"{number.source.where}, {number.method}"
            page.paragraph(f"Published for {task} ({where}): {number.value:g}.")
    return {"methods": methods, "published": published}


def sensitivity(study: Study, task: str, page: Page) -> Metrics:
    """Compress only the most needed heads of each ranking (RLKV, figure 7)."""
    first = study.first
    full = study.full(task)
    methods: dict[str, Metrics] = {}
    scores = {}  # of each problem, mean over seeds and numbers of heads
    rows = []
    for ranking in study.rankings:
        runs = []
        for heads in study.top_heads:
            seeds = study.seeds(task, ranking, ranking.without_top(heads))
            runs.append(study.outcomes_of(seeds))
        accuracies = [accuracy_of(outcomes, full) for outcomes in runs]
        scores[ranking.name] = np.mean([mean_scores(outcomes) for outcomes in runs], axis=0)
        mean = asdict(mean_with_interval(scores[ranking.name]))
        test = asdict(paired_difference(scores[first.name], scores[ranking.name]))
        methods[ranking.name] = {
            "by_heads": accuracies,
            "mean_over_heads": mean,
            "versus_first": test,
        }
        # a ranking whose accuracy falls less than the first one's is the worse one
        against = f"{difference_cell(test, sign=-1)}; p {p_number(test['p_value'])}"
        cells = [*map(accuracy_cell, accuracies), estimate(mean, 3)]
        rows.append([ranking.name, *cells, "" if ranking is first else against])
    titles = [f"{number} head{'' if number == 1 else 's'}" for number in study.top_heads]
    page.table(
        ["heads", *titles, "mean", f"mean minus {first.name}'s"],
        rows,
        f"{task}: accuracy when only the heads that a ranking puts last are compressed, of "
        f"{first.num_heads}; {AGAINST_FULL}, in the last column ▲ where accuracy falls faster than "
        f"under {first.name}; {INTERVALS}.",
    )
    panel = Panel(
        f"{task}: the faster it falls, the better the ranking",
        f"compressed heads of {first.num_heads}, the most needed ones first",
        curves_of(study.top_heads, {name: of["by_heads"] for name, of in methods.items()}),
        reference=float(full.correct.mean()),
    )
    path = plot_curves(study.plot_file("sensitivity", task), panel)
    page.picture(path, f"{task}: accuracy with only the most needed heads compressed.")
    return {"full": accuracy_of([full]), "methods": methods}


# --- gates, ablations, costs


def gates(study: Study, page: Page) -> Metrics:
    """Describe the gates of every method, variant and seed (RLKV, figure 3); nothing is decoded."""
    methods = {of.name: _gates_numbers(study, of) for of in study.rankings if of.gates}
    variants = {of.name: _gates_numbers(study, of) for of in study.ablations}
    rows = []
    for name, seeds in chain(methods.items(), variants.items()):
        for number, seed in enumerate(seeds):
            label = name if len(seeds) == 1 else f"{name}, seed {number}"
            rows.append([label, *_gates_cells(seed)])
    first = methods[study.first.name][0]
    shared = [f"full heads shared at {of['sparsity']:g}" for of in first["overlap_with_first"]]
    columns = ["gates", "mean", "at 0", f"{BETWEEN[0]:g} to {BETWEEN[1]:g}", "at 1", *shared]
    oracle = ["oracle's full heads at 0.5", "correlation with elimination"]
    page.table(
        [*columns, *oracle, "correlation with single heads"],
        rows,
        f"The gates of {first['heads']} KV heads: mean, numbers of heads, the full heads that "
        f"{study.first.name} (first seed) and the oracle keep full too, Spearman correlations.",
    )
    folder = study.config.output_dir
    first_seeds = {of.name: of.gates[0] for of in study.rankings if of.gates}
    path = plot_distributions(folder / "gates.png", first_seeds)
    page.picture(path, "Gates in ascending order and their histogram: first seed of each method.")
    path = plot_heat_maps(folder / "heat-maps.png", first_seeds)
    page.picture(path, "Gates by layer and KV head: first seed of each method.")
    return {"first": study.first.name, "methods": methods, "variants": variants, "tasks": {}}


def _gates_numbers(study: Study, ranking: Ranking) -> list[Metrics]:
    found = []
    for seed, own in enumerate(ranking.gates):
        alpha = own.alpha[own.gated]
        shared = []
        for sparsity in study.config.ascending("compare_at"):
            first = study.first.allocations(sparsity)[0]
            share = ranking.allocations(sparsity)[seed].overlap(first)
            shared.append({"sparsity": sparsity, "share": share})
        numbers = {
            "file": Path(ranking.files[seed]).name,
            "alpha": [[round(value, 6) for value in row] for row in own.alpha.tolist()],
            "mean": alpha.mean().item(),
            "at_0": int((alpha == 0).sum()),
            "at_1": int((alpha == 1).sum()),
            "between": int(((alpha > BETWEEN[0]) & (alpha < BETWEEN[1])).sum()),
            "heads": alpha.numel(),
            "overlap_with_first": shared,
            "agreement": None if study.truth is None else agreement(own, study.truth),
        }
        found.append(numbers)
    return found


def _gates_cells(seed: Metrics) -> list[str]:
    cells = [f"{seed['mean']:.3f}", *(str(seed[name]) for name in ("at_0", "between", "at_1"))]
    cells += [f"{of['share']:.0%}" for of in seed["overlap_with_first"]]
    agrees = seed["agreement"]
    cells.append(NOT_AVAILABLE if agrees is None else f"{agrees['overlap_at_0.5']:.0%}")
    for name in ("spearman_elimination", "spearman_single_head"):
        correlation = None if agrees is None else agrees[name]
        cells.append(NOT_AVAILABLE if correlation is None else f"{correlation:.2f}")
    return cells


def plot_distributions(path: Path, methods: dict[str, HeadGates]) -> Path:
    """Plot sorted gates and a histogram in ten bins, a curve per method."""
    ordered = {}
    histogram = {}
    for name, gates in methods.items():
        values = sorted(gates.alpha[gates.gated].tolist())
        ordered[name] = [(rank, value, value, value) for rank, value in enumerate(values, start=1)]
        counts = np.histogram(values, bins=10, range=(0, 1))[0].tolist()
        histogram[name] = [((place + 0.5) / 10, n, n, n) for place, n in enumerate(counts)]
    lines = {name: {"marker": ""} for name in methods}
    steps = {name: {"marker": "", "drawstyle": "steps-mid"} for name in methods}
    return plot_curves(
        path,
        Panel("Gates in ascending order", "KV heads, by gate", ordered, "gate", lines, ticks=False),
        Panel("Histogram", "gate", histogram, "KV heads", steps, limits=None, ticks=False),
    )


def ablations(study: Study, task: str, page: Page) -> Metrics:
    """Compare variants of training with the first method (RLKV, figure 8)."""
    first = study.first
    sparsities = study.config.ascending("compare_at")
    numbers: dict[str, list[Metrics]] = {}
    rows = []
    for variant in (first, *study.ablations):
        numbers[variant.name] = []
        cells = []
        for sparsity in sparsities:
            base = study.runs(task, first, sparsity)
            compared = compare(study.runs(task, variant, sparsity), base)
            test = compared["difference"]
            reason = "same heads" if compared["same_heads"] else f"p {p_number(test['p_value'])}"
            against = "" if variant is first else f"{difference_cell(test)}; {reason}"
            cells += [accuracy_cell(compared["first"]), against]
            numbers[variant.name].append(compared)
        rows.append([variant.name, *cells, cost_text(cost_metrics(variant))])
    columns = ["variant"]
    for level in levels(sparsities):
        columns += [f"{level}: accuracy", f"minus {first.name}"]
    page.table(
        [*columns, "seconds to find"],
        rows,
        f"{task}: greedy accuracy and the paired difference to {first.name}; {INTERVALS}.",
    )
    accuracies = {name: [of["first"] for of in compared] for name, compared in numbers.items()}
    curves = curves_of(sparsities, accuracies)
    panel = Panel(f"{task}: training ablations, 95% intervals", SPARSITY, curves)
    path = plot_curves(study.plot_file("ablations", task), panel)
    page.picture(path, f"{task}: greedy accuracy of each variant.")
    return numbers


def cost_metrics(ranking: Ranking) -> Metrics:
    """Return known seconds of each step and unit, mean and range over the seeds."""
    found: dict[tuple[str, str], list[float]] = {}
    for file, own in zip(ranking.files, ranking.gates, strict=True):
        path = at_home(file)
        log = (path if path.is_dir() else path.parent) / "log.jsonl"
        has_log = file not in PACKAGED_GATES and log.is_file()
        training = read_log(log) if has_log else []
        records = {"training": training, "re-ranking": [own.training.get("reranked") or {}]}
        for step, fields in COST_FIELDS.items():
            for unit, name in fields:
                seconds: list[Any] = [record.get(name) for record in records[step]]
                if seconds and None not in seconds:
                    found.setdefault((step, unit), []).append(float(sum(seconds)))
                    break
    steps = []
    for (step, unit), values in found.items():
        spread = {"mean": fmean(values), "low": min(values), "high": max(values)}
        steps.append({"step": step, "unit": unit, **spread, "n": len(values)})
    return {"seeds": len(ranking.orders), "steps": steps}


def cost_text(metrics: Metrics) -> str:
    """Write seconds, such as ``370 s CPU (350 to 390, 3 seeds) + 55 s wall re-ranking``."""
    parts = []
    for step in metrics["steps"]:
        text = f"{step['mean']:.0f} s {step['unit']}"
        if step["step"] != "training":
            text += f" {step['step']}"
        if step["n"] > 1:
            text += f" ({step['low']:.0f} to {step['high']:.0f}, {step['n']} seeds)"
        parts.append(text)
    return " + ".join(parts)


# --- all of them


def by_task(report: Callable[[Study, str, Page], Metrics]) -> Callable[[Study, Page], Metrics]:
    """Make a report of all tasks, one after the other."""

    def report_all(study: Study, page: Page) -> Metrics:
        tasks = {task: report(study, task, page) for task in study.tasks}
        return {"first": study.first.name, "tasks": tasks}

    return report_all


REPORTS = {
    "sweep": by_task(sweep),
    "comparison": by_task(comparison),
    "threshold": by_task(threshold),
    "sensitivity": by_task(sensitivity),
    "modes": by_task(modes),
    "lengths": by_task(lengths),
    "budget": by_task(budget),
    "gates": gates,
    "ablations": by_task(ablations),
    "acceptance": by_task(acceptance),
}
