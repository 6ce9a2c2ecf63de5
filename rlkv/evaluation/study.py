"""A study: its options, what is loaded from them, and what is measured and resumed.

The rows of a condition are in one file, from which a study that was stopped goes on.  Of several
processes each takes conditions that no other one is at.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlkv.cache import CacheSettings
from rlkv.cache.accounting import KVSizes
from rlkv.evaluation.decoders import TransformersDecoder
from rlkv.evaluation.evaluate import TaskOptions
from rlkv.evaluation.measurements import (
    RESERVED,
    Condition,
    GroundTruth,
    Outcome,
    Ranking,
    Sizes,
    Texts,
    gates_rankings,
    group_by_name,
    join,
    kv_shares,
    read_truth,
    reference_rankings,
    split_heads,
)
from rlkv.evaluation.published import published_name
from rlkv.evaluation.runner import (
    Problem,
    RunSettings,
    longest_text,
    render_problems,
    run_method,
)
from rlkv.eviction import POLICIES, make_policy
from rlkv.eviction.base import EvictionPolicy
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.options import check_least
from rlkv.models.shape import ModelShape, max_positions
from rlkv.rollout.base import SamplingParams
from rlkv.utils.numbers import check_whole
from rlkv.utils.progress import ProgressBar, progress_bar
from rlkv.utils.store import StoreInUseError

MIN_EXTRA = 5
MOST_DRAWS = 10_000
FIXED = "fixed budget"
POLL_SECONDS = 2.0  # between two looks at a condition that another process measures
Item = TypeVar("Item")
# heads that the sensitivity compresses by default: numbers in a small model, shares in a large one
FEW_HEADS = 64
NUMBERS = (1, 2, 3, 4, 6, 8)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2)

# titles by name, in the order of the report
ANALYSES = {
    "sweep": "Accuracy against sparsity",
    "comparison": "Paired comparison",
    "threshold": "Near-lossless sparsity",
    "sensitivity": "Head sensitivity",
    "modes": "Error modes",
    "lengths": "Lengths and repetition",
    "budget": "Eviction at matched bytes",
    "gates": "Gates",
    "ablations": "Training ablations",
    "acceptance": "Acceptance of drafts",
}
# only by name: it serves another question, and not all models
BY_NAME = ("acceptance",)

# --- options


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
    """sweep comparison threshold sensitivity modes lengths budget gates ablations acceptance;
    default: all that can be done but acceptance, which is measured by name only
    """
    oracle: Path | None = None
    """ground-truth JSON with a measured elimination order"""
    random_draws: int = 10
    """random orders of the heads, which share the problems; 0: no random heads"""
    sparsities: tuple[float, ...] = (0.2, 0.4, 0.5, 0.6, 0.8)
    """of the sweep, measured in this order, and of the acceptance"""
    sizes: tuple[str, ...] = ()
    """SINK+WINDOW or prompt+WINDOW, such as 4+16 16+64 prompt+64: the sweep also measures the first
    method with them, and gives their bytes; the acceptance all methods, by default with windows of
    64, 256 and 512
    """
    compare_at: tuple[float, ...] = (0.4, 0.6)
    """sparsities of the paired comparison and of the ablations"""
    margin: float = 0.02
    """accuracy that near-lossless may lose"""
    top_heads: tuple[float, ...] = ()
    """how many of the most needed heads the sensitivity compresses; below 1: shares of all heads.

    Default: by size
    """
    policies: Annotated[
        tuple[str, ...], tyro.conf.arg(help=f"of the budget analysis, of {', '.join(POLICIES)}")
    ] = ("rkv", "h2o", "random")
    prompt_variants: bool = True
    """budget analysis: each policy also with the other choice of a protected prompt"""
    fixed_budgets: bool = True
    """budget analysis: each policy also with a fixed share of the full-cache text"""
    savings: tuple[float, ...] = (0.2, 0.4, 0.6)
    """of the budget analysis, shares of the full cache's bytes in the layers with gates"""
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
    measure_only: bool = False
    """no report: share the work of another process of this study"""

    def check(self) -> None:
        super().check()
        for name in ("sparsities", "compare_at", "savings"):
            values = getattr(self, name)
            most = 0.99 if name == "savings" else 1.0
            given = f"--{name.replace('_', '-')} {' '.join(f'{value:g}' for value in values)}"
            if not all(0 <= value <= most for value in values):
                raise ValueError(f"{given} contains a number outside 0 to {most:g}")
            if not self.levels(name):
                raise ValueError(f"{given} contains no number above 0")
        for name, share in (("margin", self.margin), ("head-share", self.head_share)):
            if not 0 <= share <= 1:
                raise ValueError(f"--{name} is {share}: it is a share, from 0 to 1")
        check_whole("--random-draws", self.random_draws, 0, MOST_DRAWS)
        check_least(self, 1, "buffer", "observation")
        if self.extra is not None and self.extra < MIN_EXTRA:
            raise ValueError(
                f"--extra is {self.extra}: policies need {MIN_EXTRA} or more entries besides the "
                "ratio"
            )
        if not self.gates:
            raise ValueError("--gates needs at least one NAME=FILE")
        _ = (self.gates_files, self.ablation_files, self.parsed_sizes)
        for analysis in self.analyses:
            if analysis not in ANALYSES:
                raise ValueError(
                    f"--analyses: there is no analysis {analysis!r}: choose from "
                    f"{', '.join(ANALYSES)}"
                )
        if "ablations" in self.analyses and not self.ablation:
            raise ValueError(
                "--analyses names ablations, but there are no gates for them: add --ablation "
                "NAME=FILE"
            )

    @property
    def chosen_analyses(self) -> list[str]:
        """Return the requested analyses, or the default ones, in the order of the report."""
        possible = [name for name in ANALYSES if self.ablation or name != "ablations"]
        default = [name for name in possible if name not in BY_NAME]
        return [name for name in possible if name in (self.analyses or default)]

    def levels(self, name: str) -> tuple[float, ...]:
        """Return the values above 0 of a field, each once, in the order given."""
        return tuple(value for value in dict.fromkeys(getattr(self, name)) if value > 0)

    def ascending(self, name: str) -> tuple[float, ...]:
        """Return the values above 0 of a field, each once, from the lowest on."""
        return tuple(sorted(self.levels(name)))

    @property
    def gates_files(self) -> dict[str, list[str]]:
        """Return files by the names of ``gates``."""
        return group_by_name(self.gates, "--gates", RESERVED)

    @property
    def ablation_files(self) -> dict[str, list[str]]:
        """Return files by the names of ``ablation``."""
        return group_by_name(self.ablation, "--ablation", [*RESERVED, *self.gates_files])

    @property
    def parsed_sizes(self) -> list[Sizes]:
        """Return the sinks and windows of ``sizes``, each once."""
        return list(dict.fromkeys(map(Sizes.parse, self.sizes)))


