"""An evaluation: methods on tasks, every generation in a file.

Rows are in ``TASK/METHOD/rows-RANK-of-PROCESSES.jsonl`` of the output folder.  They do not depend
on which process decoded them, so that a run with another number of processes resumes from all
files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

from transformers import PretrainedConfig

from rlkv.cache import CacheSettings
from rlkv.cache.plan import COMPRESSIBLE, FULL_HEADS
from rlkv.evaluation.decoders import TransformersModel, VLLMModel, check_served
from rlkv.evaluation.metrics import RepetitionRule
from rlkv.evaluation.runner import (
    KEY,
    ROWS,
    RunSettings,
    longest_text,
    render_problems,
    run_method,
)
from rlkv.evaluation.sandbox import isolation
from rlkv.evaluation.tasks.base import EvalProblem, EvalTask
from rlkv.evaluation.tasks.registry import TASKS, find_task, find_tasks, load_task
from rlkv.eviction import POLICIES, make_policy, parse_options
from rlkv.eviction.base import EvictionPolicy
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.options import CacheOptions, ModelOptions, SamplingOptions, check_least
from rlkv.models.layout import Layout
from rlkv.models.loading import load_config
from rlkv.models.prompts import DEFAULT_TEMPLATE
from rlkv.models.shape import ModelShape, max_positions
from rlkv.utils.progress import ProgressBar, progress_bar
from rlkv.utils.runtime import leave_launcher
from rlkv.utils.store import Row, check_results, iter_shards, shard_file
from rlkv.vllm.plugin import check_vllm_options
from rlkv.vllm.settings import check_temperature

FULL = "full"
RANDOM_HEADS = "random-heads"
OF_FULL = "full:"  # before a policy that evicts from the full heads
RESULTS = "results.json"
REPORTS = ("report.html", "report.md")  # with a plot for each task


@dataclass(frozen=True)
class CompressionMethod:
    """A parsed name of a method.

    Without a ranking all heads are compressible (none for ``full``); without a policy of theirs
    these keep sinks and a window.
    """

    name: str
    ranking: str | None
    sparsity: float | None
    policy: EvictionPolicy | None
    evict_from: str = COMPRESSIBLE

    def cache(self, sizes: CacheSettings) -> CacheSettings:
        """Return what the heads keep, with ``sizes`` where no policy chooses."""
        return sizes.with_policy(self.policy, self.evict_from)

    def allocation(
        self, config: PretrainedConfig, gates: dict[str, HeadGates], seed: int
    ) -> HeadAllocation:
        """Return the full heads.

        Raises:
            ValueError: if the gates are not those of the model, or if no head is full and the
                policy is that of the full heads.
        """
        sparsity = self.sparsity
        if sparsity is None:
            sparsity = 0.0 if self.policy is None else 1.0
        if self.ranking in (None, RANDOM_HEADS):
            shape = ModelShape.from_config(config)
            heads = Layout.from_config(config).heads
            found = HeadAllocation.random(
                shape.num_layers, shape.num_kv_heads, sparsity, seed, heads
            )
        else:
            gates[self.ranking].check_model(config)
            found = HeadAllocation.from_gates(gates[self.ranking], sparsity)
        self.cache(CacheSettings()).check_heads(found.num_full)
        return found


def parse_methods(names: Sequence[str], rankings: list[str]) -> list[CompressionMethod]:
    """Parse methods, each of which may be named once; otherwise as :func:`parse_method`."""
    parsed: list[CompressionMethod] = []
    for name in names:
        method = parse_method(name, rankings)
        if any(replace(method, name=other.name) == other for other in parsed):
            raise ValueError(f"--methods names {name!r} twice: leave one out")
        parsed.append(method)
    return parsed


def parse_method(name: str, rankings: list[str]) -> CompressionMethod:
    """Parse a method such as ``rlkv@0.5+rkv@256``; ``rankings`` are the names of the gates files.

    With ``full:`` before the policy it evicts from the full heads: ``rlkv@0.5+full:rkv@256``.

    Raises:
        ValueError: for another form or name; says what is known.
    """
    if name == FULL:
        return CompressionMethod(name, None, None, None)
    parts = name.split("+")
    heads = [part for part in parts if part.partition("@")[0] in (*rankings, RANDOM_HEADS)]
    policies = []
    for part in parts:
        if part.removeprefix(OF_FULL).partition("@")[0] in POLICIES:
            policies.append(part)
    if len(heads) > 1 or len(policies) > 1 or len(heads) + len(policies) != len(parts):
        known = ", ".join([FULL, *rankings, RANDOM_HEADS, *POLICIES])
        raise ValueError(
            f"method {name!r} is not understood: write full, HEADS@SPARSITY, POLICY@BUDGET or both "
            f"joined by + (HEADS@SPARSITY+{OF_FULL}POLICY@BUDGET evicts from the full heads), of "
            f"{known}"
        )
    ranking = None
    sparsity = None
    if heads:
        ranking, _, text = heads[0].partition("@")
        sparsity = _number(text, name, f"{ranking}@0.5")
        if not 0 <= sparsity <= 1:
            raise ValueError(f"method {name!r}: sparsity {text} is not in [0, 1]")
    if not policies:
        return CompressionMethod(name, ranking, sparsity, None)
    part = policies[0].removeprefix(OF_FULL)
    policy = _parse_policy(part, name)
    if part == policies[0]:
        return CompressionMethod(name, ranking, sparsity, policy)
    if not heads:
        raise ValueError(
            f"method {name!r} names no heads: write HEADS@SPARSITY+{policies[0]}, or {part} to "
            "evict from all heads"
        )
    return CompressionMethod(name, ranking, sparsity, policy, FULL_HEADS)


def _parse_policy(part: str, name: str) -> EvictionPolicy:
    kind, _, text = part.partition("@")
    size, *fields = text.split(":")
    options = parse_options(fields)
    if size.startswith("ratio="):
        options["ratio"] = _number(size.removeprefix("ratio="), name, f"{kind}@ratio=0.5")
    elif size:
        if not size.isdecimal():
            raise ValueError(
                f"method {name!r}: the budget {size!r} is not a number of entries: write {kind}@256"
            )
        options["budget"] = int(size)
    return make_policy(kind, **options)


def _number(text: str, name: str, example: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"method {name!r}: {text!r} is not a number: write {example}") from None


def named_gates(items: Sequence[str], reserved: tuple[str, ...] = ()) -> dict[str, HeadGates]:
    """Load gates files given as FILE or NAME=FILE, by names that are not ``reserved``.

    An item that is an existing file is one, whatever signs it holds.
    """
    named: dict[str, str] = {}
    for item in items:
        name, separator, file = item.partition("=")
        if Path(item).is_file() or not separator:
            name = Path(item).stem
            file = item
        if not file.strip():
            raise ValueError(f"--gates {item!r} names no file: give NAME=FILE")
        if not name.strip() or set(name) & set("/+@,:"):
            raise ValueError(
                f"--gates: {name!r} cannot name a ranking: give NAME=FILE, the name without / + @ "
                ", or :"
            )
        if name in named or name in reserved:
            raise ValueError(
                f"--gates: the name {name!r} is used twice or reserved: give NAME=FILE"
            )
        named[name] = file
    return {name: HeadGates.load(file) for name, file in named.items()}


@dataclass(frozen=True, kw_only=True)
class TaskOptions(CacheOptions, ModelOptions):
    """Tasks, and how far their texts go."""

    tasks: tuple[str, ...] = ("tiny",)
    """such as math500 aime24 tiny"""
    data: Path | None = None
    """file or folder with the tasks' problems; default: the hub"""
    limit: int | None = None
    """first problems of each task"""
    max_new_tokens: tuple[str, ...] = ()
    """N, or TASK=N for single tasks; default: the tasks' published limits"""
    template: str | None = None
    """prompt template of maths tasks: rlkv, boxed or plain; default: the one of all gates, else the
    task's
    """
    repetition: tuple[int, int] = (400, 40)
    """WINDOW DISTINCT: a text is repetitive if a window holds fewer distinct tokens"""
    batch_size: int = 16
    """texts decoded together"""

    def check(self) -> None:
        if not self.tasks:
            raise ValueError("--tasks is empty: name a task")
        check_least(self, 1, "limit", "batch_size")
        number_for("", self.max_new_tokens, "--max-new-tokens")
        _ = self.rule

    @property
    def rule(self) -> RepetitionRule:
        """Return what counts as repetitive."""
        return RepetitionRule(*self.repetition)

    def token_limit(self, task: EvalTask) -> int:
        """Return the most new tokens of a text of ``task``."""
        return number_for(task.name, self.max_new_tokens, "--max-new-tokens") or task.max_new_tokens

    def chosen_template(self, gates: Iterable[HeadGates]) -> str | None:
        """Return the template as given, else the one that all gates were trained with.

        None: the tasks' own; for ``rlkv`` they have the published text.
        """
        names = {each.training.get("template") for each in gates}
        if self.template or len(names) != 1 or names == {DEFAULT_TEMPLATE}:
            return self.template
        return next(iter(names))

    def problems(self, template: str | None) -> list[tuple[EvalTask, list[EvalProblem]]]:
        """Load every task with its problems."""
        tasks = find_tasks(self.tasks, self.data)
        return [(task, load_task(task.name, self.data, self.limit, template)) for task in tasks]


