"""Which heads stay full x what the others keep, all at the same bytes of KV.

A *saving* is the share of the full cache's bytes that must not be held at the end of a text.  Every
method gets the largest budget that holds at most the rest, over the texts of the full-cache run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import tyro
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlkv.cache import CacheSettings
from rlkv.cache.accounting import EntrySize, kv_nbytes
from rlkv.evaluation.evaluate import TaskOptions
from rlkv.evaluation.measurements import (
    RESERVED,
    Condition,
    ConditionRequests,
    Measurements,
    Metrics,
    Order,
    Outcome,
    Ranking,
    StudyTask,
    group_by_name,
)
from rlkv.evaluation.report import Page, Panel, plot_curves
from rlkv.evaluation.runner import RunSettings, render_problems
from rlkv.eviction import POLICIES, make_policy
from rlkv.eviction.base import EvictionPolicy
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.options import check_positive
from rlkv.rollout.base import SamplingParams
from rlkv.utils.numbers import check_whole

MIN_EXTRA = 5
MOST_DRAWS = 10_000


@dataclass(frozen=True, kw_only=True)
class StudyConfig(TaskOptions):
    """Study rankings of KV heads."""

    gates: tuple[str, ...]
    """NAME=FILE; several files of one name are its seeds.

    The first name is compared with every other
    """
    output_dir: Path
    """report.html, report.md, table.md, results.json, plots, rows/"""
    ablation: tuple[str, ...] = ()
    """NAME=FILE, variants of the first method, compared with it alone"""
    analyses: tuple[str, ...] = ()
    """sweep comparison threshold sensitivity modes lengths budget gates ablations; default: all
    that can be done
    """
    oracle: Path | None = None
    """ground-truth JSON with a measured elimination order"""
    random_draws: int = 10
    """random orders of the heads, which share the problems; 0: no random heads"""
    sparsities: tuple[float, ...] = (0.2, 0.4, 0.5, 0.6, 0.8)
    """of the sweep, measured in this order"""
    compare_at: tuple[float, ...] = (0.4, 0.6)
    """sparsities of the paired comparison"""
    ablate_at: tuple[float, ...] = (0.4, 0.5, 0.6)
    """sparsities of the ablations"""
    margin: float = 0.02
    """accuracy that near-lossless may lose"""
    top_heads: tuple[float, ...] = ()
    """how many of the most needed heads the sensitivity compresses; below 1: shares of all heads.

    Default: by size
    """
    policies: Annotated[
        tuple[str, ...], tyro.conf.arg(help=f"of the budget analysis, of {', '.join(POLICIES)}")
    ] = (
        "rkv",
        "h2o",
        "random",
    )
    prompt_variants: bool = True
    """budget analysis: each policy also with the other choice of a protected prompt"""
    fixed_budgets: bool = True
    """budget analysis: each policy also with a fixed share of the full-cache text"""
    savings: tuple[float, ...] = (0.2, 0.4, 0.6)
    """of the budget analysis, shares of the full cache's bytes"""
    head_share: float = 0.5
    """budget analysis: share of the mean budget that compressible heads keep under the first gates
    """
    buffer: int | None = None
    """entries between two compactions (h2o, tova: always 1); default: the policies' own"""
    observation: int | None = None
    """observed tokens of rkv, snapkv and rpc; default: the policies' own"""
    extra: int | None = None
    """entries in addition to a budget's share of the text; default: sink + window, or what a policy
    always keeps
    """
    published: str | None = None
    """model whose published numbers are shown; default: --model"""
    measure_only: bool = False
    """no report: share the work of another process of this study"""

    def check(self) -> None:
        super().check()
        for name in ("sparsities", "compare_at", "ablate_at", "savings"):
            values, most = getattr(self, name), 0.99 if name == "savings" else 1.0
            given = f"--{name.replace('_', '-')} {' '.join(f'{value:g}' for value in values)}"
            if not all(0 <= value <= most for value in values):
                raise ValueError(f"{given} contains a number outside 0 to {most:g}")
            if name != "savings" and not self.levels(name):
                raise ValueError(f"{given} contains no sparsity above 0")
        for name, share in (("margin", self.margin), ("head-share", self.head_share)):
            if not 0 <= share <= 1:
                raise ValueError(f"--{name} is {share}: it is a share, from 0 to 1")
        check_whole("--random-draws", self.random_draws, 0, MOST_DRAWS)
        check_positive(self, "buffer", "observation")
        if self.extra is not None and self.extra < MIN_EXTRA:
            raise ValueError(
                f"--extra is {self.extra}: policies need {MIN_EXTRA} or more entries besides the "
                "ratio"
            )
        if not self.gates:
            raise ValueError("--gates needs at least one NAME=FILE")
        _ = self.gates_files, self.ablation_files

    def each(self, name: str) -> list[float]:
        """The values of a field, each once, in the order given."""
        return list(dict.fromkeys(getattr(self, name)))

    def levels(self, name: str) -> tuple[float, ...]:
        """The sparsities above 0 of a field, each once, in the order given."""
        return tuple(value for value in self.each(name) if value > 0)

    def ascending(self, name: str) -> tuple[float, ...]:
        """The sparsities above 0 of a field, each once, from the lowest on."""
        return tuple(sorted(self.levels(name)))

    @property
    def gates_files(self) -> dict[str, list[str]]:
        """Files by the names of ``gates``."""
        return group_by_name(self.gates, "--gates", RESERVED)

    @property
    def ablation_files(self) -> dict[str, list[str]]:
        """Files by the names of ``ablation``."""
        return group_by_name(self.ablation, "--ablation", [*RESERVED, *self.gates_files])