# --- what is loaded from them, and measured


@dataclass(frozen=True)
class Match:
    """A method at a saving; ``heads``: the ranking whose heads are full.

    ``conditions``: one, or the draws that share the problems; empty if nothing fits.
    """

    method: str
    heads: str
    saved: float
    conditions: list[Condition]


@dataclass(frozen=True, eq=False)
class Study:
    """The methods, the tasks that they are measured on, and what was measured.

    Attributes:
        rankings: what is compared; the first one with every other.
        ablations: variants of the first one, compared with it alone.
        policies: templates of the eviction policies whose budgets are compared.
        top_heads: numbers of heads, the most needed ones, that the sensitivity compresses.
        truth: measured elimination order, to compare gates with.
        published: model whose published numbers are shown.
        problems, settings: of each task, by its name.
        labels: what each condition was requested as.
        outcomes: of the conditions that were measured.
        accepted: of each task, how many positions of a problem's text a draft got right, by the
            keys of the problem and the condition (:mod:`rlkv.evaluation.acceptance`).
    """

    config: StudyConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rankings: tuple[Ranking, ...]
    ablations: tuple[Ranking, ...]
    policies: dict[str, EvictionPolicy]
    top_heads: tuple[int, ...]
    truth: GroundTruth | None
    published: str | None
    problems: dict[str, list[Problem]]
    settings: dict[str, RunSettings]
    labels: dict[Condition, list[str]] = field(default_factory=dict)
    outcomes: dict[Condition, Outcome] = field(default_factory=dict)
    accepted: dict[str, dict[tuple[str, str], int]] = field(default_factory=dict)
    _matches: dict[str, list[Match]] = field(default_factory=dict)

    @property
    def first(self) -> Ranking:
        return self.rankings[0]

    @property
    def tasks(self) -> list[str]:
        return list(self.problems)

    @property
    def cache(self) -> CacheSettings:
        """Return what compressible heads keep in all tasks, where a condition does not say."""
        return self.settings[self.tasks[0]].cache

    @property
    def sparsities(self) -> tuple[float, ...]:
        """Return the sparsities of the sweep, ascending."""
        return self.config.ascending("sparsities")

    def measure(self, title: str, requests: Iterable[tuple[str, Condition]]) -> None:
        """Measure the (label, condition) ``requests`` that were not measured yet."""
        for label, condition in dict.fromkeys(requests):
            self.labels.setdefault(condition, []).append(label)
        waiting = [condition for condition in self.labels if condition not in self.outcomes]
        total = sum(len(self._share_of(condition)) for condition in waiting)
        with progress_bar(title, "problems", total) as bar:

            def decode(condition: Condition) -> None:
                self.outcomes[condition] = self._decode(condition, bar)

            take_turns(waiting, decode)

    def _share_of(self, condition: Condition) -> list[Problem]:
        first, step = condition.part or (0, 1)
        return self.problems[condition.task][first::step]

    def _decode(self, condition: Condition, bar: ProgressBar) -> Outcome:
        task = condition.task
        title = f"{task}: {self.labels[condition][0]}"
        before = bar.done
        is_first = True

        def on_rows(done: int, _: int, accuracy: float) -> None:
            nonlocal is_first
            if is_first:
                bar.resume(done)
                is_first = False
            bar.update(before + done, title=title, note=f"accuracy {accuracy:.3f}")

        sizes = {} if condition.sizes is None else condition.sizes._asdict()
        cache = replace(self.cache, **sizes).with_policy(condition.policy)
        decoder = TransformersDecoder(
            self.model, self.tokenizer, condition.allocation, cache, self.config.batch_size
        )
        rows = run_method(
            decoder,
            self._share_of(condition),
            replace(self.settings[task], cache=cache, planned=condition.planned),
            self.config.output_dir / "rows" / f"rows-{condition.key}.jsonl",
            on_rows,
        )
        return Outcome.of_rows(condition.key, rows)

    def describe(self) -> list[dict[str, Any]]:
        """Return every condition that was measured, for ``results.json``."""
        found = []
        for condition, outcome in self.outcomes.items():
            described = {
                "task": condition.task,
                "requested_as": self.labels[condition],
                "rows": f"rows-{condition.key}.jsonl",
                "full_heads": condition.allocation.full.int().tolist(),
                **condition.describe(),
                "accuracy": float(outcome.correct.mean()),
                "n": outcome.correct.size,
                **kv_shares([outcome]),
                "seconds": round(outcome.seconds, 2),
            }
            found.append(described)
        return found

    # what analyses need

    def requests(self, analyses: Sequence[str]) -> Iterator[tuple[str, Condition]]:
        """Yield what the analyses need, with a label, in the order in which it is measured."""
        config = self.config
        swept = config.levels("sparsities")
        if set(analyses) & {"sweep", "threshold", "modes", "lengths"}:
            yield from self._at_sparsities(self.rankings, swept)
        if "sweep" in analyses:
            for sparsity, sizes, task in product(swept, config.parsed_sizes, self.tasks):
                for condition in self.sized(task, sizes, sparsity):
                    yield f"{self.first.name}, {sizes} @ {sparsity:g}", condition
        if "comparison" in analyses:
            yield from self._at_sparsities(self.rankings, config.levels("compare_at"))
        if "sensitivity" in analyses:
            for ranking, task, heads in product(self.rankings, self.tasks, self.top_heads):
                for condition in self.seeds(task, ranking, ranking.without_top(heads)):
                    yield f"{ranking.name}, top {heads} gone", condition
        if "budget" in analyses:
            for match in chain.from_iterable(map(self.matches, self.tasks)):
                for condition in match.conditions:
                    yield f"{match.method}, {match.saved:.0%} saved", condition
        if "ablations" in analyses:
            variants = (self.first, *self.ablations)
            yield from self._at_sparsities(variants, config.levels("compare_at"))

    def _at_sparsities(
        self, rankings: Sequence[Ranking], sparsities: Sequence[float]
    ) -> Iterator[tuple[str, Condition]]:
        """Yield all seeds of ``rankings`` on every task, one sparsity after the other."""
        for sparsity, ranking, task in product(sparsities, rankings, self.tasks):
            for condition in self.at_sparsity(task, ranking, sparsity):
                yield f"{ranking.name} @ {sparsity:g}", condition

    # conditions of a task, and their outcomes

    def full_condition(self, task: str) -> Condition:
        return Condition(task, self.first.allocations(0.0)[0])

    def seeds(
        self, task: str, ranking: Ranking, allocations: Sequence[HeadAllocation]
    ) -> list[Condition]:
        """Return a condition per seed of ``ranking``, whose heads are ``allocations``.

        Random draws share the problems, at most one draw per problem; where all have the same heads
        they are one.
        """
        if not ranking.drawn:
            return [Condition(task, allocation) for allocation in allocations]
        draws = allocations[: len(self.problems[task])]
        if len(set(draws)) == 1:
            return [Condition(task, draws[0])]
        parts = enumerate(draws)
        return [Condition(task, allocation, part=(i, len(draws))) for i, allocation in parts]

    def at_sparsity(
        self, task: str, ranking: Ranking, sparsity: float, sizes: Sizes | None = None
    ) -> list[Condition]:
        """Return a condition per seed, or per draw; ``sizes`` in place of the task's own."""
        seeds = self.seeds(task, ranking, ranking.allocations(sparsity))
        return [replace(condition, sizes=sizes) for condition in seeds]

    def sized(self, task: str, sizes: Sizes, sparsity: float) -> list[Condition]:
        """Return a condition per seed of the first ranking with other sinks and another window."""
        own = Sizes(self.cache.sink, self.cache.window, self.cache.protect_prompt)
        return self.at_sparsity(task, self.first, sparsity, None if sizes == own else sizes)

    def outcomes_of(self, conditions: Sequence[Condition]) -> list[Outcome]:
        """Return an outcome per condition; a single one if they are parts of a task."""
        found = [self.outcomes[condition] for condition in conditions]
        return found if conditions[0].part is None else [join(found)]

    def full(self, task: str) -> Outcome:
        return self.outcomes[self.full_condition(task)]

    def runs(self, task: str, ranking: Ranking, sparsity: float) -> list[Outcome]:
        """Return an outcome per seed; random draws have one together."""
        return self.outcomes_of(self.at_sparsity(task, ranking, sparsity))

    def sweep(self, task: str, of: Callable[[list[Outcome], Outcome], Any]) -> dict[str, list[Any]]:
        """Return ``of(runs, full)`` at every sparsity, by ranking."""
        full = self.full(task)
        found = {}
        for ranking in self.rankings:
            by_sparsity = [of(self.runs(task, ranking, s), full) for s in self.sparsities]
            found[ranking.name] = by_sparsity
        return found

    def full_texts(self, task: str) -> Texts:
        """Return the texts of the full cache, whose bytes other methods are compared with."""
        lengths = []
        for problem, answer in zip(self.problems[task], self.full(task).answers, strict=True):
            prompt = len(problem.prompt_ids)
            lengths.append((prompt, prompt + len(answer.tokens) - 1))  # the last one is never fed
        return Texts(lengths, KVSizes.of(self.model), self.cache)

    def matches(self, task: str) -> list[Match]:
        """Return :func:`matched_methods`, which walks all texts for each budget, made once."""
        if task not in self._matches:
            self._matches[task] = matched_methods(self, task)
        return self._matches[task]

    def plot_file(self, analysis: str, task: str) -> Path:
        return self.config.output_dir / f"{analysis}-{task.replace(':', '_')}.png"