def number_for(task: str, values: Sequence[str], option: str) -> int | None:
    """Return the number of ``task`` in values such as ``4 math500=2``, or None.

    Its own number counts, else that of the task without a level, else that of all tasks.

    Raises:
        ValueError: for a value of another form, a number below 1, a task that is unknown or named
            twice.
    """
    families = {"", *(known.partition(":")[0] for known in TASKS)}
    found: dict[str, int] = {}
    for value in values:
        name, _, number = value.rpartition("=")
        if name not in families:
            find_task(name)
        if not number.isdecimal() or int(number) < 1 or name in found:
            raise ValueError(
                f"{option} {' '.join(values)}: {value!r} is wrong or a second value for the same "
                "tasks: give N for all tasks and TASK=N for single ones, N at least 1"
            )
        found[name] = int(number)
    names = (task, task.partition(":")[0], "")
    return next((found[name] for name in names if name in found), None)


@dataclass(frozen=True, kw_only=True)
class EvalConfig(SamplingOptions, TaskOptions):
    """Options of an evaluation."""

    output_dir: Path
    """takes TASK/METHOD/rows-*.jsonl, results.json, report.html, report.md and accuracy-TASK.png"""
    engine: Literal["hf", "vllm"] = "hf"
    """what decodes: transformers (hf), or vLLM for many texts at once; texts at float32 and greedy
    decoding are the same
    """
    kv_gib: float | None = None
    """vllm: memory of its KV cache in GiB; default: what the GPU has left, without one 4"""
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
    """rlkv, rkv, rpc or modern: a published protocol, which sets what neither --config nor the
    command line does
    """

    def check(self) -> None:
        super().check()
        if not self.methods:
            raise ValueError("--methods is empty: name a method, such as full")
        number_for("", self.num_samples, "--num-samples")
        check_vllm_options(self.engine, self.device, self.kv_gib)

    def load_engine(self) -> TransformersModel | VLLMModel:
        """Load the model for the engine."""
        if self.engine == "vllm":
            return VLLMModel(self.model, self.dtype, self.batch_size, self.kv_gib)
        return TransformersModel(*self.load(), self.batch_size)

    def rows_folder(self, task: str, method: CompressionMethod) -> Path:
        """Return where the rows of a method on a task are."""
        return self.output_dir / task.replace(":", "_") / method.name

    def samples_of(self, task: EvalTask) -> int:
        return number_for(task.name, self.num_samples, "--num-samples") or 1