@dataclass(frozen=True)
class Study:
    """The methods, the measurements, and what is asked of them.

    Attributes:
        rankings: what is compared; the first one with every other.
        ablations: variants of the first one, compared with it alone.
        policies: templates of the eviction policies whose budgets are compared.
        top_heads: numbers of heads, the most needed ones, that the sensitivity compresses.
        truth: content of a ground-truth file, to compare gates with.
        published: model whose published numbers are shown.
    """

    rankings: tuple[Ranking, ...]
    ablations: tuple[Ranking, ...]
    measurements: Measurements
    entry_size: EntrySize
    config: StudyConfig
    policies: dict[str, EvictionPolicy]
    top_heads: tuple[int, ...]
    truth: dict[str, Any] | None
    published: str | None

    @property
    def first(self) -> Ranking:
        return self.rankings[0]

    @property
    def variants(self) -> tuple[Ranking, ...]:
        """The first ranking and its ablations."""
        return self.first, *self.ablations

    @property
    def tasks(self) -> list[str]:
        return list(self.measurements.tasks)

    @property
    def sparsities(self) -> tuple[float, ...]:
        """Of the sweep, ascending."""
        return self.config.ascending("sparsities")

    def conditions(
        self, rankings: Iterable[Ranking], sparsities: Iterable[float]
    ) -> ConditionRequests:
        """All seeds of ``rankings`` on every task, one of the ``sparsities`` after the other."""
        for sparsity, ranking, task in product(sparsities, rankings, self.tasks):
            for condition in self.seeds(task, ranking, ranking.allocations(sparsity)):
                yield f"{ranking.name} @ {sparsity:g}", condition

    def seeds(
        self, task: str, ranking: Ranking, allocations: Sequence[HeadAllocation]
    ) -> list[Condition]:
        """A condition per seed of ``ranking``, whose heads are ``allocations``.

        Random draws share the problems, at most one draw per problem; where all have the same heads
        they are one.
        """
        if not ranking.drawn:
            return [Condition(task, allocation) for allocation in allocations]
        draws = allocations[: len(self.measurements.tasks[task].problems)]
        if len(set(draws)) == 1:
            return [Condition(task, draws[0])]
        return [
            Condition(task, allocation, part=(i, len(draws))) for i, allocation in enumerate(draws)
        ]

    def full_condition(self, task: str) -> Condition:
        return Condition(task, HeadAllocation(torch.ones(self.first.shape, dtype=torch.bool)))

    def full(self, task: str) -> Outcome:
        return self.measurements.outcome(self.full_condition(task))

    def runs(self, task: str, ranking: Ranking, sparsity: float) -> list[Outcome]:
        """One outcome per seed; seeds with the same heads have the same one, random draws have one
        together.
        """
        return self.measurements.outcomes(self.seeds(task, ranking, ranking.allocations(sparsity)))

    def sweep(self, task: str, of: Callable[[list[Outcome], Outcome], Any]) -> dict[str, list[Any]]:
        """For each ranking ``of(runs, full)`` at every sparsity."""
        full = self.full(task)
        return {
            ranking.name: [
                of(self.runs(task, ranking, sparsity), full) for sparsity in self.sparsities
            ]
            for ranking in self.rankings
        }