def take_turns(items: Iterable[Item], work: Callable[[Item], None]) -> None:
    """Do the work of each item; those whose files other processes are writing come later."""
    waiting = deque(items)
    in_use = 0  # items in a row that other processes are at
    while waiting:
        item = waiting.popleft()
        try:
            work(item)
        except StoreInUseError:
            waiting.append(item)
            in_use += 1
            if in_use >= len(waiting):  # no other item is free
                time.sleep(POLL_SECONDS)
            continue
        in_use = 0


def load_study(config: StudyConfig) -> Study:
    """Read and check everything that the options name, before anything is written."""
    methods = gates_rankings(config.gates_files)
    ablations = gates_rankings(config.ablation_files)
    named: dict[str, HeadGates] = {}
    for of in (*methods, *ablations):
        named.update(zip(of.files, of.gates, strict=True))
    cache = config.cache_settings(named)
    extra, policies = policy_templates(config, cache)
    config = replace(config, extra=extra)
    loaded = config.problems(config.chosen_template(named.values()))
    model, tokenizer = config.load()
    for gates in named.values():
        gates.check_model(model.config)
    shape = ModelShape.from_config(model.config)
    heads = methods[0].heads
    # what the model cannot be compressed for is said before any text is decoded
    some = methods[0].allocations(max(config.sparsities))[0]
    used = policies.values() if "budget" in config.chosen_analyses else ()
    for policy in (None, *used):
        TransformersDecoder(model, tokenizer, some, cache.with_policy(policy), config.batch_size)
    for sizes in config.parsed_sizes if "sweep" in config.chosen_analyses else ():
        replace(cache, **sizes._asdict()).check_positions(max_positions(model.config))
    truth = None if config.oracle is None else read_truth(config.oracle, shape, heads)
    problems = {}
    settings = {}
    for task, drawn in loaded:
        sampling = SamplingParams(config.token_limit(task))
        problems[task.name] = render_problems(task, drawn, tokenizer)
        longest_text(task.name, problems[task.name], sampling, max_positions(model.config))
        settings[task.name] = RunSettings(
            cache, sampling, batch_size=config.batch_size, rule=config.rule
        )
    return Study(
        config=config,
        model=model,
        tokenizer=tokenizer,
        rankings=(*methods, *reference_rankings(shape, truth, config.random_draws, heads)),
        ablations=tuple(ablations),
        policies=policies,
        top_heads=top_heads(config.top_heads, methods[0].num_heads),
        truth=truth,
        published=published_name(config.model, config.data),
        problems=problems,
        settings=settings,
    )


