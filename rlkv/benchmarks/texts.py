"""Costs of eviction policies, and whole texts by method: memory, latency, throughput.

Tables of whole texts: RLKV (arXiv 2510.08525), table 2; R-KV (arXiv 2505.24133), tables 1 and 3.
The cache of a text as it grows: RPC (arXiv 2505.13866), figure 5.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from rlkv.benchmarks.decode import Steps, reallocation_cache
from rlkv.benchmarks.turns import (
    Contender,
    DecodeConfig,
    Prepare,
    panels_of,
    take_turns,
    write_measurement,
)
from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from rlkv.cache.accounting import KVSizes, kv_nbytes
from rlkv.cache.plan import CacheSettings
from rlkv.evaluation.evaluate import FULL, CompressionMethod, parse_methods
from rlkv.evaluation.report import Panel, Point
from rlkv.eviction import POLICIES, EvictionPolicy, make_policy
from rlkv.inference.engine import cache_nbytes
from rlkv.models.loading import cache_argument
from rlkv.rollout.footprint import GIB

# R-KV's cost depends on how many keys are similar: none of the random ones is
ALIKE = "rkv, keys alike"
EVICTED = (*POLICIES, "rkv published", ALIKE)
EVICTIONS_IN_A_TURN = 3

EVICTION_COLUMNS = {
    "policy": "{policy}",
    "batch": "{batch}",
    "entries": "{context}",
    "ms per eviction of a layer": "{eviction_ms:.2f}",
    "all layers / decode step": "{all_layers_over_step:.2f}",
    "every tokens": "{buffer}",
    "added to a step": "{share_of_a_step:.1%}",
    "peak bytes beyond the states (GPU)": "{peak_bytes:,}",
    "": "{note}",
}
TEXT_COLUMNS = {
    "method": "{method}",
    "batch": "{batch}",
    "KV bytes held / full": "{kv_bytes:,} / {kv_bytes_full:,}",
    "peak bytes (GPU)": "{peak_bytes:,}",
    "s to read prompts": "{prompt_seconds:.2f}",
    "ms per token": "{ms_per_token:.1f}",
    "s in all": "{seconds:.1f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "": "{note}",
}


# --- an eviction


def draw_states(
    config: DecodeConfig, name: str, batch: int, entries: int
) -> tuple[EvictionPolicy, Tensor, Tensor, Tensor]:
    """Return the policy of a case, which keeps half, and what it chooses from.

    Keys and values ``[B, H, entries, D]``, queries ``[B, Q, a, D]``.
    """
    kind, _, variant = name.removesuffix(", keys alike").partition(" ")
    policy = make_policy(kind, budget=entries // 2, **({"variant": variant} if variant else {}))
    torch.manual_seed(0)
    shape = (batch, config.kv_heads, entries, config.head_dim)
    keys = torch.randn(shape, **config.options)
    values = torch.randn(shape, **config.options)
    if name == ALIKE:  # keys share more than half
        keys += 1.2 * torch.randn(batch, config.kv_heads, 1, config.head_dim, **config.options)
    observed = (batch, config.query_heads, policy.observation, config.head_dim)
    return policy, keys, values, torch.randn(observed, **config.options)


def evict_once(policy: EvictionPolicy, keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
    """Evict once in one layer: choose half, and gather keys and values ``[2, B, H, K, D]``."""
    kept = policy.select(keys, queries, keys.shape[2] // 2)
    index = kept[..., None].expand(-1, -1, -1, keys.shape[3])
    found = keys.new_empty(2, *index.shape)
    torch.gather(keys, 2, index, out=found[0])
    torch.gather(values, 2, index, out=found[1])
    return found


def eviction_contender(config: DecodeConfig, name: str, batch: int, entries: int) -> Contender:
    """Return a contender that evicts with this policy."""

    def begin(contender: Contender) -> Prepare:
        policy, *states = draw_states(config, name, batch, entries)
        contender.facts["buffer"] = policy.buffer
        return lambda index: partial(evict_once, policy, *states)

    return Contender(name, {"batch": batch, "context": entries, "policy": name}, begin)


def eviction_row(config: DecodeConfig, contender: Contender, step: Contender) -> dict[str, Any]:
    """Return what an eviction costs in all layers, over a decode step.

    A policy with a buffer pays that once per ``buffer`` tokens.
    """
    if not contender.fits or not step.fits:
        return {**contender.facts, "note": "out of memory"}
    over_step = config.layers * contender.milliseconds() / step.milliseconds()
    row = {
        **contender.facts,
        "eviction_ms": contender.milliseconds(),
        "decode_step_ms": step.milliseconds(),
        "all_layers_over_step": over_step,
        "share_of_a_step": over_step / contender.facts["buffer"],
    }
    if contender.peak_bytes is not None:
        row["peak_bytes"] = contender.peak_bytes - contender.set_up_bytes
    return row


def measure_evictions(config: DecodeConfig) -> None:
    """Time an eviction of each policy and a decode step, for every batch and number of entries."""
    model = config.build_model()
    results = []
    for batch, entries in product(config.batches, config.contexts):
        make = partial(reallocation_cache, config)
        steps = Steps(config, model, batch, entries)
        step = steps.contender("decode step", IMPLEMENTATION, make, entries)
        policies = [eviction_contender(config, name, batch, entries) for name in EVICTED]
        take_turns([step, *policies], config, min(config.max_steps, EVICTIONS_IN_A_TURN))
        results += [eviction_row(config, contender, step) for contender in policies]
    ylabel = "time added to a decode step (share)"
    panels = panels_of(results, "policy", "share_of_a_step", "entries before an eviction", ylabel)
    write_measurement(config, results, EVICTION_COLUMNS, panels)


# --- whole texts


def text_contender(
    config: DecodeConfig, model: Any, method: CompressionMethod, batch: int
) -> Contender:
    """Return a contender that reads the prompts in its first step, then writes a token in each."""

    full = method.allocation(model.config, {}, seed=0).full

    def begin(contender: Contender) -> Prepare:
        cache: Cache = DynamicCache()
        model.set_attn_implementation("sdpa")
        if method.name != FULL:
            model.set_attn_implementation(IMPLEMENTATION)
            cache = HeadReallocationCache(
                full,
                config.sink,
                config.window,
                eviction=method.policy,
                evict_from=method.evict_from,
            )
            cache.state.limit = config.prompt_tokens + config.new_tokens
        draw = torch.Generator().manual_seed(0)
        shape = (batch, config.prompt_tokens)
        token = torch.randint(config.vocabulary, shape, generator=draw).to(model.device)

        def read() -> Tensor:
            nonlocal token
            given = {cache_argument(): cache}
            output = model(token, use_cache=True, logits_to_keep=1, **given)
            token = output.logits[:, -1].argmax(-1, keepdim=True)
            contender.kv_bytes = cache_nbytes(cache)
            return token

        return lambda index: read

    return Contender(method.name, {"method": method.name, "batch": batch}, begin)


def bytes_by_length(config: DecodeConfig, model: Any, method: CompressionMethod) -> list[int]:
    """Return the bytes of KV in use for one text: after its prompt, after one more token, ..."""
    tokens = torch.arange(config.prompt_tokens, config.prompt_tokens + config.new_tokens)
    settings = method.cache(CacheSettings(config.sink, config.window))
    full = method.allocation(model.config, {}, seed=0).full
    prompts = torch.full_like(tokens, config.prompt_tokens)
    return kv_nbytes(settings, full, KVSizes.of(model), prompts, tokens)[0].tolist()


def largest_batch(
    config: DecodeConfig, model: Any, method: CompressionMethod, memory_gib: float
) -> int:
    """Return how many texts' KV fit next to the weights; ValueError if not even one does."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    found = int((memory_gib * GIB - weights) // max(bytes_by_length(config, model, method)))
    if found < 1:
        raise ValueError(
            f"--memory-gib {memory_gib:g} does not hold the weights ({weights / GIB:.2f} GiB) and "
            f"one text of {method.name}: give more memory or fewer --new-tokens"
        )
    return found


