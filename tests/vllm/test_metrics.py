"""What the engine's ``/metrics`` says about head reallocation, against the blocks that its managers
hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engines import (
    BLOCK,
    ELEMENT,
    HEAD_SIZE,
    Served,
    block_manager,
    engine,
    held_blocks,
    need_vllm,
    random_prompts,
)

need_vllm()

from prometheus_client import REGISTRY

from rlkv.vllm import specs as usage
from rlkv.vllm.packing import BufferDemand

ENTRY = 2 * HEAD_SIZE * ELEMENT  # bytes of a key and a value
EVICTION = {"name": "rkv", "budget": 24, "buffer": 8, "observation": 4}


def shown(name: str, **labels: str) -> float:
    value = REGISTRY.get_sample_value(f"rlkv:{name}", labels)
    assert value is not None
    return value


@pytest.mark.parametrize("settings", [{}, {"eviction": EVICTION}], ids=["sinks and window", "rkv"])
def test_blocks_bytes_and_evictions(
    llama: Served, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    monkeypatch.setattr(usage, "EVERY", 0.0)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, detokenize=False)
    with engine(
        llama, llama.request(0.5, **settings), num_gpu_blocks_override=400, async_scheduling=False
    ) as llm:
        core = llm.llm_engine
        assert shown("sparsity") == 0.5
        (prompt,) = random_prompts((300,))
        core.add_request("0", {"prompt_token_ids": prompt}, params)
        evictions = shown("evictions_total")
        for _ in range(41):
            core.step()
        tokens = len(prompt) + 40  # in the cache
        blocks = {kind: shown("kv_blocks", heads=kind) for kind in ("full", "compressible")}
        assert sum(blocks.values()) == held_blocks(llm)
        heads = llama.allocation(0.5)
        in_full = blocks["full"] * BLOCK * ENTRY
        assert shown("kv_bytes", heads="full") == heads.num_full * in_full
        kept = heads.num_compressible * blocks["compressible"] * BLOCK * ENTRY
        assert shown("kv_bytes", heads="compressible") == kept
        whole = heads.num_compressible * -(-tokens // BLOCK) * BLOCK * ENTRY
        assert shown("kv_bytes_saved") == whole - kept > 0
        if settings:
            demand = BufferDemand(BLOCK, 24, 8, 4, 2)
            assert (
                shown("evictions_total") - evictions
                == sum(map(demand.evicts_before, range(tokens)))
                > 30
            )
        core.abort_request(
            list(block_manager(llm).coordinator.single_type_managers[0].req_to_blocks),
            internal=True,
        )
        assert [shown("kv_blocks", heads=kind) for kind in ("full", "compressible")] == [0, 0]
        assert shown("kv_bytes_saved") == 0
        if settings:
            assert shown("evictions_total") - evictions > 30


def test_reports_come_every_five_seconds_and_when_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bin:
        req_to_blocks: dict[str, Any] = {"0": []}  # noqa: RUF012

        def usage(self) -> usage.BinUsage:
            reported.append(usage.BinUsage(False, 1, 2, 3))
            return reported[-1]

    reporter, bins = usage.Reporter(), [Bin(), Bin()]
    reporter.bins.update(bins)  # type: ignore[arg-type]
    reported: list[usage.BinUsage] = []
    clock = iter((99.0, 100.0, 104.9, 105.1, 105.2, 105.3))
    monkeypatch.setattr(usage.time, "monotonic", lambda: next(clock))
    monkeypatch.delenv(usage.FOLDER, raising=False)
    reporter.report()
    assert not reported, "nobody asked"
    monkeypatch.setenv(usage.FOLDER, str(tmp_path))
    for number in (2, 2, 4):
        reporter.report()
        assert len(reported) == number
    bins[0].req_to_blocks = {}
    reporter.report()
    assert len(reported) == 4, "another bin still holds a request"
    bins[1].req_to_blocks = {}
    reporter.report()
    assert len(reported) == 6
    assert usage.read_usage(tmp_path) == reported[-2:]
    assert len(list(tmp_path.iterdir())) == 1


def test_resolved_settings_publish_nothing(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that a server has started, or of a program without a page."""
    published: list[float] = []
    monkeypatch.setattr("rlkv.vllm.specs.publish", published.append)
    full = ["".join("01"[kept] for kept in row) for row in llama.allocation(0.5).full.tolist()]
    with engine(
        llama, {"rlkv": {"full": full, "sink": 4, "window": 16}}, num_gpu_blocks_override=100
    ):
        assert not published
    with engine(llama, llama.request(0.5), num_gpu_blocks_override=100):
        assert published == [0.5]
