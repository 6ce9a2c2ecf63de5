"""The full and the local branch of mixed attention, in the form that is cheapest for the call.

Shapes: B rows, H KV heads, G query heads per KV head, Q queries, K keys, D size of a head, S sinks,
W window. Every function takes query ``[B, H * G, Q, D]``, key and value ``[B, H, K, D]`` and
returns ``[B, H * G, Q, D]``. Rows of padding hold finite values without meaning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkv.attention.call import MixedCall, RecordedCall, local_rule
from rlkv.attention.softmax import Softmax

# queries per block of the banded form; below it the matrix products are too small to be fast
MIN_BLOCK = 64
FLEX_BLOCK = 128  # queries, and keys, of a block of FlexAttention: torch's default
# one row or several, short or long, with gradients or without, in inference mode, for each model of
# a process
VARIANTS_COMPILED = 64
# below 128 queries torch would take its decoding kernel, which has no form for groups of four
FLEX_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, softmax: Softmax
) -> Tensor:
    """Attend from groups of query heads without copies of their keys, where torch can do it."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.is_cuda and not _flash_attention_takes(query, key, value, mask):
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    return softmax.attend(query, key, value, mask, causal)


def _flash_attention_takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether flash attention serves the call: torch's only fused GPU kernel with groups.

    Without it all scores would be held at once.
    """
    half = query.dtype in (torch.float16, torch.bfloat16)
    if key.shape[-1] != value.shape[-1] or key.shape[-1] > 256:
        return False
    return mask is None and half and torch.cuda.get_device_capability(query.device) >= (8, 0)


def one_query_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softmax: Softmax
) -> Tensor:
    """Attend from one query per row: the group takes the place of the queries.

    So the keys of a head are read once, not once per query head, and none is copied.
    """
    grouped = query.reshape(*key.shape[:2], -1, query.shape[-1])
    out = softmax.attend(grouped, key, value, mask)
    # not a view: fused kernels of a GPU give their output transposed
    return out.reshape(*query.shape[:3], value.shape[-1])


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, softmax: Softmax
) -> Tensor:
    """Attend under an explicit mask, bool ``[B, 1, Q, K]``: the plain form."""
    if query.shape[2] == 1:
        return one_query_attention(query, key, value, mask, softmax)
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    return softmax.attend(query, key, value, mask)


def full_attention(
    query: Tensor, key: Tensor, value: Tensor, call: MixedCall, softmax: Softmax
) -> Tensor:
    """Attend causally to everything; without left padding it needs no mask."""
    rows = call.rows(query.device)
    if call.q_length == 1 and not rows.left and not rows.right:
        return one_query_attention(query, key, value, None, softmax)
    if call.q_length == call.kv_length and not rows.left:
        # padding on the right is later than every real token, which therefore never sees it
        return grouped_attention(query, key, value, None, causal=True, softmax=softmax)
    mask = call.dense_local_mask(call.kv_length, 0, query.device)
    if isinstance(call, RecordedCall):
        mask = call.addend("full", mask, query.dtype)
    return dense_attention(query, key, value, mask, softmax)


def local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: MixedCall,
    sink: int,
    window: int,
    softmax: Softmax,
) -> Tensor:
    """Attend to each row's first ``sink`` tokens and to the last ``window`` of every query."""
    rows = call.rows(query.device)
    if call.q_length == 1 and not rows.right:
        if call.kv_length > sink + window:
            return decode_local_attention(query, key, value, call, sink, window, softmax)
    elif call.q_length == call.kv_length:
        if query.device.type == "cuda" and softmax.is_plain:
            return flex_local_attention(query, key, value, call, sink, window, softmax)
        if call.kv_length > sink + window + 2 * MIN_BLOCK:
            return banded_local_attention(query, key, value, call, sink, window, softmax)
    mask = call.dense_local_mask(sink, window, query.device)
    return dense_attention(query, key, value, mask, softmax)


def _take_sinks(states: Tensor, position_BS: Tensor | None, sink: int) -> Tensor:
    """Take the entries at ``position_BS`` int64 ``[B, S]`` (None: the first): ``[B, H, S, D]``."""
    if position_BS is None:
        return states[:, :, :sink]
    index = position_BS[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[-1])
    return states.gather(2, index)


