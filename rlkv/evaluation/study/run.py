"""A study from its options to the files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from rlkv.cache.accounting import EntrySize
from rlkv.evaluation.report.plots import FULL_CACHE
from rlkv.evaluation.report.published import published_name
from rlkv.evaluation.study.base import Analysis, Study
from rlkv.evaluation.study.budget import Budget
from rlkv.evaluation.study.comparison import Ablations, Comparison
from rlkv.evaluation.study.config import StudyConfig
from rlkv.evaluation.study.gates import GateDistribution
from rlkv.evaluation.study.matching import default_extra, policy_templates
from rlkv.evaluation.study.measurements import Measurements
from rlkv.evaluation.study.outputs import ErrorModes, Lengths
from rlkv.evaluation.study.rankings import gates_rankings, read_truth, reference_rankings
from rlkv.evaluation.study.report import write_report
from rlkv.evaluation.study.sweep import Sensitivity, Sweep, top_heads
from rlkv.evaluation.study.tasks import study_tasks
from rlkv.evaluation.study.threshold import NearLossless
from rlkv.evaluation.tasks.registry import find_tasks
from rlkv.models.shape import ModelShape
from rlkv.utils.atomic import write_json
from rlkv.utils.provenance import provenance
from rlkv.utils.store import check_results

_KINDS = (Sweep, Comparison, NearLossless, Sensitivity, ErrorModes, Lengths, Budget, GateDistribution, Ablations)
ANALYSES: dict[str, type[Analysis]] = {kind.name: kind for kind in _KINDS}  # in the order of the report


def choose_analyses(names: Sequence[str], has_ablations: bool) -> list[Analysis]:
    """The analyses ``names`` in the order of the report; none named: all that can be done."""
    names = names or [name for name in ANALYSES if has_ablations or name != Ablations.name]
    for name in names:
        if name not in ANALYSES:
            raise ValueError(f"--analyses: there is no analysis {name!r}: choose from {', '.join(ANALYSES)}")
    if Ablations.name in names and not has_ablations:
        raise ValueError("--analyses names ablations, but there are no gates for them: add --ablation NAME=FILE")
    return [kind() for name, kind in ANALYSES.items() if name in names]


def load_study(config: StudyConfig) -> Study:
    """Everything that the options name, read and checked before anything is written."""
    find_tasks(config.tasks, config.data)  # a wrong name is refused before the model is loaded
    published = published_name(config.published or config.model)
    if config.published and published is None:
        raise ValueError(f"--published {config.published!r}: nothing is known to be published for a model of this name")
    model, tokenizer = config.load()
    shape = ModelShape.from_config(model.config)
    truth = read_truth(config.oracle, shape) if config.oracle else None
    methods = gates_rankings(config.gates_files, model.config)
    variants = gates_rankings(config.ablation_files, model.config)
    cache = config.cache_settings({"first": methods[0].gates[0]})
    extra = config.extra
    if extra is None:
        extra = default_extra(config.policies, config.observation, cache.sink, cache.sink + cache.window)
    config = replace(config, extra=extra)
    sizes = (config.buffer, config.observation, extra, cache.sink)
    policies = policy_templates(config.policies, *sizes, config.prompt_variants)
    every_gates = [gates for method in (*methods, *variants) for gates in method.gates]
    prepared = study_tasks(config, cache, every_gates, tokenizer)
    return Study(
        rankings=(*methods, *reference_rankings(shape, truth, config.random_draws)),
        ablations=tuple(variants),
        measurements=Measurements(model, tokenizer, prepared, config.output_dir / "rows", {"model": config.model}),
        entry_size=EntrySize.of(model),
        config=config,
        policies=policies,
        top_heads=top_heads(config.top_heads, shape.num_layers * shape.num_kv_heads),
        truth=truth,
        published=published,
    )


def run_study(config: StudyConfig) -> list[str] | None:
    """Measure and report; the findings, or None with ``measure_only``."""
    started = time.monotonic()
    check_results(config.output_dir, "results.json", ("report.html", "report.md", "table.md"), ("analyses",))
    check_results(config.output_dir, "measured.json", (), ("conditions",))
    analyses = choose_analyses(config.analyses, bool(config.ablation))
    study = load_study(config)
    # the full cache first: matched budgets need its texts
    study.measurements.measure(FULL_CACHE, [(FULL_CACHE, study.full_condition(task)) for task in study.tasks])
    requests = (request for analysis in analyses for request in analysis.conditions(study))
    study.measurements.measure("conditions", requests)
    if config.measure_only:
        content = {"conditions": study.measurements.describe(), **provenance()}
        write_json(config.output_dir / "measured.json", content)
        return None
    metrics = {analysis.name: analysis.metrics(study) for analysis in analyses}
    title = f"Study of KV heads: {ModelShape.from_config(study.measurements.model.config).model_id}"
    write_report(title, study, analyses, metrics, time.monotonic() - started)
    return [line for analysis in analyses for line in analysis.findings(metrics[analysis.name])]
