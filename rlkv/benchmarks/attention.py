"""One attention layer while decoding: latency, and the bandwidth at which keys and values are read.

A step stores the new token's key and value and attends.  It is compared with torch's own attention
over a buffer of fixed size in which all heads keep all tokens, its best case.  Planning a step is
left out: a model does it once for all layers.  States are random.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkv.benchmarks.agreement import relative_error
from rlkv.benchmarks.check.explicit import exact_token
from rlkv.benchmarks.common import KERNEL, ProcessConfig, at_least, kernel_serves
from rlkv.benchmarks.turns import fits, timed, turns
from rlkv.cache import HeadReallocationCache
from rlkv.cache.layer import CachedCall
from rlkv.evaluation.report import Panel, Point
from rlkv.gates.allocation import HeadAllocation
from rlkv.kernels.step import DecodeStep
from rlkv.utils.progress import progress_bar

STOCK = "torch, full cache"
ALLOWED = {
    torch.float32: 1e-4,
    torch.bfloat16: 2e-2,
    torch.float16: 5e-3,
}  # relative errors of the output
COLUMNS = {
    "batch": "{batch}",
    "tokens": "{tokens}",
    "attention": "{attention}",
    "us per step": "{microseconds:.0f}",
    "GB/s": "{gigabytes_per_second:.1f}",
    "x torch": "{speedup:.2f}",
    "KV bytes read": "{kv_bytes:,}",
    "": "{note}",
}


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(ProcessConfig):
    """Latency of one decoding attention layer, and GB/s of keys and values read, against torch over
    a full cache.

    rlkv-bench attention                                      # a few minutes on 2 cores
    rlkv-bench attention --device cuda --dtype bfloat16 --query-heads 32 --head-dim 128 \
        --batches 1 16 64 256 --lengths 1024 8192 32768 131072
    """

    batches: tuple[int, ...] = (1, 16)
    """Rows that decode together."""
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    """Tokens cached."""
    sparsities: tuple[float, ...] = (0.0, 0.5, 0.9)
    """Shares of heads that are compressible."""
    query_heads: int = 16
    """Query heads."""
    kv_heads: int = 8
    """KV heads."""
    head_dim: int = 64
    """Size of a head."""
    sink: int = 16
    """First tokens that compressible heads keep."""
    window: int = 64
    """Last tokens that they keep."""
    steps: int = 20
    """Timed steps in one turn."""

    def check(self) -> None:
        super().check()
        at_least(
            1, batches=self.batches, lengths=self.lengths, steps=self.steps, window=self.window
        )
        at_least(1, query_heads=self.query_heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        at_least(0, sink=self.sink)
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"--query-heads {self.query_heads} must be a multiple of --kv-heads {self.kv_heads}"
            )

    def describe(self) -> tuple[str, dict[str, Any]]:
        return (
            f"attention of {self.query_heads} query heads, {self.kv_heads} KV heads of "
            f"{self.head_dim}",
            {},
        )

    def run(self) -> None:
        """Measure and write the results; a panel per batch."""
        results = measure_attention(self)
        panels = []
        for batch in self.batches:
            curves: dict[str, list[Point]] = defaultdict(list)
            for row in results:
                if row["batch"] == batch and "microseconds" in row:
                    curves[row["attention"]].append((row["tokens"], *[row["microseconds"]] * 3))
            axes = ("tokens cached", curves, "us per step (median)")
            panels.append(Panel(f"batch {batch}", *axes, limits=None, log=True))
        self.write("attention", results, COLUMNS, panels)


@dataclass
class Contender:
    """One way to attend: seconds per step, bytes read, and the error of its first output."""

    name: str
    begin: Callable[[], tuple[Callable[[int], Callable[[], Tensor]], int]]
    full: Tensor
    times: list[float] = field(default_factory=list)
    kv_bytes: int = 0
    error: float = 0.0
    fits: bool = True


class Layer:
    """Random states of one head, which stand for those of all rows and KV heads.

    Drawing all would take longer.
    """

    def __init__(self, config: AttentionConfig, batch: int, tokens: int) -> None:
        self.config, self.batch, self.tokens = config, batch, tokens
        self.key_T, self.value_T = (
            torch.randn(tokens + 1, config.head_dim, **config.options) for _ in "kv"
        )
        self.query_Q = torch.randn(config.query_heads, config.head_dim, **config.options)
        self.scale = config.head_dim**-0.5
        heads = (self.query_Q[None], self.key_T[None], self.value_T[None])
        # of query heads that see all keys, and of those that see sinks and window: [2, Q, D]
        self.wanted = exact_token(*heads, config.sink, config.window)[:, 0]

    def states(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, H, end - begin, D]``."""
        shape = (self.batch, self.config.kv_heads, end - begin, self.config.head_dim)
        return self.key_T[begin:end].expand(shape), self.value_T[begin:end].expand(shape)

    def new_token(self) -> tuple[Tensor, list[Tensor]]:
        """Query ``[B, Q, 1, D]``; key and value ``[B, H, 1, D]``."""
        query = self.query_Q[:, None].expand(self.batch, -1, -1, -1).contiguous()
        return query, [states.contiguous() for states in self.states(self.tokens, self.tokens + 1)]

    def stock(self) -> tuple[Callable[[int], Callable[[], Tensor]], int]:
        """Torch's attention over buffers of fixed size."""
        room = self.tokens + 1 + self.config.steps
        shape = (self.batch, self.config.kv_heads, room, self.config.head_dim)
        keys, values = (torch.zeros(shape, **self.config.options) for _ in "kv")
        keys[:, :, : self.tokens], values[:, :, : self.tokens] = self.states(0, self.tokens)
        query, new = self.new_token()

        def attend(end: int) -> Tensor:
            keys[:, :, end - 1 : end], values[:, :, end - 1 : end] = new
            parts = (query, keys[:, :, :end], values[:, :, :end])
            return F.scaled_dot_product_attention(
                *parts, scale=self.scale, enable_gqa=True
            ).transpose(1, 2)

        return lambda step: partial(attend, self.tokens + 1 + step), 2 * keys[
            :, :, : self.tokens
        ].nbytes

    def ours(self, full: Tensor, kernel: bool) -> tuple[Callable[[int], Callable[[], Tensor]], int]:
        """The cache of the deployed model, by plain torch or by the decode kernel; ``full``: bool
        ``[1, H]``.
        """
        cache = HeadReallocationCache(full, self.config.sink, self.config.window)
        cache.state.decode_kernel = kernel
        cache.fill(*self.states(0, self.tokens))
        cache.state.limit = self.tokens + 1 + self.config.steps
        layer: Any = cache.layers[0]
        (query, new), held = self.new_token(), cache.used_nbytes()
        mask = torch.ones(self.batch, cache.state.limit, dtype=torch.long, device=query.device)
        shared: list[DecodeStep] = []

        def prepare(step: int) -> Callable[[], Tensor]:
            start = self.tokens + step
            parts = CachedCall(mask[:, : start + 1], start, 1, self.batch).plan(
                cache.state, query.device
            )
            if kernel:  # its numbers and scratch, which all layers share
                shared[:] = shared or [parts[0].decode_step]
                shared[0].start.fill_(start)
                parts[0].decode_step = shared[0]
            return partial(layer.attend_and_store, query, *new, parts, self.scale)

        return prepare, held

    def error(self, out: Tensor, full: Tensor) -> float:
        """Relative error of a first output ``[B, 1, Q, D]``; ``full``: bool ``[1, H]``."""
        is_full = (
            full[0]
            .to(out.device)
            .repeat_interleave(self.config.query_heads // self.config.kv_heads)
        )
        whole, local = self.wanted
        return relative_error(
            out[:, 0], torch.where(is_full[:, None], whole, local).expand(self.batch, -1, -1)
        )


@torch.inference_mode()
def take_turn(layer: Layer, contender: Contender) -> None:
    """Fill the cache, take one step to warm up, then time steps one by one."""
    prepare, contender.kv_bytes = contender.begin()
    device = layer.key_T.device
    contender.error = max(contender.error, layer.error(prepare(0)(), contender.full))
    contender.times += [timed(prepare(step), device) for step in range(1, 1 + layer.config.steps)]


def measure_attention(config: AttentionConfig) -> list[dict[str, Any]]:
    """A row for each batch, length and way to attend, which take turns.

    No figures where the memory did not suffice.
    """
    config.begin()
    settings, results = list(product(config.batches, config.lengths)), []
    ways = list(product((False, True) if kernel_serves(config) else (False,), config.sparsities))
    with progress_bar("attention", "turns", len(settings) * config.rounds * (1 + len(ways))) as bar:
        for batch, tokens in settings:
            layer = Layer(config, batch, tokens)
            contenders = [
                Contender(STOCK, layer.stock, torch.ones(1, config.kv_heads, dtype=torch.bool))
            ]
            for kernel, sparsity in ways:
                full = HeadAllocation.random(1, config.kv_heads, sparsity, seed=0).full
                name = f"sparsity {sparsity:g}{KERNEL * kernel}"
                contenders.append(Contender(name, partial(layer.ours, full, kernel), full))
            for contender in turns(contenders, config.rounds):
                contender.fits = contender.fits and fits(partial(take_turn, layer, contender))
                bar.advance()
            results += [_row(layer, contender, contenders[0]) for contender in contenders]
    return results


def _row(layer: Layer, contender: Contender, stock: Contender) -> dict[str, Any]:
    """``speedup`` only where the output is right, and torch's fits."""
    row: dict[str, Any] = {
        "batch": layer.batch,
        "tokens": layer.tokens,
        "attention": contender.name,
        "note": "",
    }
    if not contender.fits:
        return row | {"note": "out of memory"}
    seconds, allowed = statistics.median(contender.times), ALLOWED[layer.key_T.dtype]
    row |= {"microseconds": 1e6 * seconds, "kv_bytes": contender.kv_bytes, "error": contender.error}
    row["gigabytes_per_second"] = contender.kv_bytes / seconds / 1e9
    if contender.error > allowed:
        return row | {"note": f"wrong output: relative error {contender.error:.2g}"}
    return row | ({"speedup": statistics.median(stock.times) / seconds} if stock.fits else {})
