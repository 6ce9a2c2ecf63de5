"""The analysis of drafts: how often a model with compressed heads picks the full model's token.

Lossless speculation drafts with compressed heads, and the full model, which writes all keys and
values (:mod:`rlkv.cache.drafts`), verifies.  The texts are those of the full cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from rlkv.attention import LocalSizes
from rlkv.cache.drafts import draft_cache, drafting
from rlkv.evaluation.decoders import facts_of
from rlkv.evaluation.measurements import Answer, Condition, Ranking, Sizes
from rlkv.evaluation.metrics import ratio_with_interval
from rlkv.evaluation.report import (
    INTERVALS,
    Metrics,
    Page,
    Panel,
    curves_of,
    estimate,
    levels,
    plot_curves,
    table_rows,
)
from rlkv.evaluation.runner import Problem
from rlkv.evaluation.study import Study, take_turns
from rlkv.inference.compress import check_servable
from rlkv.models.layout import CHUNKED, FULL, SLIDING, Layout
from rlkv.models.loading import cache_argument
from rlkv.utils.progress import ProgressBar, progress_bar
from rlkv.utils.runtime import commit, digest_of, hardware_line, library_facts
from rlkv.utils.store import Row, open_store

# tokens that are drafted at once: bounds their logits, 160 MB with a vocabulary of 150,000
CHUNK = 256
WINDOWS = (64, 256, 512)  # of drafts, without --sizes
DRAFTED = {FULL, SLIDING, CHUNKED}  # kinds of layers
KEY = ("key", "condition")

# What a step of Llama-3.1-8B in 16 bit takes on an H100, for a speed-up that is computed.
SHAPE = "Llama-3.1-8B in 16 bit, 32 texts of 8,192 tokens on an H100"
ROWS = 32
LENGTH = 8192
WEIGHT_BYTES = 15.0e9  # 16.1e9 less the embedding table
KV_BYTES = 131_072  # of a token
PARAMETERS = 8e9
BYTES_PER_SECOND = 0.8 * 3.35e12
FLOPS = 600e12
DRAFT_OVERHEAD = 0.02  # sampling and launches of a drafted token, in steps of the full model
VERIFY_OVERHEAD = 0.03
MOST_DRAFTED = 16  # tokens of a round


# --- the two streams


def check_drafts(model: PreTrainedModel) -> None:
    """Raise ValueError if the drafts of a model cannot be computed, before any text is read."""
    layout = check_servable(model)
    if {layer.kind for layer in layout.layers} - DRAFTED:
        raise ValueError(
            f"--analyses acceptance drafts over keys and values that the full model has written, "
            f"and {layout.model_type} has {layout.describe()}: it takes models in which every "
            "layer has full, sliding-window or chunked attention of its own"
        )
    none_full = torch.zeros(len(layout.layers), max(layout.heads), dtype=torch.bool)
    count_accepted(model, [0], [0, 0], [(none_full, LocalSizes(0, 1))])


@torch.inference_mode()
def count_accepted(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    drafts: Sequence[tuple[Tensor, LocalSizes]],
) -> list[int]:
    """Count how often each draft picks the token that the full model picks.

    The full model reads the text once, a part of it at a time, and the drafts of each part follow.

    Args:
        token_ids: the answer.  Its first token comes from reading the prompt and is not drafted,
            so that there are ``len(token_ids) - 1`` positions.
        drafts: which heads are full, bool ``[layers, KV heads]``, and what the others read.

    Returns:
        A number of positions for each draft.
    """
    heads = Layout.from_config(model.config).heads
    ids = torch.tensor([[*prompt_ids, *token_ids[:-1]]], device=model.device)
    counts = [0] * len(drafts)
    verified = DynamicCache()  # without a config: sliding layers keep the whole text too
    with drafting(model):
        next_logits(model, ids[:, : len(prompt_ids)], verified, last=1)
        for start in range(len(prompt_ids), ids.shape[1], CHUNK):
            part = ids[:, start : start + CHUNK]
            chosen = next_logits(model, part, verified).argmax(-1)
            for place, (full, sizes) in enumerate(drafts):
                cache = draft_cache(verified, start, full, heads, sizes)
                drafted = next_logits(model, part, cache).argmax(-1)
                counts[place] += int((drafted == chosen).sum())
    return counts


def next_logits(model: Any, ids: Tensor, cache: Cache, last: int = 0) -> Tensor:
    """Read tokens ``[1, T]`` after those of ``cache``: logits ``[1, T, V]``, or of the ``last``."""
    arguments = {cache_argument(): cache, "use_cache": True, "logits_to_keep": last}
    logits: Tensor = model(input_ids=ids, **arguments).logits
    return logits


# --- what a study measures


def draft_sizes(study: Study) -> list[Sizes]:
    """Return what compressible heads of drafts read: as the options say, else three windows."""
    own = study.cache
    default = [Sizes(own.sink, window, own.protect_prompt) for window in WINDOWS]
    return study.config.parsed_sizes or default


def draft_sparsities(study: Study) -> list[float]:
    """Return the sparsities of the sweep and 1, where all heads are local."""
    return sorted({*study.sparsities, 1.0})


def with_text(found: Iterable[Condition], place: int) -> list[Condition]:
    """Return the conditions that the text of problem ``place`` is a part of."""
    return [of for of in found if of.part is None or place % of.part[1] == of.part[0]]


def acceptance_file(folder: Path, task: str) -> Path:
    """Return where the rows of a task are in the folder of a study."""
    return folder / "rows" / f"acceptance-{task.replace(':', '_')}.jsonl"


def measure_acceptance(study: Study) -> None:
    """Measure on every text what is not in the rows yet, and note all in ``study.accepted``."""
    with progress_bar("acceptance", "texts", sum(map(len, study.problems.values()))) as bar:
        take_turns(study.tasks, partial(_measure_task, study, bar))


def _measure_task(study: Study, bar: ProgressBar, task: str) -> None:
    problems = study.problems[task]
    answers = study.full(task).answers
    wanted: dict[Condition, None] = {}
    for setting in product(study.rankings, draft_sparsities(study), draft_sizes(study)):
        wanted.update(dict.fromkeys(study.at_sparsity(task, *setting)))
    settings = {**facts_of(study.model, study.tokenizer), "libraries": library_facts()}
    file = acceptance_file(study.config.output_dir, task)
    recorded = {"commit": commit(), "hardware": hardware_line()}
    with open_store(file, settings, KEY, recorded) as store:
        texts = {(row["key"], row["condition"]): row["text"] for row in store.rows}
        for place, (problem, answer) in enumerate(zip(problems, answers, strict=True)):
            own = with_text(wanted, place)
            text = _digest(problem, answer)
            if any(texts.get((problem.key, of.key), text) != text for of in own):
                raise ValueError(
                    f"{file} holds rows of another prompt or text of {problem.key}: take another "
                    "output folder"
                )
            missing = [of for of in own if (problem.key, of.key) not in store.done]
            if missing:
                store.append(*_rows(study, problem, answer, missing))
                bar.advance()
            else:
                bar.resume(1)
        found = {(row["key"], row["condition"]): row["accepted"] for row in store.rows}
    study.accepted[task] = found


def _rows(
    study: Study, problem: Problem, answer: Answer, measured: Sequence[Condition]
) -> list[Row]:
    tokens = answer.tokens.tolist()
    prompt_ids = problem.prompt_ids
    drafts = [(of.allocation.full, _sizes(of, len(prompt_ids))) for of in measured]
    rows = []
    counts = count_accepted(study.model, prompt_ids, tokens, drafts)
    for condition, accepted in zip(measured, counts, strict=True):
        row = {"key": problem.key, "condition": condition.key, "text": _digest(problem, answer)}
        rows.append({**row, "accepted": accepted, "positions": len(tokens) - 1})
    return rows


def _digest(problem: Problem, answer: Answer) -> str:
    return digest_of([problem.prompt_ids, answer.tokens.tolist()])


def _sizes(condition: Condition, prompt_tokens: int) -> LocalSizes:
    if condition.sizes is None:  # no head is compressible
        return LocalSizes(0, 1)
    sink, window, protect_prompt = condition.sizes
    return LocalSizes(max(sink, prompt_tokens) if protect_prompt else sink, window)


# --- what it makes of it


def acceptance(study: Study, task: str, page: Page) -> Metrics:
    """Count the tokens of the full cache's texts that drafts with compressed heads get right."""
    sparsities = draft_sparsities(study)
    lengths = study.full_texts(task).lengths
    prompt_tokens, text_tokens = map(fmean, zip(*lengths, strict=True))
    positions = sum(tokens - prompt for prompt, tokens in lengths)
    if not positions:
        page.paragraph(f"{task}: no text has a second token, which would be the first draft.")
        return {"positions": 0, "methods": {}}
    methods: dict[str, list[Metrics]] = {}
    panels = []
    for sizes in draft_sizes(study):
        by_ranking: dict[str, list[Metrics]] = {}
        kept = (prompt_tokens if sizes.protect_prompt else sizes.sink) + sizes.window
        for ranking in study.rankings:
            by_ranking[ranking.name] = []
            for sparsity in sparsities:
                found = _accepted_share(study, task, ranking, sparsity, sizes)
                speedup, drafted = computed_speedup(found["mean"], sparsity, kept)
                computed = {"computed_speedup": speedup, "computed_drafted": drafted}
                by_ranking[ranking.name].append({**found, **computed})
        curves = curves_of(sparsities, by_ranking)
        title = f"{task}: drafts with {sizes}"
        panels.append(Panel(title, "sparsity", curves, "acceptance", limits=None))
        methods |= {f"{name}, {sizes}": of for name, of in by_ranking.items()}
    columns = ["heads, sinks + window", *levels(sparsities)]
    page.table(
        columns,
        table_rows(methods, lambda of: estimate(of, 3)),
        f"{task}: share of {positions} positions of {len(lengths)} texts at which the draft picks "
        f"the full model's token; at s = 1 all heads are local; {INTERVALS}.",
    )
    page.table(
        columns,
        table_rows(methods, "{computed_speedup:.2f}x, k = {computed_drafted}".format_map),
        f"{task}: computed, not measured: speed-up of lossless drafts over the full model for "
        f"{SHAPE}, with the acceptance above, of texts of {text_tokens:.0f} tokens on average, for "
        "all k tokens of a round, and the best k.",
    )
    path = plot_curves(study.plot_file("acceptance", task), *panels, sharey=True)
    page.picture(path, f"{task}: acceptance of drafts, 95% intervals.")
    return {"positions": positions, "methods": methods}


