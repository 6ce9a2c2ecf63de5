"""Decode steps of a random Llama, or of one of its attention layers, by cache.

A ratio is given only where outputs agree: those of sparsity 0 and of other full caches with the
first one's, those of the decode kernel with plain torch's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache

from rlkv.attention.softmax import Softmax
from rlkv.benchmarks.turns import (
    Contender,
    DecodeConfig,
    Prepare,
    panels_of,
    take_turns,
    write_measurement,
)
from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from rlkv.cache.layer import CachedCall
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.engine import cache_nbytes
from rlkv.kernels.step import serves
from rlkv.models.loading import cache_argument
from rlkv.rollout.graphed import GraphedStep, graphed_step

EMPTY = "1 token"  # a step that does everything but read a cache
KERNEL = ", kernel"  # behind the name of what decodes by the kernel
GRAPH = ", graph"  # and of what does so in a CUDA graph of a step
# relative errors of what whole models compute; transformers' own two caches differ by 0.05 after 32
# layers in bfloat16, on an H100
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 5e-3}
# of one layer: without the newest of 1,024 tokens an output of random states is 0.03 off
ALLOWED_OF_LAYER = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}

STEP_COLUMNS = {
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
LAYER_COLUMNS = {
    "batch": "{batch}",
    "context": "{context}",
    "attention": "{cache}",
    "ms per step": "{ms_per_step:.3f}",
    "GB/s": "{gigabytes_per_second:.1f}",
    "x torch": "{speedup_over_torch:.2f}",
    "KV bytes read": "{kv_bytes:,}",
    "": "{note}",
}


def random_states(config: DecodeConfig, batch: int, tokens: int) -> list[Tensor]:
    """Return keys and values ``[B, H, T, D]``.

    One random head stands for all rows and heads: drawing them all would take longer than the
    measurement.
    """
    draw = torch.Generator().manual_seed(tokens)
    states = torch.randn(2, 1, 1, tokens, config.head_dim, generator=draw).to(**config.options)
    return [one.expand(batch, config.kv_heads, -1, -1) for one in states]


def reallocation_cache(
    config: DecodeConfig, sparsity: float = 0.0, kernel: bool = False
) -> HeadReallocationCache:
    """Return an empty cache with a random allocation of this sparsity."""
    full = HeadAllocation.random(config.layers, config.kv_heads, sparsity, seed=0).full
    cache = HeadReallocationCache(full, config.sink, config.window)
    cache.state.decode_kernel = kernel
    return cache


class Steps:
    """Decode steps of a model on top of ``context`` cached tokens, in ``batch`` rows."""

    stock = "DynamicCache"
    ways: tuple[str, ...] = ("", KERNEL, GRAPH)  # of our steps, where the kernel serves

    def __init__(self, config: DecodeConfig, model: Any, batch: int, context: int) -> None:
        self.config = config
        self.model = model
        self.batch = batch
        self.context = context

    def contenders(self) -> list[Contender]:
        """Return full caches, then ours by sparsity, then a step with an empty cache."""
        found = self.full_caches()
        ways = self.ways if kernel_serves(self.config) else ("",)
        for way, sparsity in product(ways, self.config.sparsities):
            make = partial(reallocation_cache, self.config, sparsity, kernel=way != "")
            name = f"sparsity {sparsity:g}{way}"
            found.append(self.contender(name, IMPLEMENTATION, make, self.context))
        make = partial(reallocation_cache, self.config)
        return [*found, self.contender(EMPTY, IMPLEMENTATION, make, 1)]

    def full_caches(self) -> list[Contender]:
        """Return transformers' own caches."""
        # a static cache is as long as the turn needs it, its best case
        room = self.context + 1 + self.config.max_steps
        static = partial(StaticCache, self.config.llama(room), room)
        return [
            self.contender(self.stock, "sdpa", DynamicCache, self.context),
            self.contender("StaticCache", "sdpa", static, self.context),
        ]

    def contender(
        self, name: str, implementation: str, make: Callable[[], Cache], context: int
    ) -> Contender:
        """Return a contender that decodes with the cache of ``make`` after ``context`` tokens."""
        facts = {"batch": self.batch, "context": self.context, "cache": name}
        return Contender(name, facts, partial(self.begin, implementation, make, context))

    def begin(
        self, implementation: str, make: Callable[[], Cache], context: int, contender: Contender
    ) -> Prepare:
        """Fill a cache."""
        self.model.set_attn_implementation(implementation)
        cache = make()
        key, value = random_states(self.config, self.batch, context)
        room = context + 1 + self.config.max_steps
        if isinstance(cache, HeadReallocationCache):
            cache.fill(key, value)
            cache.state.limit = room  # as generate sets it
        else:
            for layer in range(self.config.layers):
                cache.update(key, value, layer)
        contender.kv_bytes = cache_nbytes(cache)
        token = torch.ones(self.batch, 1, dtype=torch.long, device=self.model.device)
        mask = torch.ones(self.batch, room, dtype=torch.long, device=self.model.device)
        padding = torch.zeros_like(token[:, 0])
        running = padding == 0
        graph: GraphedStep | None = None

        def prepare(index: int) -> Callable[[], Tensor] | None:
            nonlocal graph
            if index and contender.name.endswith(GRAPH):
                if graph is None or not graph.has_room:
                    if graph is not None:
                        graph.settle()
                    graph = graphed_step(self.model, cache, token, padding, running)
                return None if graph is None else partial(graph, token, running)
            held = context + index
            inputs = {
                "attention_mask": mask[:, : held + 1].contiguous(),
                "position_ids": torch.full_like(token, held),
                cache_argument(): cache,
            }
            return lambda: self.model(token, use_cache=True, **inputs).logits[:, -1]

        return prepare


