"""Part 1: which kernels torch's attention takes, and ours against float64 or plain Python."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from rlkv.benchmarks.turns import relative_error, timed
from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from rlkv.eviction import TOVA
from rlkv.rollout.footprint import GIB
from rlkv.utils.devices import attention_kernels
from tests.gpu.conftest import Record
from tests.helpers.cached_logits import MIXED, cached_logits, draw_ids
from tests.helpers.decode_kernel import STEPS, KernelRun, Shape
from tests.helpers.gaps import SIZES, wrong_entries
from tests.helpers.models import make_tiny_model

# --- torch's own kernels

# query heads, KV heads, queries, keys, mask, causal, groups in torch
CALLS = {
    "prompt": (32, 32, 512, 512, False, True, False),
    "prompt, groups": (32, 8, 512, 512, False, True, True),
    "padded prompt": (32, 32, 512, 512, True, False, False),
    "token": (8, 8, 4, 4096, False, False, False),
    "padded token": (8, 8, 4, 4096, True, False, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_fused_kernel_takes_the_calls_of_our_models(
    name: str, device: torch.device, dtype: torch.dtype, on_gpu: bool, record_property: Record
) -> None:
    query_heads, kv_heads, queries, keys, masked, causal, groups = CALLS[name]
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    query = torch.randn(2, query_heads, queries, 128, **options)
    key = torch.randn(2, kv_heads, keys, 128, **options)
    mask = None
    if masked:
        mask = torch.ones(2, 1, queries, keys, dtype=torch.bool, device=device)
    chosen = torch._fused_sdp_choice(
        query, key, key, attn_mask=mask, is_causal=causal, enable_gqa=groups
    )
    record_property("backend", SDPBackend(chosen).name)
    record_property("order", attention_kernels())
    assert not on_gpu or SDPBackend(chosen) != SDPBackend.MATH


@pytest.mark.gpu
@pytest.mark.parametrize("cudnn", [False, True])
def test_tokens_over_growing_keys_take_as_long_as_before(
    cudnn: bool, device: torch.device, record_property: Record
) -> None:
    """Measure what a plan for each length costs, for which cuDNN is off wherever a model runs."""
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    query = torch.randn(8, 32, 1, 128, **options)
    states = torch.randn(8, 32, 4096 + 256, 128, **options)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    free, _ = torch.cuda.mem_get_info(device)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    milliseconds = [0.0, 0.0]
    try:
        for turn in range(2):
            for end in range(4096, 4096 + 200):
                keys = states[:, :, :end]
                seconds, _ = timed(
                    partial(F.scaled_dot_product_attention, query, keys, keys), device
                )
                if end > 4096:  # the first loads the kernel
                    milliseconds[turn] += 1000 * seconds / 199
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    record_property("ms per new length", milliseconds[0])
    record_property("ms per known length", milliseconds[1])
    record_property("GiB of plans", (free - torch.cuda.mem_get_info(device)[0]) / GIB)
    assert cudnn or milliseconds[0] < 3 * milliseconds[1]


# --- the decode kernel

SHAPES = (
    Shape(rows=1, full=8, compressible=0, group=4, size=128, cached=1),
    Shape(rows=3, full=0, compressible=8, group=4, size=128, cached=900),
    Shape(rows=1, full=1, compressible=7, group=4, size=128, cached=32_000),
    Shape(rows=16, full=4, compressible=4, group=4, size=128, cached=8192),
    Shape(rows=2, full=1, compressible=3, group=7, size=128, cached=3000),
    Shape(rows=4, full=3, compressible=6, group=3, size=64, cached=600),
    Shape(rows=2, full=2, compressible=1, group=1, size=24, cached=63, sink=0, window=1),
    Shape(rows=2, full=1, compressible=2, group=8, size=256, cached=300, sink=1, window=4),
    Shape(rows=1, full=1, compressible=2, group=32, size=80, cached=400, sink=16, window=128),
)
# sums in float32; 8 and 11 bits in the weights and in the output
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}


@pytest.mark.gpu
@pytest.mark.parametrize("of", ALLOWED, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_decode_kernel_equals_float64(
    shape: Shape, of: torch.dtype, device: torch.device, record_property: Record
) -> None:
    pytest.importorskip("triton")
    error = KernelRun(shape, of, device).error()
    record_property("error", error)
    assert error <= ALLOWED[of]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
def test_a_captured_graph_goes_on_by_itself(shape: Shape, device: torch.device) -> None:
    pytest.importorskip("triton")
    run = KernelRun(shape, torch.bfloat16, device)
    run.launch(0)  # compiles; stores what the first replay stores again
    torch.cuda.synchronize()
    column = shape.cached
    inputs = (run.queries[0], run.keys[:, :, column], run.values[:, :, column])
    states = [state.clone() for state in inputs]
    with mock.patch.object(run, "inputs", return_value=states):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run.launch(0)
            run.step.start += 1
    for index in range(STEPS):
        for state, new in zip(states, run.inputs(index), strict=True):
            state.copy_(new)
        graph.replay()
        assert relative_error(out, run.wanted(index)) <= 5e-3, index


@pytest.mark.gpu
def test_the_output_does_not_depend_on_which_split_ends_last(device: torch.device) -> None:
    pytest.importorskip("triton")
    shape = Shape(rows=2, full=1, compressible=1, group=4, size=128, cached=100_000)
    run = KernelRun(shape, torch.bfloat16, device)
    outputs = [run.launch(0) for _ in range(300)]
    assert all(torch.equal(out, outputs[0]) for out in outputs)


@pytest.mark.gpu
def test_texts_that_grow_and_other_layers_compile_nothing(device: torch.device) -> None:
    triton = pytest.importorskip("triton")
    compiled: list[Any] = []
    hook = mock.patch.object(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **about: compiled.append(about)
    )
    rest = {"group": 5, "size": 48}  # a variant of this test alone
    with hook:
        for full, compressible, cached, window in ((1, 2, 40, 1), (2, 0, 333, 4), (0, 1, 1001, 64)):
            for rows in (1, 2):
                shape = Shape(rows, full, compressible, cached=cached, window=window, **rest)
                assert KernelRun(shape, torch.bfloat16, device).error() <= 5e-3
    assert len(compiled) == 1


# the last of the three layers has no heads that a policy could evict from
@pytest.mark.gpu
@pytest.mark.parametrize(("policy", "layers"), [(None, 3), (TOVA(budget=8), 1)])
def test_a_model_decodes_by_it_as_without_it(
    policy: TOVA | None, layers: int, device: torch.device
) -> None:
    pytest.importorskip("triton")
    from rlkv.kernels import decode as kernel_module

    model = make_tiny_model("llama").to(device)
    model.set_attn_implementation(IMPLEMENTATION)
    logits = []
    for kernel in (False, True):
        cache = HeadReallocationCache(MIXED, 3, 5, eviction=policy)
        cache.state.decode_kernel = kernel
        with mock.patch.object(kernel_module, "decode", wraps=kernel_module.decode) as launches:
            logits.append(cached_logits(model, draw_ids(2, 12).to(device), cache, [10, 1, 1]))
        assert launches.call_count == 2 * layers * kernel
    # float32 products of fused kernels may be rounded more
    assert (logits[0] - logits[1]).abs().max() < 1e-3


# --- the kernel of the vLLM plugin


@pytest.mark.gpu
@pytest.mark.parametrize(("block", "sink", "window"), SIZES)
def test_gaps_are_cut_out_of_block_tables(
    block: int, sink: int, window: int, device: torch.device
) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    assert wrong_entries(block, sink, window, 150, device) == 0
