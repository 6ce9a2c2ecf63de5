"""The decode kernel on a GPU: the interpreter's cases, captured graphs, and what only shows when
programs race.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from rlkv.eviction import TOVA
from tests.helpers.cached_logits import MIXED, cached_logits, draw_ids
from tests.helpers.decode_cases import Case, Run, covering_cases, extreme_cases, rmse_ratio
from tests.helpers.models import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_equals_the_reference_and_the_torch_path(dtype: torch.dtype) -> None:
    bound = 1e-5 if dtype == torch.float32 else 5e-3  # sums of at most 1,024 terms; 8 bits
    for case in covering_cases() + extreme_cases():
        errors = Run(case, dtype, "cuda").errors()
        assert errors.reference <= bound, case
        assert errors.torch_path <= max(bound, 1e-3), (
            case
        )  # float32 products of fused kernels may be rounded more
        assert errors.buffers == 0, case


def test_models_decode_as_without_it() -> None:
    from tests.helpers.decode_flows import FLOWS, difference

    for flow in FLOWS:
        found, launches_amiss = difference(flow, "cuda")
        assert found < 1e-3, flow.__name__  # float32 products of fused kernels may be rounded more
        assert launches_amiss == 0


# the last of the three layers has no heads that a policy could evict from
@pytest.mark.parametrize(("policy", "layers"), [(None, 3), (TOVA(budget=8), 1)])
def test_the_cache_uses_it_where_no_policy_evicts(policy: TOVA | None, layers: int) -> None:
    from rlkv.kernels import decode as kernel_module

    model = make_tiny_model("llama").to("cuda")
    model.set_attn_implementation(IMPLEMENTATION)
    cache = HeadReallocationCache(MIXED, 3, 5, eviction=policy)
    cache.state.decode_kernel = True
    with mock.patch.object(kernel_module, "decode", wraps=kernel_module.decode) as launches:
        cached_logits(model, draw_ids(2, 12).to("cuda"), cache, [10, 1, 1])
    assert launches.call_count == 2 * layers


@pytest.mark.parametrize("heads", ["full", "compressible", "mixed"])
def test_a_captured_graph_goes_on_by_itself(heads: str) -> None:
    from rlkv.kernels.decode import decode

    case = Case(length=500, sizes=(4, 16), group=4, heads=heads, padded=True, size=64, processors=0)
    run = Run(case, torch.bfloat16, "cuda", steps=8)  # 507 columns: the buffers have 512
    (layer,) = run.by_kernel.layers
    step = run.plan(run.by_kernel, 499, 1)[0].decode_step
    buffers = [(store.keys, store.values) for store in layer.stores]
    both = (
        None if heads == "compressible" else buffers[0],
        None if heads == "full" else buffers[-1],
    )

    def states(column: int) -> tuple[torch.Tensor, ...]:
        query = run.query[:, :, column].unflatten(1, (-1, case.group))
        return query, run.key[:, :, column], run.value[:, :, column]

    inputs = tuple(torch.empty_like(new) for new in states(499))
    arguments = (*inputs, *both, layer.places, step, case.size**-0.5)
    for old, new in zip(inputs, states(499), strict=True):
        old.copy_(new)
    decode(*arguments)  # compiles; stores what the first replay stores again
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(*arguments)
        step.start += 1
    for column in range(499, 507):
        for old, new in zip(inputs, states(column), strict=True):
            old.copy_(new)
        graph.replay()
        found = out.flatten(1, 2)[:, None]
        assert rmse_ratio(found, run.reference(column)) <= 5e-3, column


def test_the_output_does_not_depend_on_which_split_ends_last() -> None:
    from rlkv.kernels.decode import decode
    from rlkv.kernels.step import DecodeStep

    columns, window = 100_000, 64
    draw = torch.Generator("cuda").manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": "cuda", "generator": draw}
    full, ring = (
        tuple(torch.randn(2, 1, n, 128, **options) for _ in range(2))
        for n in (columns, 16 + window)
    )
    query, states = torch.randn(2, 2, 4, 128, **options), torch.randn(2, 2, 2, 128, **options)
    places = torch.tensor([-1, 0], dtype=torch.int32, device="cuda")
    numbers = (torch.tensor([n], device="cuda") for n in (columns - 1, 0, 16))
    step = DecodeStep(*numbers, window)
    outputs = [decode(query, *states, full, ring, places, step, 128**-0.5) for _ in range(300)]
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    keys, values = (plane.float() for plane in full)
    weights = torch.softmax(query[:, 1:].float() @ keys.transpose(2, 3) * 128**-0.5, dim=-1)
    assert rmse_ratio(outputs[0][:, 1:], weights @ values) <= 5e-3


def test_texts_that_grow_and_other_layers_compile_nothing() -> None:
    import triton

    compiled = []
    rest = {"group": 5, "size": 48, "processors": 0}  # a variant of this test alone
    with mock.patch.object(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **about: compiled.append(about)
    ):
        for heads, length, sizes in (
            ("mixed", 40, (0, 1)),
            ("full", 333, (1, 4)),
            ("compressible", 1001, (16, 64)),
        ):
            for padded in (False, True):
                case = Case(length=length, sizes=sizes, heads=heads, padded=padded, **rest)
                assert Run(case, torch.bfloat16, "cuda", steps=20).errors().buffers == 0
    assert len(compiled) == 1
