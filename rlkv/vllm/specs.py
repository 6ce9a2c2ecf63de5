"""Blocks of bins for the engine's memory management, and what they hold on ``/metrics``.

Importing this registers them in a process.  Blocks that fall out of a window are replaced by the
null block in the request's block table; the kernels skip this gap (:mod:`rlkv.vllm.paged`).  Under
eviction a request keeps as many blocks as its buffer has.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from rlkv.utils.files import write_json
from rlkv.vllm.packing import BufferDemand, SinkWindowDemand

logger = init_logger(f"vllm.{__name__}")

FOLDER = "RLKV_METRICS_DIR"  # of the environment, which the engine's processes inherit
EVERY = 5.0  # seconds between two reports of a bin: each walks all its block tables


class UsageCollector(Collector):
    """The reports of the schedulers' processes, read whenever the page is asked for."""

    def __init__(self) -> None:
        self.sparsity = 0.0
        self.ranks = 1
        memory = "/dev/shm"  # reports are not for the disk
        self.folder = tempfile.TemporaryDirectory(
            prefix="rlkv_", dir=memory if os.path.isdir(memory) else None
        )

    def collect(self) -> Iterator[Any]:
        bins = []
        for file in sorted(Path(self.folder.name).glob("*.json")):
            bins.append(json.loads(file.read_text()))
        blocks = GaugeMetricFamily("rlkv:kv_blocks", "Blocks that requests hold.", labels=["heads"])
        held = GaugeMetricFamily("rlkv:kv_bytes", "Bytes of KV in these blocks.", labels=["heads"])
        for kind in ("full", "compressible"):
            own = [found for found in bins if found["heads"] == kind]
            blocks.add_metric([kind], sum(found["blocks"] for found in own))
            held.add_metric([kind], self.ranks * sum(found["bytes"] for found in own))
        yield from (blocks, held)
        yield GaugeMetricFamily(
            "rlkv:kv_bytes_saved",
            "Bytes of KV that the full cache would hold for the same tokens, less those that are "
            "held; what requests share of a cached prefix counts for each of them.",
            value=self.ranks * sum(found["saved"] for found in bins),
        )
        yield CounterMetricFamily(
            "rlkv:evictions",
            "Compactions of a request's entries by the eviction policy, counted per block table.",
            value=sum(found["evictions"] for found in bins),
        )
        yield GaugeMetricFamily(
            "rlkv:sparsity", "Share of KV heads that are compressible.", value=self.sparsity
        )


_published: list[UsageCollector] = []  # of this process: none or one


def publish(sparsity: float, ranks: int) -> None:
    """Add to this process's ``/metrics``, and have the schedulers that it starts report.

    A scheduler counts the bytes of one of the ``ranks`` of tensor parallelism, which have as many
    each.  The page shows the sparsity, and counts the ranks, of the last engine.
    """
    if not _published:
        _published.append(UsageCollector())
        os.environ[FOLDER] = _published[0].folder.name
        REGISTRY.register(_published[0])
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            logger.warning(
                "rlkv: the metrics page of several API servers has no rlkv: lines: pass "
                "--api-server-count 1, and unset PROMETHEUS_MULTIPROC_DIR, to have them"
            )
    _published[0].sparsity = sparsity
    _published[0].ranks = ranks


class CountingManager(SingleTypeKVCacheManager):
    """A block manager that reports what its bin holds."""

    reported = 0.0  # when it last did, by the monotonic clock

    def report(self) -> None:
        """Write what the bin holds to ``FOLDER``, if it is time or no request is left."""
        now = time.monotonic()
        if now - self.reported < EVERY and self.req_to_blocks:
            return
        folder = os.environ.get(FOLDER)
        if folder is not None and Path(folder).is_dir():
            self.reported = now
            with suppress(OSError):  # a full disk must not stop the engine
                write_json(Path(folder, f"{os.getpid()}-{id(self)}.json"), self.usage())

    def usage(self) -> dict[str, Any]:
        """Return what the bin holds now, and saves against the full cache."""
        held = 0
        distinct = set()
        for table in self.req_to_blocks.values():
            own = [block.block_id for block in table if not block.is_null]
            held += len(own)
            distinct.update(own)
        # a block of several requests, of a cached prefix, is one in the full cache too; what heads
        # have given back of it is counted for each request
        saved = self.whole_blocks() - held
        block_bytes = self.kv_cache_spec.page_size_bytes
        return {
            "heads": "compressible" if isinstance(self, CompressibleManager) else "full",
            "blocks": len(distinct),
            "bytes": len(distinct) * block_bytes,
            "saved": saved * block_bytes,
            "evictions": self.evictions(),
        }

    def whole_blocks(self) -> int:
        """Count the blocks that the full cache would hold for the same tokens, by request."""
        # those that were given back are still places of the table
        return sum(len(table) for table in self.req_to_blocks.values())

    def evictions(self) -> int:
        return 0

    def allocate_new_blocks(self, *args: Any, **kwargs: Any) -> list[KVCacheBlock]:
        blocks = super().allocate_new_blocks(*args, **kwargs)
        if blocks:  # most steps of decoding need none
            self.report()
        return blocks

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        blocks = super().pop_blocks_for_free(request_id)
        self.report()
        return blocks


