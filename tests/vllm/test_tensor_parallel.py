"""Two ranks of tensor parallelism, each a process: every greedy token the reference's choice, bytes
as planned.
"""

from __future__ import annotations

from typing import Any

import pytest

from rlkv.eviction import make_policy
from tests.helpers.engines import (
    BLOCK,
    ELEMENT,
    HEAD_SIZE,
    SINK,
    WINDOW,
    Served,
    check_equal,
    engine,
    generate,
    held_blocks,
    need_vllm,
    random_prompts,
)

need_vllm()

from rlkv.vllm.packing import plan_heads
from rlkv.vllm.settings import parse_settings

RANKS = 2
PARALLEL: dict[str, Any] = {"tensor_parallel_size": RANKS, "distributed_executor_backend": "mp"}
LENGTHS = (5, SINK, BLOCK + 1, SINK + WINDOW, 200, 333)
RKV = {"name": "rkv", "budget": 40, "buffer": 24}


def bytes_of_blocks(worker: Any) -> list[float]:
    """Of each bin's cache on one rank."""
    context = worker.vllm_config.compilation_config.static_forward_context
    caches = [layer.kv_cache for name, layer in context.items() if name.startswith("rlkv_bins")]
    return [cache.nbytes / len(cache) for cache in caches]


def test_two_ranks(llama: Served) -> None:
    """Chunks, cached prefixes, and a sparsity of which 2 ranks leave 0.5, as 7 full heads do not
    divide by 2.
    """
    from vllm import SamplingParams

    request, options = (
        llama.request(0.55),
        {"enable_prefix_caching": True, "max_num_batched_tokens": 100},
    )
    with engine(llama, request, async_scheduling=False, **PARALLEL, **options) as llm:
        plans = plan_heads(
            parse_settings(llm.llm_engine.vllm_config.additional_config["rlkv"]),
            BLOCK,
            2,
            1024,
            RANKS,
        )
        block_bytes = plans[0].block_entries * 2 * HEAD_SIZE * ELEMENT
        assert llm.llm_engine.collective_rpc(bytes_of_blocks) == [[block_bytes] * 2] * RANKS
        prompts = random_prompts(LENGTHS)
        assert check_equal(llama, 0.5, generate(llm, prompts, 80)) == 480
        assert check_equal(llama, 0.5, generate(llm, prompts, 20)) == 120
        params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True, detokenize=False)
        llm.llm_engine.add_request("0", {"prompt_token_ids": random_prompts((90,))[0]}, params)
        for _ in range(101):
            llm.llm_engine.step()
        assert held_blocks(llm) == plans[0].blocks(190) == plans[1].blocks(190)
        llm.llm_engine.abort_request(["0"])


@pytest.mark.parametrize(
    ("request_changes", "sizes"),
    [
        ({"eviction": RKV}, {"eviction": make_policy(**RKV)}),
        ({"prefill": "full"}, {"sink": SINK, "window": WINDOW, "prefill": "full"}),
    ],
    ids=["rkv", "full"],
)
def test_two_ranks_with_eviction_and_full_prefill(
    llama: Served, request_changes: dict[str, Any], sizes: dict[str, Any]
) -> None:
    with engine(llama, llama.request(0.25, **request_changes), **PARALLEL) as llm:
        outputs = generate(llm, random_prompts(LENGTHS), 80)
    assert check_equal(llama, 0.25, outputs, sizes=sizes) == 480


@pytest.mark.parametrize(
    ("ranks", "full", "message"),
    [
        (8, ["1100"] * 4, "--tensor-parallel-size 8 and 4 KV heads a layer"),
        (2, ["1100", "1100", "1100", "1000"], "7 full heads are not spread evenly over 2 ranks"),
    ],
)
def test_uneven_shares_are_refused(
    llama: Served, ranks: int, full: list[str], message: str
) -> None:
    request = {"rlkv": {"full": full, "sink": SINK, "window": WINDOW}}
    with (
        pytest.raises(ValueError, match=message),
        engine(llama, request, **{**PARALLEL, "tensor_parallel_size": ranks}),
    ):
        pass
