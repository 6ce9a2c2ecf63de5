"""An evaluation: methods on tasks, every generation in a file.

Rows are in ``TASK/METHOD/rows-RANK-of-PROCESSES.jsonl`` of the output folder.  They do not depend on which process
decoded them, so that a run with another number of processes resumes from all files.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from rlkv.evaluation.run.distributed import join_processes
from rlkv.evaluation.run.methods import FULL, RANDOM_HEADS, CompressionMethod, named_gates, parse_methods
from rlkv.evaluation.run.options import TaskOptions, number_for
from rlkv.evaluation.run.runner import KEY, RunSettings, render_problems, run_method
from rlkv.evaluation.sandbox import isolation
from rlkv.evaluation.tasks.base import EvalTask
from rlkv.eviction import POLICIES
from rlkv.inference.options import SamplingOptions
from rlkv.utils.progress import ProgressBar, progress_bar
from rlkv.utils.store import Row, check_results, iter_rows

RESULTS, REPORTS = "results.json", ("report.html", "report.md")
_ROWS = re.compile(r"rows-\d+-of-(\d+)\.jsonl")


@dataclass(frozen=True, kw_only=True)
class EvalConfig(SamplingOptions, TaskOptions):
    """Options of an evaluation."""

    output_dir: Path
    """takes TASK/METHOD/rows-*.jsonl, results.json, report.html and report.md"""
    methods: tuple[str, ...] = (FULL,)
    """such as full rlkv@0.5 rkv@ratio=0.5"""
    gates: tuple[str, ...] = ()
    """NAME=FILE, rankings of heads by the names that methods use"""
    baseline: str | None = None
    """one of the methods, which the others are compared with too, beside the full cache"""
    num_samples: tuple[str, ...] = ()
    """samples of each problem: N, or TASK=N for single tasks; default: 1"""
    stop_repetitive: bool = False
    """end a text when it is repetitive (recorded in its row)"""
    preset: str | None = None
    """rlkv, rkv, rpc or modern: a published protocol, which sets what neither --config nor the command line does"""

    def check(self) -> None:
        """As of :class:`TaskOptions`, and the numbers of samples."""
        super().check()
        number_for("", self.num_samples, "--num-samples")

    def samples_of(self, task: EvalTask) -> int:
        """Samples of each problem of ``task``."""
        return number_for(task.name, self.num_samples, "--num-samples") or 1


@dataclass(frozen=True)
class Evaluation:
    """What was decoded: rows by (task, method), and ``config``, the options with what was chosen for their defaults."""

    methods: list[CompressionMethod]
    rows: dict[tuple[str, str], list[Row]]
    config: dict[str, Any]


def evaluate(config: EvalConfig) -> Evaluation | None:
    """Decode and grade what the output folder does not hold yet; None in all processes of a run but the first."""
    check_results(config.output_dir, RESULTS, REPORTS, ("config", "results"))
    rankings = named_gates(config.gates, (FULL, RANDOM_HEADS, *POLICIES))
    methods = parse_methods(config.methods, list(rankings))
    names = [method.name for method in methods]
    if config.baseline is not None and config.baseline not in names:
        raise ValueError(f"--baseline {config.baseline!r} is not among the methods: choose from {', '.join(names)}")
    cache, template = config.cache_settings(rankings), config.chosen_template(rankings.values())
    loaded = config.problems(template)
    settings = {
        task.name: RunSettings(
            cache,
            config.sampling_params(config.token_limit(task)),
            config.samples_of(task),
            config.batch_size,
            config.rule,
            stop_repetitive=config.stop_repetitive,
        )
        for task, _ in loaded
    }
    processes = join_processes(config.device)  # before the model, which takes long to load
    model, tokenizer = replace(config, device=processes.device).load()
    allocations = {method.name: method.allocation(model.config, rankings, config.seed) for method in methods}
    problems = {task.name: render_problems(task, found, tokenizer) for task, found in loaded}
    folders = {
        (task, method.name): config.output_dir / task.replace(":", "_") / method.name
        for task, method in product(problems, methods)
    }
    for task, method in product(problems, methods):
        title = f"{task} {method.name}" + (f" (process 0 of {processes.count})" if processes.count > 1 else "")
        folder = folders[task, method.name]
        own = replace(settings[task], cache=cache.with_policy(method.policy))
        own = replace(own, rank=processes.rank, ranks=processes.count)
        # files of this number of processes hold the shares of their own processes only
        earlier = [file for file, count in _files(folder).items() if count != processes.count]
        file = folder / f"rows-{processes.rank}-of-{processes.count}.jsonl"
        heads = allocations[method.name]
        with progress_bar(title, "texts", disable=processes.rank > 0) as bar:
            run_method(model, tokenizer, problems[task], heads, own, file, {}, partial(_show, bar), earlier)
    processes.wait_for_all()
    if processes.rank > 0:
        return None
    rows = {}
    for (task, name), folder in folders.items():
        found = {(row["key"], row["sample"]): row for file in _files(folder) for row in iter_rows(file, KEY)}
        samples = range(settings[task].num_samples)
        rows[task, name] = [found[problem.key, sample] for problem, sample in product(problems[task], samples)]
    chosen = {
        "protect_prompt": cache.protect_prompt,
        "sink": cache.sink,
        "template": template,
        "window": cache.window,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_new_tokens": {task: own.sampling.max_new_tokens for task, own in settings.items()},
        "num_samples": {task: own.num_samples for task, own in settings.items()},
        "processes": processes.count,
    }
    if any(task.kind == "code" for task, _ in loaded):
        chosen["sandbox"] = isolation()
    return Evaluation(methods, rows, asdict(config) | chosen)


def _show(bar: ProgressBar, done: int, total: int, accuracy: float) -> None:
    """Units done and accuracy so far, of this process."""
    if bar.total is None:
        bar.resume(done)
    bar.update(done, total, note=f"accuracy {accuracy:.3f}" if done else "")


def _files(folder: Path) -> dict[Path, int]:
    """Files of rows, and the number of processes of the run that wrote each."""
    matches = {file: _ROWS.fullmatch(file.name) for file in sorted(folder.glob("rows-*.jsonl"))}
    return {file: int(match.group(1)) for file, match in matches.items() if match}