class Analysis(ABC):
    """From conditions to metrics, sentences, tables and plots.

    Metrics are JSON-able; the report is made from them alone, so that every number of it is in
    ``results.json`` too.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    def conditions(self, study: Study) -> ConditionRequests:
        """What must be measured; by default every ranking at every sparsity."""
        return study.conditions(study.rankings, study.config.levels("sparsities"))

    def settings(self, study: Study) -> Metrics:
        """What all tasks have in common."""
        return {"sparsities": list(study.sparsities), "first": study.first.name}

    @abstractmethod
    def task_metrics(self, study: Study, task: str) -> Metrics:
        """The numbers of one task."""

    def metrics(self, study: Study) -> Metrics:
        """All numbers of the analysis: its settings, and ``tasks``."""
        return {
            **self.settings(study),
            "tasks": {task: self.task_metrics(study, task) for task in study.tasks},
        }

    def task_findings(self, task: str, found: Metrics, metrics: Metrics) -> list[str]:
        """Sentences for the top of the report, made from the metrics of a task."""
        return []

    def findings(self, metrics: Metrics) -> list[str]:
        """The sentences of all tasks."""
        return [
            line
            for task, found in metrics["tasks"].items()
            for line in self.task_findings(task, found, metrics)
        ]

    @abstractmethod
    def write_task(
        self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path
    ) -> None:
        """Add the tables and plots of a task; files of plots go to ``folder``."""

    def write(self, metrics: Metrics, page: Page, folder: Path) -> None:
        """Add to the page, below the heading."""
        for task, found in metrics["tasks"].items():
            self.write_task(task, found, metrics, page, folder)

    def plot_file(self, folder: Path, task: str) -> Path:
        return folder / f"{self.name}-{task.replace(':', '_')}.png"

    def add_plot(self, page: Page, folder: Path, task: str, caption: str, *panels: Panel) -> None:
        """Add curves, which go to a file of ``folder``."""
        page.picture(plot_curves(self.plot_file(folder, task), *panels), caption)


FIXED = "fixed budget"
STEPS = 2**14  # ratios are multiples of 1/16384 of the text


def kv_share(
    settings: CacheSettings,
    full: Tensor,
    size: EntrySize,
    lengths: list[tuple[int, int]],
    fixed: bool = False,
) -> float:
    """Bytes in use / bytes of the full cache, both summed over texts of (prompt, all) cached
    tokens.

    ``fixed``: a ratio is of each text's length from its start, not of the tokens read so far.
    """
    prompts, tokens = (torch.tensor(column) for column in zip(*lengths, strict=True))
    held, whole = kv_nbytes(settings, full, size, prompts, tokens, tokens if fixed else None)
    return float(held.sum() / whole.sum())


@dataclass(frozen=True)
class ByteTarget:
    """At most ``share`` of the full cache's bytes, over texts of ``lengths`` (prompt, all) cached
    tokens.

    Each method gives the largest budget that fits, or None; ``full`` is bool ``[layers, KV
    heads]``, the full heads. ``cache``: sinks and window, and how prompts are read.
    """

    share: float
    size: EntrySize
    lengths: list[tuple[int, int]]
    cache: CacheSettings

    def _fits(self, policy: EvictionPolicy | None, full: Tensor, fixed: bool = False) -> bool:
        settings = replace(self.cache, eviction=policy)
        return kv_share(settings, full, self.size, self.lengths, fixed) <= self.share

    def match_ratio(
        self, policy: EvictionPolicy, full: Tensor, fixed: bool = False
    ) -> EvictionPolicy | None:
        """``policy`` with the largest ratio of the text so far or, if ``fixed``, of the text's
        whole length.
        """

        def sized(step: int) -> EvictionPolicy:
            return replace(policy, budget=None, ratio=step / STEPS)

        low, high = 0, STEPS
        if not self._fits(sized(low), full, fixed):
            return None
        if self._fits(sized(high), full, fixed):
            return sized(high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(sized(middle), full, fixed) else (low, middle)
        return sized(low)

    def match_heads(self, order: Order, shape: tuple[int, int]) -> Tensor | None:
        """Full heads when heads are compressed in ``order`` until the rest fits.

        They keep sinks and a window.
        """
        full = torch.ones(shape, dtype=torch.bool)
        for head in order:
            if self._fits(None, full):
                return full
            full[head] = False
        return full if self._fits(None, full) else None


@dataclass(frozen=True)
class Match:
    """A method at a saving; ``heads``: the ranking whose heads are full.

    ``conditions``: one, or the draws that share the problems; empty if nothing fits.
    """

    method: str
    heads: str
    saved: float
    conditions: list[Condition]


def policy_templates(
    names: tuple[str, ...],
    buffer: int | None,
    observation: int | None,
    extra: int,
    sink: int,
    prompt_variants: bool,
) -> dict[str, EvictionPolicy]:
    """Policies of the same sizes, by the name that they have in a table.

    A matching sets their budgets.

    A policy that by default compacts at every token, observes one or keeps no sinks stays so; None:
    its own default. With ``prompt_variants`` each policy also comes with the other choice of
    ``protect_prompt``.
    """
    found = {}
    for name in names:
        sizes: dict[str, Any] = {"ratio": 0.0, "extra": extra}
        defaults = make_policy(name, budget=4096)
        if defaults.buffer > 1 and buffer is not None:
            sizes["buffer"] = buffer
        if defaults.observation > 1 and defaults.uses_queries and observation is not None:
            sizes["R" if hasattr(defaults, "R") else "observation"] = observation
        if defaults.sink:
            sizes["sink"] = min(sink, extra - 1)
        found[name] = policy = make_policy(name, **sizes)
        if prompt_variants:
            other = replace(policy, protect_prompt=not policy.protect_prompt)
            found[f"{name} (prompt {'kept' if other.protect_prompt else 'evictable'})"] = other
    return found


def default_extra(names: tuple[str, ...], observation: int | None, sink: int, ring: int) -> int:
    """``ring``, or what one of the policies always keeps where that is more."""
    defaults = [make_policy(name, budget=4096) for name in names]
    observed = [policy.observation if observation is None else observation for policy in defaults]
    return max(
        [ring, *((sink if of.sink else 0) + n for of, n in zip(defaults, observed, strict=True))]
    )


def matched_methods(study: Study, task: str) -> list[Match]:
    """All methods at every saving.

    Policies alone in all heads with a dynamic and, of those named in the options, a fixed budget,
    for each problem a share of its own full-cache text (RLKV, figure 16); every ranking (its first
    seed, random heads: all draws) with sinks and a window; policies under the heads of the first
    ranking.
    """
    lengths = study.measurements.text_lengths(task, study.full(task))
    cache = study.measurements.tasks[task].settings.cache
    targets = {
        saved: ByteTarget(1 - saved, study.entry_size, lengths, cache)
        for saved in study.config.each("savings")
    }
    return [
        Match(method, heads, saved, conditions)
        for saved, target in targets.items()
        for method, heads, conditions in _matches(study, task, target)
    ]


def _matches(
    study: Study, task: str, target: ByteTarget
) -> Iterator[tuple[str, str, list[Condition]]]:
    shape, first = study.first.shape, study.first
    none_full = torch.zeros(shape, dtype=torch.bool)

    def evicting(full: Tensor, template: EvictionPolicy, fixed: bool = False) -> list[Condition]:
        policy = target.match_ratio(template, full, fixed)
        planned = tuple(tokens for _, tokens in target.lengths) if fixed else None
        return [] if policy is None else [Condition(task, HeadAllocation(full), policy, planned)]

    for name, template in study.policies.items():
        yield name, "", evicting(none_full, template)
        if study.config.fixed_budgets and name in study.config.policies:
            yield f"{name}, {FIXED}", "", evicting(none_full, template, fixed=True)
    for ranking in study.rankings:
        orders = ranking.orders if ranking.drawn else ranking.orders[:1]
        found = [full for order in orders if (full := target.match_heads(order, shape)) is not None]
        conditions = (
            study.seeds(task, ranking, [HeadAllocation(full) for full in found]) if found else []
        )
        yield f"{ranking.name} + sinks + window", ranking.name, conditions
    split = split_heads(first.orders[0], target.share, study.config.head_share, shape)
    for name, template in study.policies.items():
        yield (
            f"{first.name} + {name}",
            first.name,
            [] if split is None else evicting(split, template),
        )


def split_heads(
    order: Order, share: float, head_share: float, shape: tuple[int, int]
) -> Tensor | None:
    """Full heads, bool ``[L, H]``, such that the others may keep about ``head_share * share`` of
    the text each.

    The smaller ``head_share``, the more heads stay full.  None if all heads would have to be
    compressible.
    """
    total, kept = shape[0] * shape[1], head_share * share
    compressible = round(total * (1 - share) / (1 - kept))
    if compressible >= total:
        return None
    full = torch.ones(shape, dtype=torch.bool)
    for head in order[:compressible]:
        full[head] = False
    return full


def study_tasks(
    config: TaskOptions,
    cache: CacheSettings,
    gates: Iterable[HeadGates],
    tokenizer: PreTrainedTokenizerBase,
) -> list[StudyTask]:
    """The tasks of ``config``, rendered with its template or the one that all ``gates`` were
    trained with.
    """
    prepared = []
    for task, loaded in config.problems(config.chosen_template(gates)):
        sampling = SamplingParams(config.token_limit(task))
        settings = RunSettings(cache, sampling, batch_size=config.batch_size, rule=config.rule)
        problems = render_problems(task, loaded, tokenizer)
        prompts = tokenizer(
            [problem.prompt for problem in problems], add_special_tokens=False
        ).input_ids
        prepared.append(StudyTask(task.name, problems, [len(ids) for ids in prompts], settings))
    return prepared
