"""Accuracy at matched bytes: which heads stay full x what the others keep, at the same bytes of KV.

A *saving* is the share of the full cache's bytes that must not be held at the end of a text.  Every method gets the
largest budget that holds at most the rest, computed over the texts of the full-cache run
(:mod:`rlkv.evaluation.stats.matching`); what its own texts held is in its row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlkv.cache import CacheSettings as CacheSizes
from rlkv.cache.accounting import EntrySize
from rlkv.evaluation.heads.measure import CacheSettings, Measurement, measure
from rlkv.evaluation.run.fingerprint import library_facts, model_facts
from rlkv.evaluation.stats.error_modes import RepetitionRule, count_modes
from rlkv.evaluation.stats.intervals import wilson_interval
from rlkv.evaluation.stats.matching import kv_share, match_compressible, match_ratio
from rlkv.eviction import make_policy
from rlkv.eviction.base import EvictionPolicy
from rlkv.gates.allocation import HeadAllocation
from rlkv.models.prompts import render_prompt
from rlkv.models.shape import ModelShape
from rlkv.utils.store import open_store

Order = list[tuple[int, int]]
FULL = "full cache"
WINDOW = "sinks + window"


@dataclass(frozen=True)
class Method:
    """Heads of which ranking are full, and what the others keep (None: sinks and a window); ``heads`` "": none."""

    heads: str
    policy: str | None

    @property
    def name(self) -> str:
        return " + ".join(part for part in (self.heads and f"{self.heads} heads", self.policy or WINDOW) if part)


@dataclass(frozen=True)
class StudyCell:
    """A method at a saving; ``full`` bool ``[L, H]``, ``eviction`` with its budget; both None: it cannot be done."""

    method: Method
    saved: float
    full: Tensor | None
    eviction: EvictionPolicy | None

    @property
    def key(self) -> tuple[str, float]:
        return self.method.name, self.saved


def policy_templates(
    names: list[str], buffer: int, observation: int, extra: int, prompt_variants: bool = False
) -> dict[str, EvictionPolicy]:
    """Policies of the same sizes, by the name that they have in a table; a matching sets their budgets.

    Args:
        buffer, observation, extra: as of :class:`EvictionPolicy`; a policy that by default compacts at every token,
            observes one or keeps no sinks stays so.
        prompt_variants: each policy also with the other choice of ``protect_prompt``.

    Raises:
        ValueError: for an unknown policy, or fewer than 5 ``extra`` entries.
    """
    if extra < 5:
        raise ValueError(f"--extra is {extra}: policies need 5 or more entries beside the ratio")
    found = {}
    for name in names:
        sizes: dict[str, Any] = {"ratio": 0.0, "extra": extra}
        defaults = make_policy(name, budget=4096)
        if defaults.buffer > 1:
            sizes["buffer"] = buffer
        if defaults.observation > 1 and defaults.uses_queries:
            sizes["R" if hasattr(defaults, "R") else "observation"] = observation
        if defaults.sink:
            sizes["sink"] = min(4, extra - 1)
        policy = make_policy(name, **sizes)
        found[name] = policy
        if prompt_variants:
            other = make_policy(name, **sizes, protect_prompt=not policy.protect_prompt)
            found[f"{name} (prompt {'kept' if other.protect_prompt else 'evictable'})"] = other
    return found


@dataclass(frozen=True)
class StudyPlan:
    """What is compared.

    Attributes:
        orders: for each ranking of heads, (layer, head) from the first to compress; policies run under the first one.
        policies: templates, whose ratio is set by the matching.
        savings: shares of the full cache's bytes.
        head_share: under a ranking, compressible heads with a policy keep this share of what all heads together may
            keep on average: the smaller it is, the more heads stay full.
    """

    orders: dict[str, Order]
    policies: dict[str, EvictionPolicy]
    savings: list[float]
    head_share: float

    def __post_init__(self) -> None:
        if not 0 <= self.head_share <= 1:
            raise ValueError(f"head_share is {self.head_share}: it is a share, from 0 to 1")

    def describe(self) -> dict[str, Any]:
        """All that the cells depend on beside model and texts."""
        policies = {name: policy.describe() for name, policy in self.policies.items()}
        return {"orders": self.orders, "policies": policies, "savings": self.savings, "head_share": self.head_share}

    def cells(
        self, sizes: CacheSizes, shape: tuple[int, int], size: EntrySize, lengths: list[tuple[int, int]]
    ) -> Iterator[StudyCell]:
        """All cells, at every saving: policies alone, rankings with sinks and a window, policies under the first."""
        none_full = torch.zeros(shape, dtype=torch.bool)
        for saved in self.savings:
            share = 1 - saved
            for name, policy in self.policies.items():
                matched = match_ratio(policy, share, none_full, size, lengths)
                yield StudyCell(Method("", name), saved, None if matched is None else none_full, matched)
            for heads, order in self.orders.items():
                full = match_compressible(sizes, share, order, shape, size, lengths)
                yield StudyCell(Method(heads, None), saved, full, None)
            for heads, order in list(self.orders.items())[:1]:
                full = self._split(order, share, shape)
                for name, policy in self.policies.items():
                    matched = None if full is None else match_ratio(policy, share, full, size, lengths)
                    yield StudyCell(Method(heads, name), saved, None if matched is None else full, matched)

    def _split(self, order: Order, share: float, shape: tuple[int, int]) -> Tensor | None:
        """Full heads such that the others may keep about ``head_share * share`` of the text each."""
        total, kept = shape[0] * shape[1], self.head_share * share
        compressible = round(total * (1 - share) / (1 - kept))
        if compressible >= total:
            return None
        full = torch.ones(shape, dtype=torch.bool)
        for layer, head in order[:compressible]:
            full[layer, head] = False
        return full


def cached_lengths(
    tokenizer: PreTrainedTokenizerBase, problems: list[dict[str, str]], done: Measurement, template: str
) -> list[tuple[int, int]]:
    """(prompt, all) tokens that the cache holds when a completion ends: its last token is never fed."""
    prompts = [render_prompt(tokenizer, p["problem"], template) for p in problems]
    counts = [len(ids) for ids in tokenizer(prompts, add_special_tokens=False).input_ids]
    return [(n, n + len(c.token_ids) - 1) for n, c in zip(counts, done.completions, strict=True)]


def run_study(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[dict[str, str]],
    plan: StudyPlan,
    settings: CacheSettings,
    rule: RepetitionRule,
    rows_file: Path,
    fingerprint: dict[str, Any],
    on_row: Callable[[int, int, dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Measure every cell; rows that ``rows_file`` holds from an earlier run are not measured again.

    Returns:
        Rows of method, heads, policy, saved, accuracy, interval, n, kv_share, mean_output_tokens, error modes (among
        the problems that the full cache solves), correct (one character per problem), full heads, options, seconds.

    Raises:
        ValueError: if ``rows_file`` was written with other settings, weights, code or libraries.
    """
    size = EntrySize.of(model)
    sizes = CacheSizes(settings.sink, settings.window, settings.prefill)
    model_shape = ModelShape.from_config(model.config)
    shape = (model_shape.num_layers, model_shape.num_kv_heads)
    facts = {
        **fingerprint,
        **asdict(settings),
        "model_state": model_facts(model),
        "libraries": library_facts(),
        "rule": asdict(rule),
        **plan.describe(),
    }
    with open_store(rows_file, facts, ("method", "saved")) as log:
        done = {(row["method"], row["saved"]): row for row in log.rows}
        if (FULL, 0.0) not in done:
            everything = torch.ones(shape, dtype=torch.bool)
            start = time.perf_counter()
            found = measure(model, tokenizer, problems, HeadAllocation(everything), settings)
            every = StudyCell(Method("", FULL), 0.0, everything, None)
            reference = _row(every, found, found.correct, 1.0, rule, time.perf_counter() - start)
            reference["lengths"] = cached_lengths(tokenizer, problems, found, settings.template)
            log.append(reference)
            done[FULL, 0.0] = reference
        reference = done[FULL, 0.0]
        solved = [character == "1" for character in reference["correct"]]
        lengths = [(int(prompt), int(tokens)) for prompt, tokens in reference["lengths"]]
        rows = [reference]
        cells = list(plan.cells(sizes, shape, size, lengths))
        for number, cell in enumerate(cells):
            if cell.key not in done:
                start = time.perf_counter()
                if cell.full is None:
                    row = {"method": cell.method.name, "saved": cell.saved, "accuracy": None, **_options(cell)}
                else:
                    found = measure(model, tokenizer, problems, HeadAllocation(cell.full), settings, cell.eviction)
                    seconds = time.perf_counter() - start
                    own = CacheSizes(sizes.sink, sizes.window, sizes.prefill, cell.eviction)
                    share = kv_share(
                        own, cell.full, size, cached_lengths(tokenizer, problems, found, settings.template)
                    )
                    row = _row(cell, found, solved, share, rule, seconds)
                log.append(row)
                done[cell.key] = row
            rows.append(done[cell.key])
            on_row(number + 1, len(cells), rows[-1])
    return rows


def _options(cell: StudyCell) -> dict[str, Any]:
    return {
        "heads": cell.method.heads,
        "policy": cell.method.policy,
        "full_heads": None if cell.full is None else cell.full.int().flatten().tolist(),
        "options": None if cell.eviction is None else cell.eviction.describe(),
    }


def _row(
    cell: StudyCell, found: Measurement, solved: list[bool], share: float, rule: RepetitionRule, seconds: float
) -> dict[str, Any]:
    n = len(found.correct)
    low, high = wilson_interval(sum(found.correct), n)
    return {
        "method": cell.method.policy if cell.method.policy == FULL else cell.method.name,
        "saved": cell.saved,
        "accuracy": found.accuracy,
        "ci_low": low,
        "ci_high": high,
        "n": n,
        "kv_share": share,
        "mean_output_tokens": sum(len(c.token_ids) for c in found.completions) / n,
        **count_modes(found.completions, found.correct, solved, rule),
        "correct": "".join("1" if right else "0" for right in found.correct),
        "seconds": round(seconds, 2),
        **_options(cell),
    }
