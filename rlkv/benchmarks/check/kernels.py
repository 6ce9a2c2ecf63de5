"""The Triton kernels, compiled for the GPU, each against plain torch.

To add a kernel, write a check of it here or next to it, and name it in :data:`KERNELS`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkv.benchmarks.check.one import CannotRun, Check, Findings, Setting

FILL = -7  # what lies around the kernel's output, and must stay
# (queries of this step, tokens) of each request: decoding, prompts in one or several pieces, and
# none
REQUESTS = [
    (1, 1),
    (1, 17),
    (1, 260),
    (9, 9),
    (7, 33),
    (1, 64),
    (150, 300),
    (40, 90),
    (2, 5000),
    (0, 0),
]
SIZES = [
    (5, 0, 1),
    (5, 4, 9),
    (16, 16, 64),
    (8, 7, 3),
    (16, 17, 33),
    (4, 600, 600),
]  # block, sink, window


@contextmanager
def _engine() -> Any:
    """Where vLLM is not installed, a stand-in hands on Triton, which is all that the kernels take
    from it.
    """
    if find_spec("triton") is None:
        raise CannotRun("triton is not installed")
    import triton
    import triton.language

    names = [] if find_spec("vllm") else ["vllm", "vllm.triton_utils"]
    modules = {name: ModuleType(name) for name in names}
    for module in modules.values():
        module.triton, module.tl = triton, triton.language  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def _without_gap(
    table: list[int], tokens: int, queries: int, block: int, sink: int, window: int
) -> list[int]:
    """The blocks of a request without those between its sinks and what its first query's window
    reaches.
    """
    sinks, first = -(-sink // block), max(tokens - queries - window + 1, 0) // block
    return [number for index, number in enumerate(table) if index < sinks or index >= first]


def run_gapless_tables(setting: Setting, found: Findings) -> None:
    """Block tables without the blocks between sinks and window."""
    with _engine():
        from rlkv.vllm.paged import cut_gaps
    for sizes in SIZES:
        wrong = _different(cut_gaps, setting.device, *sizes)
        found.require(
            not wrong,
            f"block {sizes[0]}, sink {sizes[1]}, window {sizes[2]}: {wrong} numbers are wrong",
        )
    found.figures |= {"cases": len(SIZES), "requests": len(REQUESTS)}


def _different(
    cut_gaps: Callable[..., None], device: torch.device, block: int, sink: int, window: int
) -> int:
    """How many numbers of the tables, of the lengths and around them are not as they should be."""
    torch.manual_seed(0)
    rows, columns = len(REQUESTS), 5000 // block + 3
    table = torch.randint(1, 9999, (rows, columns), dtype=torch.int32)
    starts = torch.tensor([0] + [queries for queries, _ in REQUESTS]).cumsum(0).int()
    lengths, sinks = torch.tensor([n for _, n in REQUESTS]).int(), torch.full((rows,), sink).int()
    wanted_table, wanted_lengths = (
        torch.full((rows + 1, columns + 9), FILL),
        torch.full((rows + 1,), FILL),
    )
    own_table, own_lengths = (wanted.int().to(device) for wanted in (wanted_table, wanted_lengths))
    unused = torch.zeros_like(
        wanted_table, dtype=torch.bool
    )  # behind the last block, where anything may stand
    for row, (queries, tokens) in enumerate(REQUESTS):
        kept = torch.tensor(_without_gap(table[row].tolist(), tokens, queries, block, sink, window))
        wanted_table[row, : len(kept)], unused[row, len(kept) : columns] = kept, True
        wanted_lengths[row] = tokens - block * (columns - len(kept))
    inputs: list[Tensor] = [tensor.to(device) for tensor in (table, lengths, starts, sinks)]
    cut_gaps(*inputs, block, window, (own_table[:rows, :columns], own_lengths[:rows]))
    differs = (own_table.cpu() != wanted_table) & ~unused
    return int(differs.sum()) + int((own_lengths.cpu() != wanted_lengths).sum())


KERNELS = [
    Check(
        "kernel_gapless_tables",
        "The kernel that cuts gaps out of block tables equals plain Python, and writes nowhere "
        "else.",
        run_gapless_tables,
        needs_gpu=True,
    )
]
