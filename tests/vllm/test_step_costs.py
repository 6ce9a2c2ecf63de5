"""What the layout of the published allocations costs in every step, and that the page of the
results says so.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.vllm.packing import SinkWindowDemand, plan_packing
from rlkv.vllm.paged import GapRules, cut_step
from tests.helpers.gaps import without_gaps
from tests.helpers.paths import PUBLISHED_GATES, ROOT

PAGES = ROOT / "docs" / "results" / "serving"
PAGE, PROMPTS = PAGES / "bins.md", PAGES / "prompts.md"
# Block tables, builds of metadata, parts and waste of the layout before, in which each part was a
# layer of the engine:
# computed once by its own plan (commit 5a5ddac), with a build for each size of the parts in a block
# table.
BEFORE = {
    ("Llama-3.1-8B-R1", 0.2): (2, 11, 53, 1.024),
    ("Llama-3.1-8B-R1", 0.4): (2, 13, 60, 1.011),
    ("Llama-3.1-8B-R1", 0.5): (2, 15, 62, 1.000),
    ("Llama-3.1-8B-R1", 0.6): (3, 17, 63, 1.015),
    ("Llama-3.1-8B-R1", 0.8): (5, 16, 57, 1.019),
    ("Qwen-2.5-7B-R1", 0.2): (2, 7, 44, 1.024),
    ("Qwen-2.5-7B-R1", 0.4): (2, 8, 50, 1.010),
    ("Qwen-2.5-7B-R1", 0.5): (2, 8, 50, 1.000),
    ("Qwen-2.5-7B-R1", 0.6): (3, 10, 49, 1.016),
    ("Qwen-2.5-7B-R1", 0.8): (6, 12, 42, 1.026),
    ("Qwen-3-4B-Thinking", 0.2): (2, 15, 61, 1.024),
    ("Qwen-3-4B-Thinking", 0.4): (2, 16, 68, 1.010),
    ("Qwen-3-4B-Thinking", 0.5): (2, 16, 69, 1.000),
    ("Qwen-3-4B-Thinking", 0.6): (3, 17, 66, 1.015),
    ("Qwen-3-4B-Thinking", 0.8): (5, 16, 60, 1.001),
}


def row_of(model: str, sparsity: float) -> str:
    gates = HeadGates.load(PUBLISHED_GATES / "rlkv" / model)
    plan = plan_packing(
        HeadAllocation.from_gates(gates, sparsity).full, SinkWindowDemand(16, 16, 64), 3000
    )
    parts = sum(len(plan.of_layer(layer)) for layer in range(gates.num_layers))
    tables, builds, before, waste = BEFORE[model, sparsity]
    blocks = " + ".join(f"{len(own.heads)} x {own.demand.block_size}" for own in plan.bins)
    now = len(plan.bins)  # a builder per bin: tests/vllm/test_pool.py counts them in an engine
    looks = f"{2 * before} -> {parts}"  # of metadata and slots, by the engine's name of a layer
    held = plan.held(3000) / plan.ideal(3000)
    return (
        f"| {model} | {sparsity:g} | {blocks} | {tables} -> {now} | {builds} -> {now} | {before} "
        f"-> {parts} | {looks} "
        f"| {waste:.3f} -> {held:.3f} |"
    )


@pytest.mark.parametrize(("model", "sparsity"), BEFORE, ids=str)
def test_the_page_says_what_a_step_costs(model: str, sparsity: float) -> None:
    row = row_of(model, sparsity)
    assert row in PAGE.read_text(), f"write this line into {PAGE}:\n{row}"


def entries_read(length: int, step: int, cut: bool) -> int:
    """Entries that the Triton kernel reads for the queries of a prompt in steps of so many tokens:
    each query those of its request's table, which its mask "the first S or the last W" does not
    shorten.
    """
    demand, total = SinkWindowDemand(16, 16, 64), 0
    rules, table = (
        GapRules(demand, length),
        torch.arange(demand.full(length), dtype=torch.int32)[None],
    )
    for end in range(step, length + 1, step):
        ends = [piece.end for piece in cut_step([0, step])] if cut else [step]
        starts, lengths = torch.tensor([0, *ends]), end - step + torch.tensor(ends)
        prefixes, width = torch.full((len(ends),), demand.sink), rules.width(step)
        _, shorter = without_gaps(
            demand, table.expand(len(ends), -1), lengths, starts, prefixes, width
        )
        total += int((starts.diff() * shorter).sum())
    return total


@pytest.mark.parametrize(("length", "step"), [(8192, 8192), (8192, 2048), (32768, 8192)])
def test_the_page_says_what_a_prompt_costs(length: int, step: int) -> None:
    before, now, stock = (
        entries_read(length, step, False),
        entries_read(length, step, True),
        length * (length + 1) // 2,
    )
    assert now <= length * (16 + 64 + 128 + 16)  # the window may begin anywhere in a block
    row = (
        f"| {length:,} | {step:,} | {stock / 1e6:.1f} | {before / 1e6:.1f} ({before / stock:.2f}) "
        f"| {now / 1e6:.1f} ({now / stock:.3f}) |"
    )
    assert row in PROMPTS.read_text(), f"write this line into {PROMPTS}:\n{row}"


def test_full_heads_share_metadata_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend whose metadata are for one number of heads is not used, and no builder makes a
    schedule for one.
    """
    pytest.importorskip("vllm")
    from vllm.v1.attention.backends.triton_attn import (
        TritonAttentionBackend,
        TritonAttentionMetadataBuilder,
    )

    from rlkv.vllm import backends as backend

    class Planned(TritonAttentionBackend):
        @staticmethod
        def get_name() -> str:
            return "FLASHINFER"

    monkeypatch.setattr(backend, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    asked: list[bool] = []
    monkeypatch.setattr(
        TritonAttentionMetadataBuilder,
        "build",
        lambda self, prefix, common, fast_build=False: asked.append(fast_build),
    )
    for stock, expected in ((TritonAttentionBackend, "TRITON_ATTN"), (Planned, "TRITON_ATTN")):
        layer: Any = SimpleNamespace(attn_backend=stock)
        found = backend.full_backend(layer)
        assert found.get_name() == expected
        assert (found.__mro__[1] is stock) == (stock is TritonAttentionBackend)
        builder = found.get_builder_cls()
        builder.build(object.__new__(builder), 0, None)
    assert asked == [True, True]