def decode_local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: MixedCall,
    sink: int,
    window: int,
    softmax: Softmax,
) -> Tensor:
    """Attend from one query per row to S + W keys instead of all K (K > S + W).

    Takes no padding on the right.
    """
    if isinstance(call, RecordedCall):
        return recorded_local_attention(query, key, value, call, sink, window, softmax)
    rows = call.rows(query.device)
    start = call.kv_length - window

    def make() -> tuple[Tensor | None, Tensor | None]:
        if not rows.left:
            return None, None
        first = rows.first[:, None]
        position_BS = first + torch.arange(sink, device=query.device)
        is_old = position_BS < start  # the others lie in the window already
        is_recent = torch.arange(start, call.kv_length, device=query.device) >= first
        mask = torch.cat([is_old, is_recent], dim=1)[:, None, None, :]
        return position_BS.clamp(max=call.kv_length - 1), mask

    position_BS, mask = call.once(("decode", sink, window, query.device), make)

    def kept(states: Tensor) -> Tensor:
        return torch.cat([_take_sinks(states, position_BS, sink), states[:, :, start:]], dim=2)

    return one_query_attention(query, kept(key), kept(value), mask, softmax)


def recorded_local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: RecordedCall,
    sink: int,
    window: int,
    softmax: Softmax,
) -> Tensor:
    """Attend as :func:`decode_local_attention`, where the window's place is known on the device."""
    device = query.device

    def make() -> tuple[Tensor, Tensor]:
        rows = call.rows(device)
        first = rows.first[:, None]
        start = rows.end[:, None] - window
        sinks = first + torch.arange(sink, device=device)
        recent = start + torch.arange(window, device=device)
        mask = torch.cat([sinks < start, recent >= first], dim=1)[:, None, None, :]
        return torch.cat([sinks, recent], dim=1).clamp(0, call.kv_length - 1), mask

    position_BN, is_seen = call.once(("recorded", sink, window, device), make)
    mask = call.addend((sink, window), is_seen, query.dtype)

    def kept(states: Tensor) -> Tensor:
        return _take_sinks(states, position_BN, sink + window)

    return one_query_attention(query, kept(key), kept(value), mask, softmax)


