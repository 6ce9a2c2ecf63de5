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

from rlkv.cache import CacheSettings
from rlkv.evaluation.run.distributed import join_processes
from rlkv.evaluation.run.methods import (
    FULL,
    RANDOM_HEADS,
    CompressionMethod,
    deployed_sizes,
    named_gates,
    parse_methods,
)
from rlkv.evaluation.run.runner import KEY, Row, RunSettings, render_problems, run_method
from rlkv.evaluation.stats.error_modes import RepetitionRule
from rlkv.evaluation.tasks import find_tasks, load_task, trained_template
from rlkv.eviction import POLICIES
from rlkv.inference.options import CacheOptions, ModelOptions, check_positive
from rlkv.rollout.base import SamplingParams
from rlkv.utils.progress import ProgressBar, progress_bar
from rlkv.utils.store import iter_rows

_ROWS = re.compile(r"rows-\d+-of-(\d+)\.jsonl")


@dataclass(frozen=True, kw_only=True)
class EvalConfig(CacheOptions, ModelOptions):
    """Options of an evaluation."""

    output_dir: Path
    """takes TASK/METHOD/rows-*.jsonl, results.json, report.html and report.md"""
    tasks: tuple[str, ...] = ("tiny",)
    """such as math500 aime24 tiny"""
    methods: tuple[str, ...] = (FULL,)
    """such as full rlkv@0.5 rkv@ratio=0.5"""
    gates: tuple[str, ...] = ()
    """NAME=FILE, rankings of heads by the names that methods use"""
    data: Path | None = None
    """file or folder with the tasks' problems; default: the hub"""
    limit: int | None = None
    """first problems of each task"""
    num_samples: int = 1
    """samples of each problem"""
    temperature: float = 0.0
    """0 is greedy"""
    top_p: float = 1.0
    """nucleus sampling"""
    top_k: int = 0
    """0: no limit"""
    seed: int = 0
    """of samples, random heads and drawn problems"""
    max_new_tokens: int | None = None
    """default: the task's published limit"""
    template: str | None = None
    """prompt template of maths tasks: rlkv, boxed or plain; default: the one of all gates, else the task's"""
    repetition: tuple[int, int] = (400, 40)
    """WINDOW DISTINCT: a text is repetitive if a window holds fewer distinct tokens"""
    stop_repetitive: bool = False
    """end a text when it is repetitive (recorded in its row)"""
    batch_size: int = 16
    """samples decoded together"""

    def check(self) -> None:
        check_positive(self, "limit", "num_samples", "max_new_tokens", "batch_size")
        RepetitionRule(*self.repetition)


@dataclass(frozen=True)
class Evaluation:
    """What was decoded: rows by (task, method), and ``config``, the options with what was chosen for their defaults."""

    methods: list[CompressionMethod]
    rows: dict[tuple[str, str], list[Row]]
    config: dict[str, Any]


def evaluate(config: EvalConfig) -> Evaluation | None:
    """Decode and grade what the output folder does not hold yet; None in all processes of a run but the first."""
    rankings = named_gates(config.gates, (FULL, RANDOM_HEADS, *POLICIES))
    methods = parse_methods(config.methods, list(rankings))
    tasks = find_tasks(config.tasks, config.data)
    cache = CacheSettings(*deployed_sizes(rankings, config.sink, config.window), config.prefill)
    settings = {task.name: _settings(config, cache, task.max_new_tokens) for task in tasks}
    template = config.template or trained_template(rankings.values())
    found = {task.name: load_task(task.name, config.data, config.limit, config.seed, template) for task in tasks}
    processes = join_processes(config.device)  # before the model, which takes long to load
    model, tokenizer = replace(config, device=processes.device).load()
    allocations = {method.name: method.allocation(model.config, rankings, config.seed) for method in methods}
    problems = {task.name: render_problems(task, found[task.name], tokenizer) for task in tasks}
    cells = list(product((task.name for task in tasks), methods))
    for task, method in cells:
        title = f"{task} {method.name}" + (f" (process 0 of {processes.count})" if processes.count > 1 else "")
        folder = _folder(config, task, method)
        own = replace(
            settings[task],
            cache=replace(cache, eviction=method.policy),
            rank=processes.rank,
            ranks=processes.count,
        )
        with progress_bar(title, "texts", disable=not processes.is_main) as bar:
            run_method(
                model,
                tokenizer,
                problems[task],
                allocations[method.name],
                own,
                folder / f"rows-{processes.rank}-of-{processes.count}.jsonl",
                {},
                partial(_show, bar),
                # files of this number of processes hold the shares of their own processes only
                [file for file, count in _files(folder).items() if count != processes.count],
            )
    processes.wait_for_all()
    if not processes.is_main:
        return None
    keys = {
        task: list(product((problem.key for problem in problems[task]), range(config.num_samples))) for task in found
    }
    rows = {(task, method.name): _rows(_folder(config, task, method), keys[task]) for task, method in cells}
    chosen = {
        "sink": cache.sink,
        "template": template,
        "window": cache.window,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_new_tokens": {task: settings[task].sampling.max_new_tokens for task in settings},
        "processes": processes.count,
    }
    return Evaluation(methods, rows, asdict(config) | chosen)


def _settings(config: EvalConfig, cache: CacheSettings, limit: int) -> RunSettings:
    sampling = SamplingParams(
        config.max_new_tokens or limit, config.temperature, config.top_p, config.top_k, config.seed
    )
    rule = RepetitionRule(*config.repetition)
    return RunSettings(
        cache, sampling, config.num_samples, config.batch_size, rule, stop_repetitive=config.stop_repetitive
    )


def _folder(config: EvalConfig, task: str, method: CompressionMethod) -> Path:
    return config.output_dir / task.replace(":", "_") / method.name


def _files(folder: Path) -> dict[Path, int]:
    """Files of rows, and the number of processes of the run that wrote each."""
    matches = {file: _ROWS.fullmatch(file.name) for file in sorted(folder.glob("rows-*.jsonl"))}
    return {file: int(match.group(1)) for file, match in matches.items() if match}


def _rows(folder: Path, keys: list[tuple[str, int]]) -> list[Row]:
    found = {(row["key"], row["sample"]): row for file in _files(folder) for row in iter_rows(file, KEY)}
    return [found[key] for key in keys]


def _show(bar: ProgressBar, done: int, total: int, accuracy: float) -> None:
    """Units done and accuracy so far, of this process."""
    if bar.total is None:
        bar.resume(done)
    bar.update(done, total, note=f"accuracy {accuracy:.3f}" if done else "")