class LayerSteps(Steps):
    """Steps of one attention layer, which store the new token's states and attend.

    Planning a step is left out: a model does it once for all layers.
    """

    stock = "torch, full cache"
    ways = ("", KERNEL)

    def full_caches(self) -> list[Contender]:
        """Return torch's attention over buffers of fixed size, the best case of a full cache."""
        facts = {"batch": self.batch, "context": self.context, "cache": self.stock}
        return [Contender(self.stock, facts, self.begin_torch)]

    def new_token(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query ``[B, Q, 1, D]``, key and value ``[B, H, 1, D]``."""
        draw = torch.Generator().manual_seed(1)
        config = self.config
        heads = config.query_heads + 2 * config.kv_heads
        states = torch.randn(self.batch, heads, 1, config.head_dim, generator=draw)
        parts = [config.query_heads, config.kv_heads, config.kv_heads]
        query, key, value = states.to(**config.options).split(parts, dim=1)
        return query.contiguous(), key.contiguous(), value.contiguous()

    def begin_torch(self, contender: Contender) -> Prepare:
        """Fill two buffers."""
        extra = (0, 0, 0, 1 + self.config.max_steps)
        key, value = random_states(self.config, self.batch, self.context)
        keys, values = F.pad(key, extra), F.pad(value, extra)
        contender.kv_bytes = 2 * keys[:, :, : self.context].nbytes
        query, new_key, new_value = self.new_token()

        def prepare(index: int) -> Callable[[], Tensor]:
            end = self.context + 1 + index

            def work() -> Tensor:
                keys[:, :, end - 1 : end] = new_key
                values[:, :, end - 1 : end] = new_value
                seen = (query, keys[:, :, :end], values[:, :, :end])
                return F.scaled_dot_product_attention(*seen, enable_gqa=True).transpose(1, 2)

            return work

        return prepare

    def begin(
        self, implementation: str, make: Callable[[], Any], context: int, contender: Contender
    ) -> Prepare:
        """Fill the cache of one layer."""
        cache = make()
        cache.fill(*random_states(self.config, self.batch, context))
        cache.state.limit = context + 1 + self.config.max_steps
        contender.kv_bytes = cache.used_nbytes()
        token = self.new_token()
        mask = torch.ones(self.batch, cache.state.limit, dtype=torch.long, device=token[0].device)
        shared: list[Any] = []

        def prepare(index: int) -> Callable[[], Tensor]:
            start = context + index
            call = CachedCall(mask[:, : start + 1], start, 1, self.batch, lambda: None)
            plan = call.plan(cache.state, mask.device)
            if cache.state.decode_kernel:  # its numbers and scratch, which all layers share
                shared[:] = shared or [plan[0].decode_step]
                shared[0].start.fill_(start)
                plan[0].decode_step = shared[0]
            softmax = Softmax(self.config.head_dim**-0.5)
            return partial(cache.layers[0].attend_and_store, *token, plan, softmax)

        return prepare


def kernel_serves(config: DecodeConfig) -> bool:
    """Return whether the decode kernel serves such layers on this device; warn of what it lacks."""
    group = config.query_heads // config.kv_heads
    query = torch.empty(1, config.kv_heads, group, 1, config.head_dim, **config.options)
    return serves(query, query[:, :, 0], query[:, :, 0])


def step_rows(contenders: list[Contender], config: DecodeConfig) -> list[dict[str, Any]]:
    """Return one result per contender; ratios where outputs agree (``ALLOWED``).

    ``kv_share``: the part of a full-cache step that depends on what is cached, ``1 - t(1 token) /
    t(context)``, at sparsity 0.  ``expected_ms``: what a step would take if that part shrank
    exactly as the bytes of KV do.
    """
    *compared, empty = contenders
    dtype = config.options["dtype"]
    allowed = (ALLOWED_OF_LAYER if config.layer else ALLOWED)[dtype]
    layers = 1 if config.layer else config.layers
    of_token = 2 * layers * config.kv_heads * config.head_dim * dtype.itemsize
    stock = compared[0]
    named = {contender.name: contender for contender in compared}
    base = named["sparsity 0"]
    # the first of the library's own caches that fits
    others = [contender for contender in compared if not contender.name.startswith("sparsity")]
    reference = next((contender for contender in others if contender.fits), stock)
    base_note = disagreement(base, reference, allowed)
    found = []
    for contender in compared:
        row = {**contender.facts, "note": ""}
        found.append(row)
        if not contender.fits:
            row["note"] = "out of memory"
            continue
        if not contender.times:
            row["note"] = "no CUDA graph could be made"
            continue
        is_ours = contender.name.startswith("sparsity")
        plain = named[contender.name.removesuffix(KERNEL).removesuffix(GRAPH)]
        if plain is not contender:
            row["note"] = disagreement(contender, plain, allowed) or base_note
        elif is_ours:
            row["note"] = base_note
        else:
            row["note"] = disagreement(contender, reference, allowed)
        milliseconds = contender.milliseconds()
        quartiles = [milliseconds] * 3
        if len(contender.times) > 1:
            parts = statistics.quantiles(contender.times, n=4, method="inclusive")
            quartiles = [1000 * part for part in parts]
        row["ms_per_step"] = milliseconds
        row["ms_quartiles"] = [quartiles[0], quartiles[2]]
        row["steps"] = len(contender.times)
        row["speedup_over_dynamic_cache"] = None
        row["speedup_over_sparsity_0"] = None
        row["expected_ms"] = None
        row["kv_share"] = None
        row["kv_bytes"] = contender.kv_bytes
        row["kv_bytes_full"] = row["batch"] * row["context"] * of_token
        if stock.fits and not row["note"]:
            row["speedup_over_dynamic_cache"] = stock.milliseconds() / milliseconds
        if base.fits and not row["note"] and not base_note:
            row["speedup_over_sparsity_0"] = base.milliseconds() / milliseconds
        if base.fits and plain is contender:
            cached_part = base.milliseconds() - empty.milliseconds()
            row["kv_share"] = cached_part / base.milliseconds()
            if is_ours and stock.fits:
                share = contender.kv_bytes / row["kv_bytes_full"]
                row["expected_ms"] = empty.milliseconds() + cached_part * share
    return found


def disagreement(contender: Contender, reference: Contender, allowed: float) -> str:
    """Return what is wrong with the outputs; empty if they were compared and nothing is."""
    for each in (contender, reference):
        if not each.fits:
            return f"not compared: {each.name} ran out of memory"
    error = contender.error(reference)
    if error <= allowed:
        return ""
    return f"wrong output: relative difference to {reference.name} {error:.2g}"


def measure_steps(config: DecodeConfig) -> None:
    """Time all contenders for every batch and context: rows as of :func:`step_rows`."""
    kind = LayerSteps if config.layer else Steps
    sizes = replace(config, layers=1) if config.layer else config
    model = None if config.layer else config.build_model()
    results = []
    for batch, context in product(config.batches, config.contexts):
        contenders = kind(sizes, model, batch, context).contenders()
        take_turns(contenders, config, config.max_steps, config.seconds)
        results += step_rows(contenders, config)
    if config.layer:
        for row in results:
            row["speedup_over_torch"] = row.pop("speedup_over_dynamic_cache", None)
            if "ms_per_step" in row:
                row["gigabytes_per_second"] = row["kv_bytes"] / row["ms_per_step"] / 1e6
    panels = panels_of(results, "cache", "ms_per_step", "tokens cached", "ms per step (median)")
    write_measurement(config, results, LAYER_COLUMNS if config.layer else STEP_COLUMNS, panels)