def top_heads(values: tuple[float, ...], total: int) -> tuple[int, ...]:
    """Return how many of ``total`` heads to compress from the top.

    values: whole numbers, or shares of all heads if below 1; empty: 1 to 8 heads of a small model,
    1% to 20% of a large one.
    """
    found = set()
    for value in values or (NUMBERS if total <= FEW_HEADS else SHARES):
        if values and not (0 < value < 1 or value in range(1, total + 1)):
            raise ValueError(
                f"--top-heads {value:g} is neither a number of heads from 1 to {total} nor a share "
                "below 1"
            )
        found.add(int(value) if value >= 1 else max(1, round(value * total)))
    return tuple(sorted(number for number in found if values or number < total))


def policy_templates(
    config: StudyConfig, cache: CacheSettings
) -> tuple[int, dict[str, EvictionPolicy]]:
    """Return the ``extra`` of all policies, and these by the names that they have in a table.

    The default of ``extra``: sinks + window, or what one of the policies always keeps where that is
    more.  A matching sets the budgets.  A policy that by default compacts at every token, observes
    one or keeps no sinks stays so.  With ``prompt_variants`` each policy also comes with the other
    choice of ``protect_prompt``.
    """
    by_default = {name: make_policy(name, budget=4096) for name in config.policies}
    extra = config.extra
    if extra is None:
        extra = cache.sink + cache.window
        for default in by_default.values():
            observed = default.observation if config.observation is None else config.observation
            extra = max(extra, (cache.sink if default.sink else 0) + observed)
    found = {}
    for name, default in by_default.items():
        sizes: dict[str, Any] = {"ratio": 0.0, "extra": extra}
        if default.buffer > 1 and config.buffer is not None:
            sizes["buffer"] = config.buffer
        observes = default.observation > 1 and default.uses_queries
        if observes and config.observation is not None:
            sizes["R" if hasattr(default, "R") else "observation"] = config.observation
        if default.sink:
            sizes["sink"] = min(cache.sink, extra - 1)
        policy = make_policy(name, **sizes)
        found[name] = policy
        if config.prompt_variants:
            protects = not policy.protect_prompt
            sink = 0 if protects else policy.sink
            other = replace(policy, protect_prompt=protects, sink=sink)
            found[f"{name} (prompt {'kept' if other.protect_prompt else 'evictable'})"] = other
    return extra, found


