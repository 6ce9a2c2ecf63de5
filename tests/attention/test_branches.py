"""The fast forms of the two branches against the dense form."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask

from rlkv.attention import branches
from rlkv.attention.branches import (
    banded_local_attention,
    decode_local_attention,
    dense_attention,
    flex_local_attention,
    full_attention,
    grouped_attention,
    local_attention,
    local_block_mask,
    one_query_attention,
)
from rlkv.attention.call import MixedCall, local_rule
from rlkv.attention.mixed import mix
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.mixed_reference import full_mask, local_mask
from tests.helpers.pairwise import pairwise
from tests.helpers.transposed import in_both_layouts

SCALE = 16**-0.5
TOLERANCE = 2e-6  # float32 sums of at most 300 terms of size ~1


def make_call(padding: torch.Tensor, q_length: int) -> MixedCall:
    batch, length = padding.shape
    return MixedCall(batch, q_length, length, length - q_length, padding, True, lambda: None)


def make_states(batch: int, length: int, q_length: int, groups: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = [(3 * groups, q_length), (3, length), (3, length)]
    return [torch.randn(batch, heads, tokens, 16, requires_grad=True) for heads, tokens in sizes]


def make_padding(lengths: list[tuple[int, int]], total: int) -> torch.Tensor:
    order = torch.arange(total)
    return torch.stack([(order >= left) & (order < total - right) for left, right in lengths])


FORMS = {
    "form": (banded_local_attention, flex_local_attention),
    "lengths": (
        [(0, 0)],
        [(0, 0), (13, 0), (200, 0)],
        [(0, 30), (0, 0)],
        [(20, 15), (64, 0)],
    ),
    "sizes": ((0, 1), (4, 16), (5, 70), (1, 100)),
}


@pytest.mark.parametrize("case", pairwise(FORMS), ids=lambda case: case["form"].__name__)
def test_local_forms_equal_the_dense_one(case: dict[str, Any]) -> None:
    form, lengths, sizes = case.values()
    total = 263
    padding = make_padding(lengths, total)
    states = make_states(len(lengths), total, total)
    mask = make_call(padding, total).dense_local_mask(*sizes, padding.device)
    expected = dense_attention(*states, mask, SCALE)
    # flex has no backward pass on a CPU, and refuses inputs that want one
    has_backward = form is banded_local_attention
    inputs = states if has_backward else [state.detach() for state in states]
    found = form(*inputs, make_call(padding, total), *sizes, SCALE)
    real = padding[:, None, :, None].expand_as(expected)
    assert (found - expected)[real].abs().max() < TOLERANCE
    assert found.isfinite().all()
    if has_backward:
        weights = torch.randn_like(expected) * real
        wanted = torch.autograd.grad((expected * weights).sum(), states)
        given = torch.autograd.grad((found * weights).sum(), states)
        for left, right in zip(wanted, given, strict=True):
            assert (left - right).abs().max() < 20 * TOLERANCE


@pytest.mark.parametrize(
    ("length", "sink", "window"),
    [
        (1, 0, 1),
        (127, 16, 64),
        (128, 128, 256),
        (129, 0, 300),
        (129, 1000, 1),
        (700, 0, 1),
        (700, 16, 64),
        (700, 130, 127),
        (700, 128, 256),
    ],
)
def test_the_block_mask_equals_torchs(length: int, sink: int, window: int) -> None:
    """Rows are padded on either side, at and off the edges of blocks."""
    lengths = [
        (0, 0),
        (length // 2, 0),
        (min(128, length - 1), 0),
        (0, length // 3),
        (length // 5, length // 4),
    ]
    call = make_call(make_padding(lengths, length), length)
    rule = local_rule(call.rows(torch.device("cpu")), sink, window)
    wanted = create_block_mask(rule, len(lengths), None, length, length, device="cpu")
    found = local_block_mask(call, sink, window, torch.device("cpu"))
    assert found.seq_lengths == wanted.seq_lengths
    for name in ("kv", "full_kv", "q", "full_q"):
        for part in (f"{name}_num_blocks", f"{name}_indices"):
            torch.testing.assert_close(getattr(found, part), getattr(wanted, part), msg=part)


def test_the_block_mask_of_a_long_batch_is_small() -> None:
    call = make_call(make_padding([(0, 0)] * 15 + [(300, 0)], 8192), 8192)
    with LiveBytes() as live:
        local_block_mask(call, 128, 256, torch.device("cpu"))
    assert live.peak < 16e6  # a mask of all queries and keys has 1.1e9 entries


def test_the_dense_mask_equals_the_reference() -> None:
    padding = make_padding([(0, 0), (5, 0), (0, 9), (11, 3)], 40)
    eye = torch.eye(40, dtype=torch.bool)
    found = make_call(padding, 40).dense_local_mask(3, 6, padding.device)
    assert torch.equal(found[:, 0], local_mask(padding, 3, 6) | eye)
    continued = make_call(padding, 7).dense_local_mask(3, 6, padding.device)
    assert torch.equal(continued, found[:, :, -7:])


@pytest.mark.parametrize("lengths", [[(0, 0), (0, 0)], [(0, 0), (13, 0), (59, 0)]])
@pytest.mark.parametrize(("sink", "window"), [(0, 1), (4, 16), (30, 29)])
def test_one_query_reads_sinks_and_window_only(
    lengths: list[tuple[int, int]], sink: int, window: int
) -> None:
    padding = make_padding(lengths, 60)
    states = make_states(len(lengths), 60, 1)
    call = make_call(padding, 1)
    expected = dense_attention(*states, call.dense_local_mask(sink, window, padding.device), SCALE)
    found = decode_local_attention(*states, call, sink, window, SCALE)
    assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("q_length", [1, 7, 60])
@pytest.mark.parametrize(
    "lengths", [[(0, 0)], [(0, 5), (0, 0)], [(9, 0), (0, 0)], [(9, 4), (0, 0)]]
)
def test_full_attention_equals_the_dense_form(
    lengths: list[tuple[int, int]], q_length: int
) -> None:
    padding = make_padding(lengths, 60)
    states = make_states(len(lengths), 60, q_length)
    mask = (full_mask(padding) | torch.eye(60, dtype=torch.bool))[:, None, -q_length:]
    expected = dense_attention(*states, mask, SCALE)
    real = padding[:, None, -q_length:, None].expand_as(expected)
    found = full_attention(*states, make_call(padding, q_length), SCALE)
    assert (found - expected)[real].abs().max() < TOLERANCE
    # S + W cover everything
    local = local_attention(*states, make_call(padding, q_length), 60, 60, SCALE)
    assert (local - expected)[real].abs().max() < TOLERANCE


@pytest.mark.parametrize("groups", [1, 4, 7])
@pytest.mark.parametrize("masked", [False, True])
def test_groups_equal_repeated_heads(groups: int, masked: bool) -> None:
    query, key, value = make_states(2, 70, 70, groups)
    seen = torch.ones(70, 70, dtype=torch.bool).tril()
    found = grouped_attention(query, key, value, seen if masked else None, not masked, scale=0.3)
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
        found = grouped_attention(query, key, value, mask, not masked, scale=0.3)
    assert found.isfinite().all()


def test_values_may_have_another_size_than_keys() -> None:
    query, key, value = make_states(2, 9, 1)
    found = one_query_attention(query, key, value[..., :5], None, SCALE)
    wanted = one_query_attention(query, key, value, None, SCALE)
    torch.testing.assert_close(found, wanted[..., :5])


@pytest.mark.parametrize(
    ("q_length", "lengths"),
    [(1, [(0, 0), (90, 0)]), (7, [(0, 9), (0, 0)]), (263, [(0, 0), (0, 0)]), (263, [(3, 9)])],
)
def test_no_form_depends_on_the_strides_of_torchs_output(
    q_length: int, lengths: list[tuple[int, int]]
) -> None:
    padding = make_padding(lengths, 263)
    states = make_states(len(lengths), 263, q_length)

    def run() -> list[torch.Tensor]:
        call = make_call(padding, q_length)
        full = full_attention(*states, call, SCALE)
        local = local_attention(*states, call, 4, 16, SCALE)
        mixed = mix(full, local, torch.tensor([0.0, 0.3, 1.0]))
        return [full, local, mixed, *torch.autograd.grad(mixed.square().sum(), states)]

    torch.testing.assert_close(*in_both_layouts(run))


def test_masks_are_made_once_per_call() -> None:
    padding = make_padding([(3, 0)], 300)
    call = make_call(padding, 300)
    states = make_states(1, 300, 300)
    for _ in range(3):
        banded_local_attention(*states, call, 4, 16, SCALE)
    made = []
    assert call.once(("band", 4, 16, 2, padding.device), lambda: made.append(1)) is not None
    assert made == []


def test_mixing_is_float32_and_exact_at_the_ends() -> None:
    torch.manual_seed(0)
    full, local = torch.randn(2, 4, 3, 8).bfloat16(), torch.randn(2, 4, 3, 8).bfloat16()
    assert torch.equal(mix(full, local, torch.ones(2)), full)
    assert torch.equal(mix(full, local, torch.zeros(2)), local)
    alpha = torch.tensor([0.999, 0.25])
    per_query_head = alpha.repeat_interleave(2)[None, :, None, None]
    expected = (per_query_head * full.float() + (1 - per_query_head) * local.float()).bfloat16()
    # one bfloat16 step near 1, where float32 ties
    assert (mix(full, local, alpha) - expected).abs().max() <= 2**-7
    assert not torch.equal(mix(full, local, alpha)[:, :2], full[:, :2])  # 0.999 is not 1


@pytest.mark.parametrize("has_option", [True, False])
def test_more_variants_are_compiled_than_torch_allows_by_itself(
    has_option: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's limit is 8 variants of a function; older versions have no option for it."""

    def add(tensor: torch.Tensor, kind: str) -> torch.Tensor:
        return tensor + len(kind)

    def call_all(compiled: object) -> None:
        for length in range(12):
            assert callable(compiled)
            assert compiled(torch.zeros(3), "x" * length).sum() == 3 * length

    if not has_option:
        monkeypatch.setattr(branches.inspect, "signature", lambda function: inspect.Signature())
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=8):
        with pytest.raises(FailOnRecompileLimitHit):
            call_all(torch.compile(add, dynamic=True, backend="eager"))
        torch._dynamo.reset()
        call_all(branches.compile_variants(add, backend="eager"))
    torch._dynamo.reset()
