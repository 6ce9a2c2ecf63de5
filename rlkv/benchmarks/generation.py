"""Whole texts with each method of compression and batch size: memory, latency, throughput, and the
largest batch.

Weights and prompts are random.  All settings take turns, so that a machine that slows down slows
all of them.  Tables of this form: RLKV (arXiv 2510.08525), table 2; R-KV (arXiv 2505.24133), tables
1 and 3.  The cache of a text as it
grows: RPC (arXiv 2505.13866), figure 5.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from rlkv.benchmarks.common import ModelConfig, at_least
from rlkv.benchmarks.turns import fits, timed, turns
from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from rlkv.cache.accounting import EntrySize, kv_nbytes
from rlkv.cache.plan import CacheSettings
from rlkv.evaluation.evaluate import FULL, CompressionMethod, parse_methods
from rlkv.evaluation.report import Panel, Point
from rlkv.inference.engine import cache_nbytes
from rlkv.rollout.footprint import GIB
from rlkv.utils.progress import progress_bar

COLUMNS = {
    "method": "{method}",
    "batch": "{batch}",
    "KV bytes held / full": "{kv_bytes:,} / {kv_bytes_full:,}",
    "peak bytes on the GPU": "{peak_bytes:,}",
    "s to read prompts": "{prompt_seconds:.2f}",
    "ms per token": "{ms_per_token:.1f}",
    "s in all": "{seconds:.1f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "": "{note}",
}


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(ModelConfig):
    """Memory, latency and throughput of whole texts, and the largest batch that fits.

    rlkv-bench generation
    rlkv-bench generation --methods full random-heads@0.6 rkv@1024 --new-tokens 8192 --memory-gib 80
    """

    rounds: int = 3
    """Turns that each setting takes."""
    methods: tuple[str, ...] = (FULL, "random-heads@0.5", "rkv@256")
    """As of rlkv-eval: full, random-heads@SPARSITY, POLICY@BUDGET, or both joined by +."""
    batches: tuple[int, ...] = (1, 8)
    """Texts written together."""
    memory_gib: float | None = None
    """Also run each method with the largest batch whose weights and KV in use fit into this memory.

    It must leave room for activations and for the headroom of buffers.
    """
    prompt_tokens: int = 128
    """Tokens of a prompt."""
    new_tokens: int = 512
    """Tokens written after it."""
    sink: int = 16
    """First tokens that compressible heads keep."""
    window: int = 64
    """Last tokens that they keep."""

    def check(self) -> None:
        super().check()
        at_least(
            1, batches=self.batches, prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens
        )
        _ = self.parsed

    def model(self) -> PreTrainedModel:
        """With positions for the texts."""
        return self.build_model(self.prompt_tokens + self.new_tokens)

    @cached_property
    def parsed(self) -> list[CompressionMethod]:
        """The methods; ValueError for names that are not known."""
        return parse_methods(self.methods, [])

    def run(self) -> None:
        """Measure and write the results; tokens/s by batch size, KV of a text as it grows."""
        model = self.model()
        results = measure_generation(self, model)
        curves: dict[str, list[Point]] = {method.name: [] for method in self.parsed}
        for row in sorted(
            (row for row in results if "seconds" in row), key=lambda row: row["batch"]
        ):
            curves[row["method"]].append((row["batch"], *[row["tokens_per_second"]] * 3))
        text = f"{self.prompt_tokens} + {self.new_tokens} tokens"
        grown: dict[str, list[Point]] = {}
        for method in self.parsed:
            sizes = [size / 2**20 for size in bytes_by_length(self, model, method)]
            grown[method.name] = [
                (self.prompt_tokens + i, size, size, size) for i, size in enumerate(sizes)
            ]
        plain, x, y = (
            {name: {"marker": ""} for name in grown},
            "tokens read and written",
            "MiB of KV in use",
        )
        panels = [
            Panel(text, "texts at once", curves, "tokens/s", limits=None, log=True),
            Panel("one text", x, grown, y, styles=plain, limits=None, ticks=False),
        ]
        self.write("generation", results, COLUMNS, panels, sharey=False)


@dataclass
class Setting:
    """A method with a batch size, and what its turns measured: seconds for the prompts and for the
    new tokens.

    ``fits``: whether no turn ran out of memory; a setting that does not fit takes no further turns
    and has no figures.
    """

    method: CompressionMethod
    batch: int
    prompt_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)
    kv_bytes: int = 0
    peak_bytes: int | None = None
    fits: bool = True

    def new_cache(self, config: GenerationConfig, model: PreTrainedModel) -> Cache:
        """Empty; transformers' own for the full cache."""
        if self.method.name == FULL:
            return DynamicCache()
        full = self.method.allocation(model.config, {}, seed=0).full
        cache = HeadReallocationCache(full, config.sink, config.window, eviction=self.method.policy)
        cache.state.limit = config.prompt_tokens + config.new_tokens
        return cache