def text_row(config: DecodeConfig, model: Any, contender: Contender) -> dict[str, Any]:
    """Return the bytes and times of a contender, medians over its turns."""
    if not contender.fits:
        return {**contender.facts, "note": "out of memory"}
    batch = contender.facts["batch"]
    cached = config.prompt_tokens + config.new_tokens - 1
    entries = batch * cached * config.layers * config.kv_heads
    written = config.new_tokens - 1  # reading the prompt gave the first one
    turns = [contender.times[at : at + written] for at in range(0, len(contender.times), written)]
    prompt = statistics.median(contender.first_times)
    decode = statistics.median(map(sum, turns))
    return {
        **contender.facts,
        "kv_bytes": contender.kv_bytes,
        "kv_bytes_full": entries * KVSizes.of(model).nbytes,
        "peak_bytes": contender.peak_bytes,
        "prompt_seconds": prompt,
        "ms_per_token": 1000 * decode / written,
        "seconds": prompt + decode,
        "tokens_per_second": batch * config.new_tokens / (prompt + decode),
    }


def measure_texts(config: DecodeConfig) -> None:
    """Write whole texts with each method and batch; plot the KV of one text as it grows, too."""
    model = config.build_model()
    methods = parse_methods(config.methods, [])
    settings = list(product(methods, config.batches))
    if config.memory_gib is not None:
        for method in methods:
            settings.append((method, largest_batch(config, model, method, config.memory_gib)))
    contenders = [text_contender(config, model, *setting) for setting in settings]
    take_turns(contenders, config, config.new_tokens - 1)
    results = [text_row(config, model, contender) for contender in contenders]
    speed: dict[str, list[Point]] = defaultdict(list)
    for row in sorted(results, key=lambda row: row["batch"]):
        if "seconds" in row:
            speed[row["method"]].append((row["batch"], *[row["tokens_per_second"]] * 3))
    grown: dict[str, list[Point]] = defaultdict(list)
    for method in methods:
        for written, held in enumerate(bytes_by_length(config, model, method)):
            mebibytes = held / 2**20
            point = (config.prompt_tokens + written, mebibytes, mebibytes, mebibytes)
            grown[method.name].append(point)
    text = f"{config.prompt_tokens} + {config.new_tokens} tokens"
    labels = ("one text", "tokens read and written", grown, "MiB of KV in use")
    plain = {name: {"marker": ""} for name in grown}
    panels = [
        Panel(text, "texts at once", speed, "tokens/s", limits=None, log=True),
        Panel(*labels, styles=plain, limits=None, ticks=False),
    ]
    write_measurement(config, results, TEXT_COLUMNS, panels, sharey=False)