def _accepted_share(
    study: Study, task: str, ranking: Ranking, sparsity: float, sizes: Sizes
) -> Metrics:
    """Return the share of accepted positions, over all seeds, with its interval over texts."""
    every = study.at_sparsity(task, ranking, sparsity, sizes)
    counts = []
    positions = []
    texts = zip(study.problems[task], study.full(task).answers, strict=True)
    for place, (problem, answer) in enumerate(texts):
        own = with_text(every, place)
        counts.append(sum(study.accepted[task][problem.key, of.key] for of in own))
        positions.append(len(own) * (len(answer.tokens) - 1))
    found = ratio_with_interval(counts, positions)
    assert found is not None
    return asdict(found)


def computed_speedup(acceptance: float, sparsity: float, kept: float) -> tuple[float, int]:
    """Compute the speed-up of lossless drafts for :data:`SHAPE`, where memory sets the pace.

    ``x = E / (k * (c + o) + V)`` with the expected tokens of a round ``E = 1 + a + ... + a^k``, the
    cost of a draft ``c`` and of the verification ``V`` in steps of the full model, and the overhead
    of a draft ``o``.

    Args:
        acceptance: a, taken for every token of a round.
        sparsity: share of heads that are compressible.
        kept: tokens that these read.

    Returns:
        The largest x, and its k.
    """
    cache_bytes = ROWS * LENGTH * KV_BYTES
    step = WEIGHT_BYTES + cache_bytes
    saved = cache_bytes * sparsity * max(0.0, 1 - kept / LENGTH)
    draft = 1 - saved / step + DRAFT_OVERHEAD
    found = []
    for drafted in range(1, MOST_DRAFTED + 1):
        seconds = 2 * PARAMETERS * ROWS * (drafted + 1) / FLOPS
        work = max(WEIGHT_BYTES, seconds * BYTES_PER_SECOND)
        verification = (work + cache_bytes) / step + VERIFY_OVERHEAD
        expected = sum(acceptance**count for count in range(drafted + 1))
        found.append((expected / (drafted * draft + verification), drafted))
    return max(found)
