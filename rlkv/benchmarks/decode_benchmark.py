"""How long a decode step takes and how many bytes of KV it reads, against transformers' DynamicCache.

Caches are filled with random states instead of reading a prompt: the time of a decode step depends on how much is
cached, not on what.  All variants take turns within one run, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.engine import cache_nbytes

STOCK = "DynamicCache"
EMPTY = "1 token"  # a step that does everything but read a cache
EMPTY_CONTEXT = 1


@dataclass(frozen=True)
class BenchmarkConfig:
    """Sizes of a run; ``seconds`` bounds the decoding of one variant in one round."""

    batches: tuple[int, ...] = (1, 8)
    contexts: tuple[int, ...] = (1024, 4096, 16384)
    sparsities: tuple[float, ...] = (0.0, 0.5, 0.9)
    sink: int = 16
    window: int = 64
    rounds: int = 5
    seconds: float = 4.0
    max_steps: int = 20
    layers: int = 12
    hidden: int = 768
    query_heads: int = 16
    kv_heads: int = 8
    head_dim: int = 64
    vocabulary: int = 8192


def build_model(config: BenchmarkConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A random Llama; about 100 M parameters with the default sizes."""
    torch.manual_seed(0)
    llama = LlamaConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden,
        intermediate_size=config.hidden * 8 // 3,
        num_hidden_layers=config.layers,
        num_attention_heads=config.query_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=max(config.contexts) + 1024,
        tie_word_embeddings=False,
    )
    model: Any = LlamaForCausalLM(llama)
    return model.to(device=device, dtype=dtype).eval()


@dataclass
class Variant:
    """One cache that takes its turns.

    ``times`` are seconds per step; ``kv_bytes`` is held when ``context`` tokens are cached, before decoding.
    """

    name: str
    implementation: str
    make: Callable[[], Cache]
    context: int
    times: list[float] = field(default_factory=list)
    kv_bytes: int = 0

    def milliseconds(self) -> float:
        """Median time per step (one token of every row)."""
        return 1000 * statistics.median(self.times)


def _variants(config: BenchmarkConfig, context: int) -> list[Variant]:
    def ours(sparsity: float) -> Callable[[], Cache]:
        full = HeadAllocation.random(config.layers, config.kv_heads, sparsity, seed=0).full
        return lambda: HeadReallocationCache(full, config.sink, config.window)

    stock = Variant(STOCK, "sdpa", DynamicCache, context)
    empty = Variant(EMPTY, IMPLEMENTATION, ours(0.0), EMPTY_CONTEXT)
    return [stock, *(Variant(f"sparsity {s:g}", IMPLEMENTATION, ours(s), context) for s in config.sparsities), empty]


def full_cache_variant(config: BenchmarkConfig, context: int) -> Variant:
    """Decoding with all heads full."""
    full = torch.ones(config.layers, config.kv_heads, dtype=torch.bool)
    return Variant("sparsity 0", IMPLEMENTATION, lambda: HeadReallocationCache(full), context)


def _fill(model: PreTrainedModel, cache: Cache, rows: int, context: int, room: int) -> None:
    shape = (rows, model.config.num_key_value_heads, context, model.config.head_dim)
    # one random head stands for all rows and heads: drawing them all would take longer than the measurement
    key, value = (torch.randn(1, 1, *shape[2:], device=model.device, dtype=model.dtype).expand(shape) for _ in "kv")
    if isinstance(cache, HeadReallocationCache):
        cache.fill(key, value)
        cache.state.limit = context + room  # as generate sets it
    else:
        for layer in range(model.config.num_hidden_layers):
            cache.update(key, value, layer)


