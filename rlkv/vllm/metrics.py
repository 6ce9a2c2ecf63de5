"""What head reallocation holds and saves, on the engine's own ``/metrics`` page."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from rlkv.vllm.blocks.usage import FOLDER, BinUsage, read_usage

KINDS = {True: "full", False: "compressible"}
MEMORY = Path("/dev/shm")  # reports are not for the disk


class UsageCollector(Collector):
    """Reads the reports of the scheduler's process whenever the page is asked for."""

    def __init__(self, sparsity: float) -> None:
        self.sparsity = sparsity
        self.folder = tempfile.TemporaryDirectory(prefix="rlkv_", dir=MEMORY if MEMORY.is_dir() else None)

    def collect(self) -> Iterator[Any]:
        bins = read_usage(self.folder.name)
        blocks = GaugeMetricFamily("rlkv:kv_blocks", "Blocks that requests hold.", labels=["heads"])
        held = GaugeMetricFamily("rlkv:kv_bytes", "Bytes of KV in these blocks.", labels=["heads"])
        for full, kind in KINDS.items():
            own = [found for found in bins if found.full == full]
            blocks.add_metric([kind], sum(found.blocks for found in own))
            held.add_metric([kind], sum(found.blocks * found.block_bytes for found in own))
        yield from (blocks, held)
        about = "Bytes of KV that the full cache would hold for the same tokens, less those that are held."
        yield GaugeMetricFamily("rlkv:kv_bytes_saved", about, value=sum(map(_saved, bins)))
        about = "Compactions of a request's entries by the eviction policy, counted per block table."
        yield CounterMetricFamily("rlkv:evictions", about, value=sum(found.evictions for found in bins))
        yield GaugeMetricFamily("rlkv:sparsity", "Share of KV heads that are compressible.", value=self.sparsity)


def _saved(own: BinUsage) -> int:
    return (own.whole - own.blocks) * own.block_bytes


_published: list[UsageCollector] = []  # of this process: none or one


def publish(sparsity: float) -> None:
    """Add to this process's ``/metrics``, and have the schedulers that it starts report; the last engine's sparsity."""
    if not _published:
        _published.append(UsageCollector(sparsity))
        os.environ[FOLDER] = _published[0].folder.name
        REGISTRY.register(_published[0])
    _published[0].sparsity = sparsity