def bytes_by_length(
    config: GenerationConfig, model: PreTrainedModel, method: CompressionMethod
) -> list[int]:
    """Bytes of KV in use for one text: after its prompt, after one more token, ..."""
    tokens = torch.arange(config.prompt_tokens, config.prompt_tokens + config.new_tokens)
    settings = CacheSettings(config.sink, config.window, eviction=method.policy)
    full = method.allocation(model.config, {}, seed=0).full
    prompts = torch.full_like(tokens, config.prompt_tokens)
    return kv_nbytes(settings, full, EntrySize.of(model), prompts, tokens)[0].tolist()


def largest_batch(
    config: GenerationConfig, model: PreTrainedModel, method: CompressionMethod
) -> int:
    """Texts whose KV fits next to the weights in ``memory_gib``.

    ValueError if not even one does.
    """
    assert config.memory_gib is not None
    weights = sum(parameter.nbytes for parameter in model.parameters())
    found = int((config.memory_gib * GIB - weights) // max(bytes_by_length(config, model, method)))
    if found < 1:
        raise ValueError(
            f"--memory-gib {config.memory_gib:g} does not hold the weights ({weights / GIB:.2f} "
            "GiB) and one text of "
            f"{method.name}: give more memory or fewer --new-tokens"
        )
    return found


@torch.inference_mode()
def take_turn(config: GenerationConfig, model: PreTrainedModel, setting: Setting) -> None:
    """Read the prompts and write greedily, with times and bytes noted in ``setting``.

    The cache is dropped.
    """
    model.set_attn_implementation("sdpa" if setting.method.name == FULL else IMPLEMENTATION)
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(model.device)
    cache = setting.new_cache(config, model)
    shape = (setting.batch, config.prompt_tokens)
    token = torch.randint(config.vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(
        model.device
    )

    def read() -> None:
        nonlocal token
        output: Any = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1].argmax(-1, keepdim=True)

    def write() -> None:
        for _ in range(config.new_tokens - 1):  # reading gave the first one
            read()

    setting.prompt_seconds.append(timed(read, model.device))
    setting.decode_seconds.append(timed(write, model.device))
    setting.kv_bytes = cache_nbytes(cache)
    setting.peak_bytes = torch.cuda.max_memory_allocated(model.device) if cuda else None


def measure_generation(config: GenerationConfig, model: PreTrainedModel) -> list[dict[str, Any]]:
    """A row for each method and batch; times are medians over the turns, absent where the memory
    did not suffice.
    """
    settings = [Setting(method, batch) for method in config.parsed for batch in config.batches]
    if config.memory_gib is not None:
        settings += [
            Setting(method, largest_batch(config, model, method)) for method in config.parsed
        ]
    with progress_bar("generation", "turns", len(settings) * config.rounds) as bar:
        for setting in turns(settings, config.rounds):
            setting.fits = setting.fits and fits(partial(take_turn, config, model, setting))
            bar.advance()
    return [_row(config, model, setting) for setting in settings]


def _row(config: GenerationConfig, model: PreTrainedModel, setting: Setting) -> dict[str, Any]:
    if not setting.fits:
        return {"method": setting.method.name, "batch": setting.batch, "note": "out of memory"}
    prompt, decode = (
        statistics.median(setting.prompt_seconds),
        statistics.median(setting.decode_seconds),
    )
    heads, cached = config.layers * config.kv_heads, config.prompt_tokens + config.new_tokens - 1
    return {
        "method": setting.method.name,
        "batch": setting.batch,
        "kv_bytes": setting.kv_bytes,
        "kv_bytes_full": setting.batch * cached * heads * EntrySize.of(model).nbytes,
        "peak_bytes": setting.peak_bytes,
        "prompt_seconds": prompt,
        "ms_per_token": 1000 * decode / max(1, config.new_tokens - 1),
        "seconds": prompt + decode,
        "tokens_per_second": setting.batch * config.new_tokens / (prompt + decode),
    }