@torch.inference_mode()
def take_turn(model: PreTrainedModel, variant: Variant, rows: int, config: BenchmarkConfig) -> None:
    """Fill a cache, decode one token to warm up, then time tokens one by one; the cache is dropped at the end."""
    model.set_attn_implementation(variant.implementation)
    assert model.config._attn_implementation == variant.implementation
    cache = variant.make()
    _fill(model, cache, rows, variant.context, room=1 + config.max_steps)
    variant.kv_bytes = cache_nbytes(cache)
    token = torch.ones(rows, 1, dtype=torch.long, device=model.device)
    spent = 0.0
    for step in range(1 + config.max_steps):
        held = variant.context + step
        mask = torch.ones(rows, held + 1, dtype=torch.long, device=model.device)  # as generate passes it
        positions = torch.full((rows, 1), held, device=model.device)
        _synchronize(model)
        start = time.perf_counter()
        model(input_ids=token, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        _synchronize(model)
        seconds = time.perf_counter() - start
        if step:
            variant.times.append(seconds)
            spent += seconds
            if spent + seconds > config.seconds:
                break


def _synchronize(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _rows_of(variants: list[Variant], rows: int) -> list[dict[str, Any]]:
    """One result per variant.

    ``kv_share``: the part of a full-cache step that depends on what is cached, ``1 - t(1 token) / t(context)``, at
    sparsity 0.  ``expected_ms``: what a step would take if that part shrank exactly as the bytes of KV do.
    """
    named = {variant.name: variant for variant in variants}
    stock, base, empty = named[STOCK], named["sparsity 0"], named[EMPTY]
    found = []
    for variant in variants:
        if variant is empty:
            continue
        share_of_bytes = variant.kv_bytes / stock.kv_bytes
        cached_part = base.milliseconds() - empty.milliseconds()
        quartiles = statistics.quantiles(variant.times, n=4) if len(variant.times) > 1 else variant.times * 3
        found.append(
            {
                "batch": rows,
                "context": variant.context,
                "cache": variant.name,
                "ms_per_step": variant.milliseconds(),
                "ms_quartiles": [1000 * quartiles[0], 1000 * quartiles[2]],
                "steps": len(variant.times),
                "speedup_over_dynamic_cache": stock.milliseconds() / variant.milliseconds(),
                "speedup_over_sparsity_0": base.milliseconds() / variant.milliseconds(),
                "expected_ms": empty.milliseconds() + cached_part * share_of_bytes if variant is not stock else None,
                "kv_share": cached_part / base.milliseconds(),
                "kv_bytes": variant.kv_bytes,
                "kv_bytes_full": stock.kv_bytes,
            }
        )
    return found


def run_benchmark(
    model: PreTrainedModel, config: BenchmarkConfig, on_turn: Callable[[str, int, int], None] | None = None
) -> list[dict[str, Any]]:
    """Time all variants for every batch and context.

    Args:
        on_turn: called before each turn with a description, turns done and turns in all.

    Returns:
        Rows with ``batch, context, cache, ms_per_step, ...`` and bytes of KV held / held by DynamicCache.

    Raises:
        ValueError: if the sparsities do not include 0, which the others are compared with.
    """
    if 0.0 not in config.sparsities:
        raise ValueError("the sparsities must include 0: the others are compared with it")
    settings = [(rows, context) for rows in config.batches for context in config.contexts]
    total = len(settings) * config.rounds * (len(config.sparsities) + 2)
    results, done = [], 0
    for rows, context in settings:
        variants = _variants(config, context)
        for turn in range(config.rounds):
            # each round starts with another variant, so that none always runs on a machine that just rested
            shift = turn % len(variants)
            for variant in variants[shift:] + variants[:shift]:
                if on_turn:
                    on_turn(f"batch {rows}, {context} tokens, {variant.name}", done, total)
                take_turn(model, variant, rows, config)
                done += 1
        results += _rows_of(variants, rows)
    return results


def markdown_rows(results: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    head = (
        "batch | context | cache | ms per step | x DynamicCache | x sparsity 0 | ms if time followed bytes | KV share"
    )
    lines = [f"| {head} | KV bytes held / full |", "|" + "---|" * 9]
    for row in results:
        expected = "" if row["expected_ms"] is None else f"{row['expected_ms']:.1f}"
        lines.append(
            f"| {row['batch']} | {row['context']} | {row['cache']} | {row['ms_per_step']:.1f} | "
            f"{row['speedup_over_dynamic_cache']:.2f} | {row['speedup_over_sparsity_0']:.2f} | {expected} | "
            f"{row['kv_share']:.0%} | {row['kv_bytes']:,} / {row['kv_bytes_full']:,} |"
        )
    return "\n".join(lines)


def plot_results(results: list[dict[str, Any]], title: str, path: str) -> None:
    """One panel per batch: median ms per step over the context, one line per cache, bars for the quartiles."""
    from matplotlib.figure import Figure

    from rlkv.utils.figures import TITLE_SIZE, save_figure

    batches = sorted({row["batch"] for row in results})
    figure = Figure(figsize=(4.4 * len(batches), 3.8), layout="constrained")
    panels = figure.subplots(1, len(batches), squeeze=False)[0]
    for axes, batch in zip(panels, batches, strict=True):
        for name in dict.fromkeys(row["cache"] for row in results):
            rows = [row for row in results if row["batch"] == batch and row["cache"] == name]
            middle = [row["ms_per_step"] for row in rows]
            low = [m - row["ms_quartiles"][0] for m, row in zip(middle, rows, strict=True)]
            high = [row["ms_quartiles"][1] - m for m, row in zip(middle, rows, strict=True)]
            cached = [row["context"] for row in rows]
            axes.errorbar(cached, middle, yerr=[low, high], marker="o", markersize=4, capsize=2, label=name)
        axes.set_xscale("log", base=2)
        contexts = sorted({row["context"] for row in results})
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axes.set_yscale("log")
        axes.set_xlabel("tokens cached")
        axes.set_ylabel("ms per decode step (median)")
        axes.set_title(f"batch {batch}", fontsize=TITLE_SIZE)
        axes.grid(alpha=0.3, which="both")
    panels[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=TITLE_SIZE)
    save_figure(figure, path)