# --- the same bytes


def matched_methods(study: Study, task: str) -> list[Match]:
    """Return all methods at every saving.

    A saving is the share of the full cache's bytes that must not be held at the end of a text, in
    the layers with gates.
    Policies alone in all heads with a dynamic and, of those named in the options, a fixed budget,
    for each problem a share of its own full-cache text (RLKV, figure 16); every ranking (its first
    seed, random heads: all draws) with sinks and a window; policies under the heads of the first
    ranking.
    """
    config = study.config
    first = study.first
    texts = study.full_texts(task)
    lengths = tuple(tokens for _, tokens in texts.lengths)
    none_full = first.allocations(1.0)[0].full

    def evicting(
        share: float, template: EvictionPolicy, full: Tensor | None, fixed: bool = False
    ) -> list[Condition]:
        if full is None:
            return []
        policy = texts.match_ratio(share, template, full, fixed)
        if policy is None:
            return []
        allocation = HeadAllocation(full, first.heads)
        return [Condition(task, allocation, policy, lengths if fixed else None)]

    found = []
    for saved in config.levels("savings"):
        share = 1 - saved
        for name, template in study.policies.items():
            found.append(Match(name, "", saved, evicting(share, template, none_full)))
            if config.fixed_budgets and name in config.policies:
                conditions = evicting(share, template, none_full, fixed=True)
                found.append(Match(f"{name}, {FIXED}", "", saved, conditions))
        for ranking in study.rankings:
            orders = ranking.orders if ranking.drawn else ranking.orders[:1]
            kept = [texts.match_heads(share, order, first.shape) for order in orders]
            allocations = [HeadAllocation(full, first.heads) for full in kept if full is not None]
            conditions = study.seeds(task, ranking, allocations) if allocations else []
            found.append(Match(f"{ranking.name} + sinks + window", ranking.name, saved, conditions))
        split = split_heads(first.orders[0], share, config.head_share, first.shape)
        for name, template in study.policies.items():
            conditions = evicting(share, template, split)
            found.append(Match(f"{first.name} + {name}", first.name, saved, conditions))
    return found