class CompressibleManager(CountingManager):
    """A block manager of compressible heads."""

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """Return none, for cascade attention: abstract in the base class of 0.31, gone in 0.32."""
        return 0


class _BinSpec:
    """A kind of blocks whose bin (:mod:`rlkv.vllm.packing`) has a block table of its own."""

    bin: int

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        return all(spec == self for spec in kv_cache_specs.values())

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Return the one spec of layers that may share a block table; AssertionError: they may not.

        The engine asks by trying.
        """
        assert all(spec == specs[0] for spec in specs[1:]), "different bins"
        return specs[0]


@dataclass(frozen=True, kw_only=True)
class PackedFullSpec(_BinSpec, FullAttentionSpec):
    """Blocks of full heads, for every token; ``protect_prompt``: of the compressible heads."""

    bin: int
    protect_prompt: bool = False


@dataclass(frozen=True, kw_only=True)
class SinkWindowSpec(_BinSpec, AttentionSpec):
    """Blocks of sinks, or a protected prompt if it is longer, and of the window."""

    bin: int
    sink: int
    window: int
    max_in_flight_tokens: int
    max_model_len: int
    protect_prompt: bool = False
    keep_prompt_window: bool = False

    @cached_property
    def demand(self) -> SinkWindowDemand:
        return SinkWindowDemand(
            self.block_size, self.sink, self.window, self.protect_prompt, self.keep_prompt_window
        )

    def most_blocks(self, max_model_len: int | None = None) -> int:
        """Return the most blocks that one request may hold at once."""
        longest = self.max_model_len if max_model_len is None else max_model_len
        if self.protect_prompt:  # it may be the whole text
            return self.demand.full(longest)
        moving = min(self.window - 1 + self.max_in_flight_tokens, longest)
        # the first moving token may lie anywhere in its block
        kept = self.demand.full(self.sink) + self.demand.full(moving) + 1
        if self.keep_prompt_window:  # it ends with a block
            kept += self.demand.full(self.window - 1)
        return min(kept, self.demand.full(longest))

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        return self.page_size_bytes * self.most_blocks(vllm_config.model_config.max_model_len)


@dataclass(frozen=True, kw_only=True)
class EvictingSpec(_BinSpec, AttentionSpec):
    """Blocks of entries under an eviction policy; fields as of :class:`BufferDemand`."""

    bin: int
    budget: int
    buffer: int
    observation: int
    group_size: int

    @cached_property
    def demand(self) -> BufferDemand:
        return BufferDemand(
            self.block_size, self.budget, self.buffer, self.observation, self.group_size
        )

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        longest = vllm_config.model_config.max_model_len
        return self.page_size_bytes * self.demand.compressible(longest)

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        # the engine looks slots up by position, even though they are not used here
        by_position = super().max_num_blocks_per_req(vllm_config, max_len)
        return max(by_position, self.demand.compressible(max_len))


class _PromptCaching(SingleTypeKVCacheManager):
    """A manager that caches only blocks of prompts where prompts are protected.

    A token sees more in a protected prompt than behind it.
    """

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        if self.kv_cache_spec.protect_prompt:
            # rounded down to blocks, and a step may add several drafts
            if num_tokens + self.scheduler_block_size > request.num_prompt_tokens:
                # preempted from now on, it must not find its own text in another one's prompt
                request.skip_reading_prefix_cache = True
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        super().cache_blocks(request, num_tokens, *args, **kwargs)


class PackedFullManager(CountingManager, _PromptCaching, FullAttentionManager):
    """Block tables of one bin of full heads."""


class SinkWindowManager(CompressibleManager, _PromptCaching):
    """Block tables of one bin with sinks and a window."""

    def __init__(self, kv_cache_spec: Any, **kwargs: Any) -> None:
        # the engine sets this for its own kinds of spec only
        kwargs["max_admission_blocks_per_request"] = kv_cache_spec.most_blocks()
        super().__init__(kv_cache_spec, **kwargs)
        self._prompts: dict[str, int] = {}

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give back the blocks between the first tokens that are kept and the next token's window.

        But not the window at whose end a request with the same prompt can go on: full heads keep
        their blocks before it as long as the request runs, which are of no use without it.

        RuntimeError if a protected prompt grows, as streamed inputs make it.
        """
        demand = self.kv_cache_spec.demand
        prompt = num_prompt_tokens or 0
        sent = self._prompts.setdefault(request_id, prompt)
        if demand.protect_prompt and sent != prompt:
            raise RuntimeError(
                f"rlkv: the prompt of request {request_id} has grown to {prompt:,} tokens, but "
                "some of them were given up since: streamed inputs do not work with "
                "protect_prompt, send whole prompts"
            )
        outside = max(0, processed_computed_tokens - demand.window + 1) // self.block_size
        kept = demand.full(demand.prefix(prompt))
        if demand.keep_prompt_window:
            # the last token is read again
            hits = max(0, sent - 1) // self.scheduler_block_size
            end = hits * self.scheduler_block_size // self.block_size
            first = end - demand.full(demand.window - 1)
            self._remove_blocks_in_range(request_id, kept, min(first, outside))
            kept = max(kept, end)
        self._remove_blocks_in_range(request_id, kept, outside)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._prompts.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        # the base class's cap counts the gap of a cached prefix as blocks that the request holds
        needed = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, *args, **kwargs
        )
        most = self.max_admission_blocks_per_request
        if not apply_admission_cap or most is None:
            return needed
        held = sum(not block.is_null for block in self.req_to_blocks.get(request_id, ()))
        return min(needed, max(0, most - held))

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: Any,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Find the longest cached prefix of whole blocks.

        The sinks and a whole window must be there at its end; of a protected prompt every block.
        """
        assert not drop_eagle_block, "drafts of a model are refused at start"
        assert dcp_world_size * pcp_world_size == 1, "context parallelism is refused at start"
        block_size = kv_cache_spec.block_size
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            block_size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        step = max(1, alignment_tokens // block_size)
        demand = kv_cache_spec.demand
        found: dict[int, Sequence[KVCacheBlock] | None] = {}

        def cached(number: int) -> bool:
            if number not in found:
                found[number] = block_pool.get_cached_block(hashes[number], kv_cache_group_ids)
            return bool(found[number])

        longest = max_length // block_size
        wanted = longest if kv_cache_spec.protect_prompt else demand.full(kv_cache_spec.sink)
        sinks = 0
        while sinks < min(wanted, longest) and cached(sinks):
            sinks += 1
        if sinks < wanted:  # every token before the hit is needed
            longest = sinks
        end = longest // step * step
        while True:
            window = range(max(sinks, end - demand.full(kv_cache_spec.window - 1)), end)
            if all(cached(number) for number in window):
                break
            end -= step
        kept = [*range(min(sinks, end)), *window]
        tables = tuple([block_pool.null_block] * end for _ in kv_cache_group_ids)
        for number in kept:
            for table, block in zip(tables, found[number] or (), strict=True):
                table[number] = block
        return tables, end * block_size


class EvictingManager(CompressibleManager):
    """Block tables of one bin under an eviction policy."""

    def __init__(self, kv_cache_spec: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        assert not self.enable_caching, "prefix caching is switched off with the engine's settings"
        self._computed: dict[str, int] = {}
        self._ended = 0  # evictions of requests that are not running any more

    def evictions(self) -> int:
        demand = self.kv_cache_spec.demand
        return self._ended + sum(demand.evictions(tokens) for tokens in self._computed.values())

    def whole_blocks(self) -> int:
        return sum(self.kv_cache_spec.demand.full(tokens) for tokens in self._computed.values())

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """Count the missing blocks; RuntimeError if a request goes back to earlier tokens.

        Streamed inputs do.
        """
        if total_computed_tokens < self._computed.get(request_id, 0):
            raise RuntimeError(
                f"rlkv: request {request_id} is read again from token {total_computed_tokens:,} "
                "on, but some of its entries were evicted since: streamed inputs do not work with "
                "eviction, send whole prompts"
            )
        self._computed[request_id] = total_computed_tokens
        held = len(self.req_to_blocks.get(request_id, ()))
        return max(0, self.kv_cache_spec.demand.compressible(num_tokens) - held)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._ended += self.kv_cache_spec.demand.evictions(self._computed.pop(request_id, 0))
        return super().pop_blocks_for_free(request_id)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        slots = self.kv_cache_spec.demand.compressible(num_tokens) * self.block_size
        blocks = super().allocate_new_blocks(request_id, slots, slots)
        self.report()  # it evicts without new blocks
        return blocks

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        # what an eviction kept is not a prefix
        return tuple([] for _ in kv_cache_group_ids), 0


# the registry fills itself with the stock specs only as long as it is empty
KVCacheSpecRegistry._ensure_registered()
# the last: the kind with which a kind may share a block table
KVCacheSpecRegistry.register(PackedFullSpec, PackedFullManager, FullAttentionSpec)
KVCacheSpecRegistry.register(SinkWindowSpec, SinkWindowManager, SinkWindowSpec)
KVCacheSpecRegistry.register(EvictingSpec, EvictingManager, EvictingSpec)
