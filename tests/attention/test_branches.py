"""The fast forms of the two branches against the dense form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask

from rlkv.attention import branches
from rlkv.attention.branches import dense_attention, full_attention, local_attention
from rlkv.attention.call import MixedCall, local_rule
from rlkv.attention.mixed import mix
from rlkv.attention.softmax import Softmax
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.mixed_reference import full_mask, local_mask
from tests.helpers.pairwise import pairwise
from tests.helpers.transposed import in_both_layouts

SOFTMAX = Softmax(16**-0.5)
TOLERANCE = 2e-6  # float32 sums of at most 300 terms of size ~1
CPU = torch.device("cpu")
Padding = list[tuple[int, int]]  # left and right, of each row


def make_call(lengths: Padding, total: int, q_length: int | None = None) -> MixedCall:
    order = torch.arange(total)
    rows = [(order >= left) & (order < total - right) for left, right in lengths]
    q_length = total if q_length is None else q_length
    offset = total - q_length
    return MixedCall(len(lengths), q_length, total, offset, torch.stack(rows), True, lambda: None)


def make_states(call: MixedCall, groups: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(3 * groups, call.q_length), (3, call.kv_length), (3, call.kv_length)]
    return [torch.randn(call.batch_size, *shape, 16, requires_grad=True) for shape in shapes]


def real_queries(call: MixedCall) -> Tensor:
    assert call.padding_BK is not None
    return call.padding_BK[:, None, -call.q_length :, None]


FORMS: dict[str, Any] = {
    "form": (branches.banded_local_attention, branches.flex_local_attention),
    "lengths": ([(0, 0)], [(0, 0), (13, 0), (200, 0)], [(0, 30), (0, 0)], [(20, 15), (64, 0)]),
    "sizes": ((0, 1), (4, 16), (5, 70), (1, 100)),
}


@pytest.mark.parametrize("case", pairwise(FORMS), ids=lambda case: case["form"].__name__)
def test_local_forms_equal_the_dense_one(case: dict[str, Any]) -> None:
    form, lengths, sizes = case.values()
    call = make_call(lengths, 263)
    states = make_states(call)
    expected = dense_attention(*states, call.dense_local_mask(*sizes, CPU), SOFTMAX)
    # flex has no backward pass on a CPU, and refuses inputs that want one
    has_backward = form is branches.banded_local_attention
    inputs = states if has_backward else [state.detach() for state in states]
    found = form(*inputs, call, *sizes, SOFTMAX)
    real = real_queries(call).expand_as(expected)
    assert (found - expected)[real].abs().max() < TOLERANCE
    assert found.isfinite().all()
    if has_backward:
        weights = torch.randn_like(expected) * real
        wanted = torch.autograd.grad((expected * weights).sum(), states)
        given = torch.autograd.grad((found * weights).sum(), states)
        for left, right in zip(wanted, given, strict=True):
            assert (left - right).abs().max() < 20 * TOLERANCE


@pytest.mark.parametrize("lengths", [[(0, 0), (0, 0)], [(0, 0), (13, 0), (59, 0)]])
@pytest.mark.parametrize("sizes", [(0, 1), (4, 16), (30, 29)])
def test_one_query_reads_sinks_and_window_only(lengths: Padding, sizes: tuple[int, int]) -> None:
    call = make_call(lengths, 60, q_length=1)
    states = make_states(call)
    expected = dense_attention(*states, call.dense_local_mask(*sizes, CPU), SOFTMAX)
    found = branches.decode_local_attention(*states, call, *sizes, SOFTMAX)
    assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("q_length", [1, 7, 60])
@pytest.mark.parametrize(
    "lengths", [[(0, 0)], [(0, 5), (0, 0)], [(9, 0), (0, 0)], [(9, 4), (0, 0)]]
)
def test_full_attention_equals_the_dense_form(lengths: Padding, q_length: int) -> None:
    call = make_call(lengths, 60, q_length)
    states = make_states(call)
    mask = full_mask(call.padding_BK) | torch.eye(60, dtype=torch.bool)
    expected = dense_attention(*states, mask[:, None, -q_length:], SOFTMAX)
    real = real_queries(call).expand_as(expected)
    # the second one: S + W cover everything
    for found in (
        full_attention(*states, call, SOFTMAX),
        local_attention(*states, call, 60, 60, SOFTMAX),
    ):
        assert (found - expected)[real].abs().max() < TOLERANCE


def test_the_dense_mask_equals_the_reference() -> None:
    lengths = [(0, 0), (5, 0), (0, 9), (11, 3)]
    call = make_call(lengths, 40)
    found = call.dense_local_mask(3, 6, CPU)
    wanted = local_mask(call.padding_BK, 3, 6) | torch.eye(40, dtype=torch.bool)
    assert torch.equal(found[:, 0], wanted)
    assert torch.equal(make_call(lengths, 40, 7).dense_local_mask(3, 6, CPU), found[:, :, -7:])


BLOCKS = [(1, 0, 1), (127, 16, 64), (128, 128, 256), (129, 1000, 1), (700, 0, 1), (700, 130, 127)]


@pytest.mark.parametrize(("length", "sink", "window"), BLOCKS)
def test_the_block_mask_equals_torchs(length: int, sink: int, window: int) -> None:
    """Rows are padded on either side, at and off the edges of blocks."""
    half, third = (length // 2, 0), (0, length // 3)
    call = make_call(
        [(0, 0), half, (min(128, length - 1), 0), third, (length // 5, length // 4)], length
    )
    rule = local_rule(call.rows(CPU), sink, window)
    wanted = create_block_mask(rule, call.batch_size, None, length, length, device="cpu")
    found = branches.local_block_mask(call, sink, window, CPU)
    assert found.seq_lengths == wanted.seq_lengths
    for name in ("kv", "full_kv", "q", "full_q"):
        for part in (f"{name}_num_blocks", f"{name}_indices"):
            torch.testing.assert_close(getattr(found, part), getattr(wanted, part), msg=part)


def test_the_block_mask_of_a_long_batch_is_small() -> None:
    call = make_call([(0, 0)] * 15 + [(300, 0)], 8192)
    with LiveBytes() as live:
        branches.local_block_mask(call, 128, 256, CPU)
    assert live.peak < 16e6  # a mask of all queries and keys has 1.1e9 entries


@pytest.mark.parametrize(("groups", "masked"), [(1, True), (4, False), (7, True)])
def test_groups_equal_repeated_heads(groups: int, masked: bool) -> None:
    query, key, value = make_states(make_call([(0, 0)] * 2, 70), groups)
    seen = torch.ones(70, 70, dtype=torch.bool).tril()
    mask = seen if masked else None
    found = branches.grouped_attention(query, key, value, mask, not masked, Softmax(0.3))
    repeated = (one.repeat_interleave(groups, dim=1) for one in (key, value))
    expected = F.scaled_dot_product_attention(query, *repeated, attn_mask=seen, scale=0.3)
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_fused_kernel_serves_groups(dtype: torch.dtype, masked: bool) -> None:
    query, key, value = (torch.randn(2, n, 70, 64, device="cuda", dtype=dtype) for n in (8, 2, 2))
    mask = torch.ones(70, 70, dtype=torch.bool, device="cuda").tril() if masked else None
    # an error without one of them
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        found = branches.grouped_attention(query, key, value, mask, not masked, Softmax(0.3))
    assert found.isfinite().all()


@pytest.mark.parametrize(
    ("q_length", "lengths"),
    [(1, [(0, 0), (90, 0)]), (7, [(0, 9), (0, 0)]), (263, [(0, 0), (0, 0)]), (263, [(3, 9)])],
)
def test_no_form_depends_on_the_strides_of_torchs_output(q_length: int, lengths: Padding) -> None:
    call = make_call(lengths, 263, q_length)
    states = make_states(call)

    def run() -> list[Tensor]:
        full = full_attention(*states, call, SOFTMAX)
        local = local_attention(*states, call, 4, 16, SOFTMAX)
        mixed = mix(full, local, torch.tensor([0.0, 0.3, 1.0]))
        return [full, local, mixed, *torch.autograd.grad(mixed.square().sum(), states)]

    torch.testing.assert_close(*in_both_layouts(run))


def test_mixing_is_float32_and_exact_at_the_ends() -> None:
    torch.manual_seed(0)
    full, local = torch.randn(2, 2, 4, 3, 8).bfloat16()
    assert torch.equal(mix(full, local, torch.ones(2)), full)
    assert torch.equal(mix(full, local, torch.zeros(2)), local)
    alpha = torch.tensor([0.999, 0.25])
    per_query_head = alpha.repeat_interleave(2)[None, :, None, None]
    expected = (per_query_head * full.float() + (1 - per_query_head) * local.float()).bfloat16()
    # one bfloat16 step near 1, where float32 ties
    assert (mix(full, local, alpha) - expected).abs().max() <= 2**-7
    assert not torch.equal(mix(full, local, alpha)[:, :2], full[:, :2])  # 0.999 is not 1


def test_more_variants_are_compiled_than_torch_allows_by_itself() -> None:
    def add(tensor: Tensor, kind: str) -> Tensor:
        return tensor + len(kind)

    def call_all(compiled: Callable[..., Tensor]) -> None:
        for length in range(12):
            assert compiled(torch.zeros(3), "x" * length).sum() == 3 * length

    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=8):
        with pytest.raises(FailOnRecompileLimitHit):
            call_all(torch.compile(add, dynamic=True, backend="eager"))
        torch._dynamo.reset()
        call_all(branches.compile_variants(add, backend="eager"))
    torch._dynamo.reset()