@dataclass(frozen=True)
class Evaluation:
    """Rows of an evaluation, and its settings.

    Attributes:
        methods: in the order in which they were named.
        rows: by (task, method).
        config: the options, with what was chosen for their defaults.
    """

    methods: list[CompressionMethod]
    rows: dict[tuple[str, str], list[Row]]
    config: dict[str, Any]


def check_vllm(
    config: EvalConfig,
    methods: list[CompressionMethod],
    gates: dict[str, HeadGates],
    cache: CacheSettings,
) -> None:
    """Raise ``ValueError`` for what vLLM does not decode, before anything is loaded."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "--engine vllm evaluates in one process: start it without torchrun or accelerate "
            "launch, or take --engine hf, which shares the texts"
        )
    check_temperature(config.temperature)
    of_model = load_config(config.model)
    served = {}
    for method in methods:
        allocation = method.allocation(of_model, gates, config.seed)
        served[method.name] = (allocation, method.cache(cache))
    check_served(of_model, served)


def plot_name(task: str) -> str:
    """Return the name of the file with the plot of a task."""
    return f"accuracy-{task.replace(':', '_')}.png"


def evaluate(config: EvalConfig) -> Evaluation | None:
    """Decode and grade what the output folder does not hold yet.

    Returns:
        The evaluation; None while other processes of the run are at work.
    """
    reports = (*REPORTS, *map(plot_name, config.tasks))
    check_results(config.output_dir, RESULTS, reports, ("config", "results"))
    rankings = named_gates(config.gates, (FULL, RANDOM_HEADS, *POLICIES))
    methods = parse_methods(config.methods, list(rankings))
    if config.baseline not in (None, *config.methods):
        raise ValueError(
            f"--baseline {config.baseline!r} is not among the methods: choose from "
            f"{', '.join(config.methods)}"
        )
    cache = config.cache_settings(rankings)
    if config.engine == "vllm":
        check_vllm(config, methods, rankings, cache)
    template = config.chosen_template(rankings.values())
    loaded = config.problems(template)
    rank, processes = leave_launcher(config.device)
    settings = {}
    for task, _ in loaded:
        settings[task.name] = RunSettings(
            cache,
            config.sampling_params(config.token_limit(task)),
            num_samples=config.samples_of(task),
            batch_size=config.batch_size,
            rule=config.rule,
            rank=rank,
            ranks=processes,
            stop_repetitive=config.stop_repetitive,
        )
    model = config.load_engine()
    allocations = [method.allocation(model.config, rankings, config.seed) for method in methods]
    rendered = {task.name: render_problems(task, found, model.tokenizer) for task, found in loaded}
    most = max_positions(model.config)
    longest = 0
    for name, problems in rendered.items():
        longest = max(longest, longest_text(name, problems, settings[name].sampling, most))
    caches = [method.cache(cache) for method in methods]
    # all are opened first: what one refuses is said before the texts of another are decoded
    pairs = zip(allocations, caches, strict=True)
    decoders = [model.decoder(allocation, own, longest) for allocation, own in pairs]
    for method, own_cache, decoding in zip(methods, caches, decoders, strict=True):
        with decoding as decoder:
            for name, problems in rendered.items():
                title = f"{name} {method.name}"
                if processes > 1:
                    title += f" (process 0 of {processes})"
                folder = config.rows_folder(name, method)
                with progress_bar(title, "texts", disable=rank > 0) as bar:
                    run_method(
                        decoder,
                        problems,
                        replace(settings[name], cache=own_cache),
                        shard_file(folder, ROWS, rank, processes),
                        partial(_show, bar),
                    )
    rows = {}
    for (task, found), method in product(loaded, methods):
        folder = config.rows_folder(task.name, method)
        number = settings[task.name].num_samples
        written = _read_rows(folder, found, number)
        if written is None:
            return None
        rows[task.name, method.name] = written
    chosen = {
        "protect_prompt": cache.protect_prompt,
        "sink": cache.sink,
        "template": template,
        "window": cache.window,
        "dtype": model.dtype,
        "max_new_tokens": {task: own.sampling.max_new_tokens for task, own in settings.items()},
        "num_samples": {task: own.num_samples for task, own in settings.items()},
        "processes": processes,
    }
    if any(task.kind == "code" for task, _ in loaded):
        chosen["sandbox"] = isolation()
    return Evaluation(methods, rows, asdict(config) | chosen)


def _read_rows(
    folder: Path, problems: list[EvalProblem], number: int
) -> list[dict[str, Any]] | None:
    """Return the rows of a method on a task; None if some are still missing."""
    shards = iter_shards(folder, ROWS, KEY)
    written = {(row["key"], row["sample"]): row for row in shards}
    units = [(problem.id, sample) for problem, sample in product(problems, range(number))]
    if not written.keys() >= set(units):
        return None
    return [written[unit] for unit in units]


def _show(bar: ProgressBar, done: int, total: int, accuracy: float) -> None:
    if bar.total is None:
        bar.resume(done)
    bar.update(done, total, note=f"accuracy {accuracy:.3f}" if done else "")
