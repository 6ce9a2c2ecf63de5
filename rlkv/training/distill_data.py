"""What distillation reads: the recall task in text or in the tiny model's words, or recorded solutions."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from rlkv.data.deepscaler import read_curriculum
from rlkv.data.recall import MarkedText, TextRecall, encode, knows_bindings, read_haystack, recall_sample
from rlkv.models.prompts import choose_template, render_prompt
from rlkv.training.distill_config import DistillSettings
from rlkv.utils.provenance import digest

# the samples of a step (0-based): the same at every call, so that a resumed run continues with the same samples
Draw = Callable[[int], list[MarkedText]]


def read_traces(path: str, tokenizer: Any, template: str, max_length: int, least: int = 1) -> list[MarkedText]:
    """The curriculum's problems with their recorded outputs; every token of an output counts, the end token included.

    Texts of more than ``max_length`` tokens are cut there; those with fewer than ``least`` output tokens are left out.

    Raises:
        ValueError: for an unreadable file, rows without outputs, or if nothing is left.
    """
    samples = []
    for number, row in enumerate(read_curriculum(path, ("problem", "answer", "output"))):
        if not isinstance(row["output"], str) or not row["output"].strip():
            raise ValueError(f"{path}: the output of row {number} is empty: filter again with this model")
        prompt = encode(tokenizer, render_prompt(tokenizer, row["problem"], template))
        ids = (*prompt, *encode(tokenizer, row["output"]), tokenizer.eos_token_id)[:max_length]
        if len(ids) - len(prompt) >= least:
            samples.append(MarkedText(ids, tuple(range(len(prompt), len(ids)))))
    if not samples:
        raise ValueError(f"{path}: no row has {least} output tokens within max_length={max_length} tokens")
    return samples


def in_epochs(samples: list[MarkedText], batch_size: int, seed: int) -> Draw:
    """Every sample once an epoch, in an order that depends on (seed, epoch) alone."""

    def at(place: int) -> MarkedText:
        epoch, index = divmod(place, len(samples))
        order = list(range(len(samples)))
        random.Random(f"rlkv-distill-{seed}-{epoch}").shuffle(order)
        return samples[order[index]]

    return lambda step: [at(step * batch_size + i) for i in range(batch_size)]


def load_data(settings: DistillSettings, tokenizer: Any) -> tuple[Draw, dict[str, Any]]:
    """``(draw, what a run notes of its data)``; the digest ties a resumed run to the same texts.

    Raises:
        ValueError: for files or settings that give no samples.
    """
    if settings.data == "traces":
        if settings.curriculum is None:
            raise ValueError("no traces: pass --curriculum FILE, which rlkv-filter writes")
        template = choose_template(settings.template, model=settings.model)
        least = 2 if settings.prefill == "full" else 1  # a first one is predicted by the prompt alone
        traces = read_traces(settings.curriculum, tokenizer, template, settings.max_length, least)
        facts = {"samples": len(traces), "data_digest": digest([trace.ids for trace in traces])}
        return in_epochs(traces, settings.batch_size, settings.seed), facts
    draw_one: Callable[[random.Random], MarkedText]
    if knows_bindings(tokenizer):
        if settings.haystack is not None:
            raise ValueError(
                f"--haystack {settings.haystack}: the tiny model reads no text, its haystack is definitions of its task"
            )
        facts = {"recall_task": "bindings of the tiny task"}
        draw_one = partial(recall_sample, tokenizer, passkeys=settings.passkeys)
    else:
        haystack = None if settings.haystack is None else read_haystack(settings.haystack, tokenizer)
        facts = {"recall_task": "word sequences in text", "data_digest": digest(haystack)}
        sizes = (settings.passkeys, settings.passkey_words, settings.min_length, settings.max_length)
        draw_one = TextRecall(tokenizer, haystack, *sizes).draw

    def draw(step: int) -> list[MarkedText]:
        rng = random.Random(f"rlkv-recall-{settings.seed}-{step}")
        return [draw_one(rng) for _ in range(settings.batch_size)]

    draw(0)  # settings that give no samples fail here, not after the model is loaded
    return draw, facts
