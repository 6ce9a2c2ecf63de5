"""How long a decode step takes and how many bytes of KV it reads, against transformers'
DynamicCache and StaticCache.

Caches hold random states, the same in all variants. A ratio is given only where the logits agree:
those of other caches of transformers and of sparsity 0 with DynamicCache's, those of the decode
kernel with plain torch's, at another sparsity if those of 0 do. All variants take turns, so that a
machine that slows down slows all of them.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.utils import is_flash_attn_2_available

from rlkv.benchmarks.agreement import ALLOWED_OF_MODELS, relative_error
from rlkv.benchmarks.common import KERNEL, TimingConfig, at_least, kernel_serves
from rlkv.benchmarks.turns import timed, turns
from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from rlkv.evaluation.report import Panel, Point
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.engine import cache_nbytes
from rlkv.models.loading import resolve_device, resolve_dtype
from rlkv.utils.progress import progress_bar

STOCK, STATIC, FLASH = "DynamicCache", "StaticCache", "DynamicCache, FlashAttention"
THEIRS = (STOCK, STATIC, FLASH)
COMPARED = 2  # steps
EMPTY = "1 token"  # a step that does everything but read a cache
# in the place of options that are at their defaults
QUICK = {"batches": (1, 2), "contexts": (256, 1024), "rounds": 2, "seconds": 0.5}
QUICK |= {"layers": 4, "hidden": 256, "intermediate": 682, "vocabulary": 512}

COLUMNS = {
    "batch": "{batch}",
    "context": "{context}",
    "cache": "{cache}",
    "ms per step": "{ms_per_step:.1f}",
    "x DynamicCache": "{speedup_over_dynamic_cache:.2f}",
    "x sparsity 0": "{speedup_over_sparsity_0:.2f}",
    "ms if time followed bytes": "{expected_ms:.1f}",
    "KV share": "{kv_share:.0%}",
    "KV bytes held / full": "{kv_bytes:,} / {kv_bytes_full:,}",
    "": "{note}",
}


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(TimingConfig):
    """Median time of a decode step against DynamicCache and StaticCache, with bytes of KV held and
    of the full cache.

    rlkv-bench decode            # about 15 minutes on 2 cores
    rlkv-bench decode --quick    # a small model, under a minute
    rlkv-bench decode --threads 1 --contexts 4096 --batches 1
    """

    quick: bool = False
    """Small model, short contexts."""
    batches: tuple[int, ...] = (1, 8)
    """Rows that decode together."""
    contexts: tuple[int, ...] = (1024, 4096, 16384)
    """Tokens cached."""
    sparsities: tuple[float, ...] = (0.0, 0.5, 0.9)
    """Compared with DynamicCache; must include 0."""
    sink: int = 16
    """First tokens that compressible heads keep."""
    window: int = 64
    """Last tokens that they keep."""

    def check(self) -> None:
        super().check()
        at_least(1, batches=self.batches, contexts=self.contexts)
        if 0.0 not in self.sparsities:
            raise ValueError("--sparsities must include 0: the others are compared with it")

    def sized(self) -> DecodeConfig:
        """With ``quick``, small sizes for the options that were not given."""
        unset = {
            name: value
            for name, value in QUICK.items()
            if getattr(self, name) == getattr(type(self), name)
        }
        return replace(self, **unset) if self.quick else self  # type: ignore[arg-type]

    def run(self) -> None:
        """Measure and write the results; a panel per batch, bars for the quartiles."""
        config = self.sized()
        results = measure_decode(config)
        panels = []
        for batch in config.batches:
            curves: dict[str, list[Point]] = defaultdict(list)
            for row in results:
                if row["batch"] == batch:
                    curves[row["cache"]].append(
                        (row["context"], row["ms_per_step"], *row["ms_quartiles"])
                    )
            axes = ("tokens cached", curves, "ms per decode step (median)")
            panels.append(Panel(f"batch {batch}", *axes, limits=None, log=True))
        config.write("decode", results, COLUMNS, panels)


@dataclass
class Variant:
    """One cache that takes its turns: seconds per step, and bytes held when ``context`` tokens are
    cached.

    ``logits``: of the first two steps of a turn, in float32 on the CPU.
    """

    name: str
    implementation: str
    make: Callable[[], Cache]
    context: int
    times: list[float] = field(default_factory=list)
    kv_bytes: int = 0
    logits: list[Tensor] = field(default_factory=list)

    def milliseconds(self) -> float:
        """Median time per step."""
        return 1000 * statistics.median(self.times)


def realloc_variant(
    config: TimingConfig,
    name: str,
    context: int,
    sparsity: float = 0.0,
    sink: int = 16,
    window: int = 64,
    kernel: bool = False,
) -> Variant:
    """Decoding with a random allocation of this sparsity, by plain torch or by the decode kernel."""
    full = HeadAllocation.random(config.layers, config.kv_heads, sparsity, seed=0).full

    def make() -> Cache:
        cache = HeadReallocationCache(full, sink, window)
        cache.state.decode_kernel = kernel
        return cache

    return Variant(name, IMPLEMENTATION, make, context)


def _variants(config: DecodeConfig, context: int) -> list[Variant]:
    sizes, room = (config.sink, config.window), context + 1 + config.max_steps
    static = partial(
        StaticCache, config.llama(room), room
    )  # as long as the turn needs it, its best case
    theirs = [
        Variant(STOCK, "sdpa", DynamicCache, context),
        Variant(STATIC, "sdpa", static, context),
    ]
    device = resolve_device(config.device)
    on_gpu = device.type == "cuda"
    if (
        on_gpu
        and resolve_dtype(config.dtype, device) != torch.float32
        and is_flash_attn_2_available()
    ):
        theirs.append(Variant(FLASH, "flash_attention_2", DynamicCache, context))
    ours = [
        realloc_variant(config, f"sparsity {s:g}", context, s, *sizes) for s in config.sparsities
    ]
    if kernel_serves(config):
        for s in config.sparsities:
            ours.append(
                realloc_variant(config, f"sparsity {s:g}{KERNEL}", context, s, *sizes, kernel=True)
            )
    return [*theirs, *ours, realloc_variant(config, EMPTY, context=1)]


def _fill(model: PreTrainedModel, cache: Cache, rows: int, context: int, room: int) -> None:
    shape = (rows, model.config.num_key_value_heads, context, model.config.head_dim)
    # one random head stands for all rows and heads: drawing them all would take longer than the
    # measurement
    draw = torch.Generator().manual_seed(context)
    states = torch.randn(2, 1, 1, *shape[2:], generator=draw).to(model.device, model.dtype)
    key, value = (one.expand(shape) for one in states)
    if isinstance(cache, HeadReallocationCache):
        cache.fill(key, value)
        cache.state.limit = context + room  # as generate sets it
    else:
        for layer in range(model.config.num_hidden_layers):
            cache.update(key, value, layer)


@torch.inference_mode()
def take_turn(model: PreTrainedModel, variant: Variant, rows: int, config: TimingConfig) -> None:
    """Fill a cache, decode one token to warm up, then time tokens one by one.

    The cache is dropped at the end.
    """
    model.set_attn_implementation(variant.implementation)
    assert model.config._attn_implementation == variant.implementation
    cache = variant.make()
    _fill(model, cache, rows, variant.context, room=1 + config.max_steps)
    variant.kv_bytes = cache_nbytes(cache)
    token = torch.ones(rows, 1, dtype=torch.long, device=model.device)
    variant.logits.clear()
    latest: deque[Any] = deque(maxlen=1)
    spent = 0.0
    for step in range(1 + config.max_steps):
        held = variant.context + step
        mask = torch.ones(
            rows, held + 1, dtype=torch.long, device=model.device
        )  # as generate passes it
        inputs = {
            "attention_mask": mask,
            "position_ids": torch.full((rows, 1), held, device=model.device),
        }
        forward = partial(model, token, past_key_values=cache, use_cache=True, **inputs)
        seconds = timed(lambda: latest.append(forward()), model.device)  # noqa: B023  (called here)
        if step < COMPARED:
            variant.logits.append(latest[0].logits[:, -1].float().cpu())
        if step:
            variant.times.append(seconds)
            spent += seconds
            if spent + seconds > config.seconds:
                break


def _rows_of(variants: list[Variant], rows: int, allowed: float) -> list[dict[str, Any]]:
    """One result per variant; ratios where logits differ by at most ``allowed``.

    ``kv_share``: the part of a full-cache step that depends on what is cached, ``1 - t(1 token) /
    t(context)``, at sparsity 0.  ``expected_ms``: what a step would take if that part shrank
    exactly as the bytes of KV do.
    """
    named = {variant.name: variant for variant in variants}
    stock, base, empty = named[STOCK], named["sparsity 0"], named.pop(EMPTY)
    cached_part = base.milliseconds() - empty.milliseconds()
    found, notes = (
        [],
        {variant.name: _disagreement(variant, named, allowed) for variant in named.values()},
    )
    for variant in named.values():
        own_note = notes[variant.name] or notes[base.name]
        by_kernel = variant.name.endswith(KERNEL)
        note = notes[variant.name] if variant.name in THEIRS else own_note
        expected = empty.milliseconds() + cached_part * variant.kv_bytes / stock.kv_bytes
        quartiles = (
            statistics.quantiles(variant.times, n=4)
            if len(variant.times) > 1
            else variant.times * 3
        )
        found.append(
            {
                "batch": rows,
                "context": variant.context,
                "cache": variant.name,
                "ms_per_step": variant.milliseconds(),
                "ms_quartiles": [1000 * quartiles[0], 1000 * quartiles[2]],
                "steps": len(variant.times),
                "speedup_over_dynamic_cache": None
                if note
                else stock.milliseconds() / variant.milliseconds(),
                "speedup_over_sparsity_0": None
                if own_note
                else base.milliseconds() / variant.milliseconds(),
                "expected_ms": None if by_kernel or variant.name in THEIRS else expected,
                "kv_share": None if by_kernel else cached_part / base.milliseconds(),
                "kv_bytes": variant.kv_bytes,
                "kv_bytes_full": stock.kv_bytes,
                "note": note,
            }
        )
    return found


def _disagreement(variant: Variant, named: dict[str, Variant], allowed: float) -> str:
    """What is wrong with the logits, compared with those of another variant.

    Empty if nothing is.
    """
    same = STOCK if variant.name in (*THEIRS, "sparsity 0") else variant.name.removesuffix(KERNEL)
    expected = named[same].logits
    steps = min(len(variant.logits), len(expected))
    error = max(
        relative_error(a, b) for a, b in zip(variant.logits[:steps], expected[:steps], strict=True)
    )
    return "" if error <= allowed else f"wrong logits: relative difference to {same} {error:.2g}"


def measure_decode(config: DecodeConfig) -> list[dict[str, Any]]:
    """Time all variants for every batch and context; rows are those of :func:`_rows_of`."""
    model, results = config.build_model(max(config.contexts) + 1024), []
    settings = list(product(config.batches, config.contexts))
    plans = [(rows, _variants(config, context)) for rows, context in settings]
    total = config.rounds * sum(len(variants) for _, variants in plans)
    with progress_bar("decode", "turns", total) as bar:
        for rows, variants in plans:
            for variant in turns(variants, config.rounds):
                take_turn(model, variant, rows, config)
                bar.advance()
            results += _rows_of(variants, rows, ALLOWED_OF_MODELS[model.dtype])
    return results
