"""The kernel that cuts gaps out of block tables, through the Triton interpreter, against torch."""

# ruff: noqa: I001  (the switch comes first)
from __future__ import annotations

import tests.helpers.interpreted  # noqa: F401

import torch

from rlkv.vllm.packing import SinkWindowDemand
from rlkv.kernels.gaps import cut_gaps
from rlkv.vllm.paged import GapRules
from tests.helpers.gaps import without_gaps

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


def different(block: int, sink: int, window: int, queries: int) -> int:
    rules = GapRules(SinkWindowDemand(block, sink, window), 6000)
    requests = [(min(n, queries), length) for n, length in REQUESTS]
    starts = torch.tensor([0] + [n for n, _ in requests]).cumsum(0).int()
    lengths = torch.tensor([length for _, length in requests], dtype=torch.int32)
    table = torch.randint(1, 9999, (len(requests), 5000 // block + 3), dtype=torch.int32)
    prefixes = torch.randint(sink, sink + 99, (len(requests),), dtype=torch.int32)
    expected = without_gaps(rules.demand, table, lengths, starts, prefixes, rules.width(queries))
    buffers = (
        torch.full((16, 9000), -1, dtype=torch.int32),
        torch.full((16,), -1, dtype=torch.int32),
    )
    rows, width = expected[0].shape
    out = buffers[0][:rows, :width], buffers[1][:rows]
    cut_gaps(table, lengths, starts, prefixes, block, window, out)
    outside = (buffers[0][rows:], buffers[0][:, width:], buffers[1][rows:])
    wrong = sum(int((found != own).sum()) for found, own in zip(out, expected, strict=True))
    return wrong + sum(int((rest != -1).sum()) for rest in outside)


def main() -> None:
    for sizes in ((5, 0, 1), (16, 16, 64), (8, 7, 3), (4, 600, 600), (16, 16, 5999)):
        for most in (1, 150):
            print("gaps", different(*sizes, most))