def banded_local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: MixedCall,
    sink: int,
    window: int,
    softmax: Softmax,
) -> Tensor:
    """Attend in blocks of C queries to the sinks, the W keys before the block and its own keys.

    The cost is T * (S + W + C) for T tokens.
    """
    batch, kv_heads, length, size = key.shape
    groups = query.shape[1] // kv_heads
    block = max(window, MIN_BLOCK)
    blocks = -(-length // block)
    extra = blocks * block - length
    device = query.device
    rows = call.rows(device)

    def make() -> tuple[Tensor | None, Tensor]:
        order = torch.arange(blocks * block, device=device).view(blocks, block)
        starts = order[:, :1]
        # positions of the keys of a block: W before it, then its own; the sinks come first, per row
        position_NJ = torch.cat([starts + torch.arange(-window, 0, device=device), order], dim=1)
        row = torch.arange(batch, device=device)[:, None, None, None]
        position_BS = rows.first[:, None] + torch.arange(sink, device=device)
        sinks = position_BS[:, None, None, :]
        queries = order[None, :, :, None]
        older = (sinks <= queries - window) & (sinks < rows.end[:, None, None, None])
        # sink = 0: the band proper; sinks beyond the window are the part above
        band = local_rule(rows, 0, window)(row, None, queries, position_NJ[None, :, None, :])
        mask = torch.cat([older, band], dim=3)  # [B, blocks, C, S + W + C]
        mask = mask.flatten(0, 1)[:, None].repeat(1, 1, groups, 1)
        return position_BS.clamp(max=length - 1) if rows.left else None, mask

    position_BS, mask = call.once(("band", sink, window, groups, device), make)

    def of_blocks(states: Tensor) -> Tensor:
        own = F.pad(states, (0, 0, 0, extra)).view(batch, kv_heads, blocks, block, -1)
        before = F.pad(own[:, :, :-1, block - window :], (0, 0, 0, 0, 1, 0))
        sinks = _take_sinks(states, position_BS, sink)[:, :, None].expand(-1, -1, blocks, -1, -1)
        return torch.cat([sinks, before, own], dim=3).transpose(1, 2).flatten(0, 1)

    padded = F.pad(query, (0, 0, 0, extra)).view(batch, kv_heads, groups, blocks, block, size)
    by_block = padded.permute(0, 3, 1, 2, 4, 5)
    grouped = by_block.reshape(batch * blocks, kv_heads, groups * block, size)
    out = softmax.attend(grouped, of_blocks(key), of_blocks(value), mask)
    out = out.reshape(batch, blocks, kv_heads, groups, block, -1).permute(0, 2, 3, 1, 4, 5)
    return out.reshape(batch, kv_heads * groups, blocks * block, -1)[:, :, :length]


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return compile_variants(flex_attention)


def compile_variants(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile ``function`` for up to ``VARIANTS_COMPILED`` variants.

    Beyond torch's own limit of 8 it would run uncompiled.
    """
    compiled = torch.compile(function, dynamic=True, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # in each call: torch keeps such settings by thread, and a GPU's backward pass has its own
        with torch._dynamo.config.patch(recompile_limit=VARIANTS_COMPILED):
            return compiled(*args, **kwargs)

    return call


def local_block_mask(call: MixedCall, sink: int, window: int, device: torch.device) -> Any:
    """Make the block mask of FlexAttention from each row's first and last token.

    Torch's ``create_block_mask`` makes it out of a dense mask, which takes several bytes for each
    row, query and key: gigabytes for 16 rows of 8k tokens.
    """
    from torch.nn.attention.flex_attention import BlockMask

    rows = call.rows(device)
    length = call.kv_length
    first = rows.first[:, None, None]
    end = rows.end[:, None, None]
    begin = torch.arange(0, length, FLEX_BLOCK, device=device)
    last = begin + FLEX_BLOCK - 1
    # the queries of a block, the real keys of one, and those of them that are sinks
    query = begin[:, None]
    query_last = last.clamp(max=length - 1)[:, None]
    key = begin.maximum(first)
    key_last = last.minimum(end - 1)
    sink_last = key_last.minimum(first + sink - 1)
    in_window = (key <= key_last) & (key <= query_last) & (query - key_last < window)
    is_seen = in_window | ((key <= sink_last) & (key <= query_last)) | (query == begin)
    # seen by all queries: earlier ones, without padding, of which none is older than the window
    # unless it is a sink
    oldest = begin.maximum(first + sink)
    in_reach = (oldest > last) | (query_last - oldest < window)
    # a block that reaches beyond the text is never one of these
    is_earlier = (query > begin) & (query + FLEX_BLOCK <= length)
    is_whole = is_earlier & (begin >= first) & (last < end) & in_reach

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Count the blocks of keys of each block of queries, and list them first."""
        order = blocks[:, None].int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()

    return BlockMask.from_kv_blocks(
        *listed(is_seen & ~is_whole),
        *listed(is_whole),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=local_rule(rows, sink, window),
        seq_lengths=(length, length),
    )


def flex_local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: MixedCall,
    sink: int,
    window: int,
    softmax: Softmax,
) -> Tensor:
    """Attend by FlexAttention: without a dense mask, about 256 MB a row at 8k tokens."""
    from torch.nn.attention.flex_attention import flex_attention

    assert softmax.is_plain
    block_mask = call.once(
        ("flex", sink, window, query.device),
        lambda: local_block_mask(call, sink, window, query.device),
    )
    # compiled on a GPU; eager (dense, slow) elsewhere, where only the tests use it
    attend = _compiled_flex() if query.device.type == "cuda" else flex_attention
    return attend(
        query,
        key,
        value,
        block_mask=block_mask,
        scale=softmax.scale,
        enable_gqa=True,
        kernel_options=FLEX_OPTIONS,
    )
