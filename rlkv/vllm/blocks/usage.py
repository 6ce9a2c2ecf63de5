"""What the bins hold, from the process of the scheduler to that of ``/metrics``, in small files."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager

from rlkv.utils.atomic import write_json

FOLDER = "RLKV_METRICS_DIR"  # of the environment, which the engine's processes inherit
EVERY = 5.0  # seconds between two reports: each walks all block tables


@dataclass(frozen=True)
class BinUsage:
    """One bin of an engine.

    Attributes:
        full: whether its heads are full.
        blocks: that requests hold.
        block_bytes: KV of the bin's heads in one block.
        whole: blocks that the full cache would hold of these heads for the same tokens; where requests share a prefix,
            what heads have given back of it is counted for each.
        evictions: of requests, since the engine started.
    """

    full: bool
    blocks: int
    block_bytes: int
    whole: int
    evictions: int = 0


def read_usage(folder: str | Path) -> list[BinUsage]:
    """All bins of the engines that report to ``folder``."""
    reports = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]
    return [BinUsage(**found) for bins in reports for found in bins]


class Reporter:
    """All bins of one pool, which report together."""

    def __init__(self) -> None:
        self.bins: WeakSet[Counted] = WeakSet()
        self.reported = 0.0

    def report(self) -> None:
        """Write what the bins hold, if it is time or no request is left."""
        now = time.monotonic()
        if now - self.reported < EVERY and any(own.req_to_blocks for own in self.bins):
            return
        folder = os.environ.get(FOLDER)
        if folder is not None and Path(folder).is_dir():
            self.reported = now
            found = [asdict(own.usage()) for own in self.bins]
            with suppress(OSError):  # a full disk must not stop the engine
                write_json(Path(folder, f"{os.getpid()}-{id(self)}.json"), found)


_REPORTERS: WeakKeyDictionary[Any, Reporter] = WeakKeyDictionary()  # by the pool


class Counted(SingleTypeKVCacheManager):
    """A block manager that reports what its bin holds."""

    def __init__(self, kv_cache_spec: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.reporter = _REPORTERS.setdefault(self.block_pool, Reporter())
        self.reporter.bins.add(self)

    def usage(self) -> BinUsage:
        """What the bin holds now."""
        held = [block for table in self.req_to_blocks.values() for block in table if not block.is_null]
        # a block of several requests, of a cached prefix, is one
        blocks, shared = len(distinct := {block.block_id for block in held}), len(held) - len(distinct)
        full = isinstance(self, FullAttentionManager)
        return BinUsage(full, blocks, self.kv_cache_spec.page_size_bytes, self.whole() - shared)

    def whole(self) -> int:
        """Blocks of all tokens, request by request: those that were given back are still places of the table."""
        return sum(map(len, self.req_to_blocks.values()))

    def allocate_new_blocks(self, *args: Any, **kwargs: Any) -> list[KVCacheBlock]:
        blocks = super().allocate_new_blocks(*args, **kwargs)
        self.reporter.report()
        return blocks

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        blocks = super().pop_blocks_for_free(request_id)
        self.reporter.report()
        return blocks
