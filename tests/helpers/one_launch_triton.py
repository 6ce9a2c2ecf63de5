"""A layer of the plugin's CUDA path on a CPU, through the Triton interpreter: one launch against the parts' kernels.

    python -m tests.helpers.one_launch_triton

The same steps over caches of their own: prompts in chunks, then tokens one by one, with rows of padding. Prints the
largest difference of outputs, wrong numbers in the caches, and launches, of every step.
"""

# ruff: noqa: I001  (the switch comes first)
from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.helpers.interpreted import fake_config

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from rlkv.kernels import splits
from rlkv.vllm.blocks.block_tables import GapRules
from rlkv.vllm.blocks.demand import SinkWindowDemand
from rlkv.vllm.blocks.packing import Bin
from rlkv.vllm.reallocation import bin_attention, one_launch
from rlkv.vllm.reallocation.backend import LocalTritonBackend
from rlkv.vllm.reallocation.bin_attention import PartAttention
from rlkv.vllm.reallocation.one_launch import OneLaunch
from rlkv.vllm.reallocation.split_attention import SplitAttention

GROUP, SIZE, IN_BLOCK, ROWS, LONGEST = 3, 32, 16, 3, 512
DEMAND = SinkWindowDemand(IN_BLOCK, 20, 40)
HEADS = ((0, 0), (1, 0), (1, 1), (1, 2)), ((0, 1), (0, 2), (1, 3))  # of the full and the compressible bin
LAYER = 1
# (queries, tokens) of each request after each step
STEPS = [
    [(30, 30), (5, 5), (130, 130)],
    [(1, 31), (70, 75), (1, 131)],
    *([(1, 32 + n), (1, 76 + n), (1, 132 + n)] for n in range(6)),
    [(1, 38), (1, 82), (0, 0)],
]


def make_bin(number: int, protect: bool) -> Any:
    """A bin as the engine's pseudo-layer, but for the engine."""
    full, own, one = number == 0, Bin(HEADS[number], number == 0, DEMAND), torch.ones(())
    backend = TritonAttentionBackend if full else LocalTritonBackend
    made = SimpleNamespace(
        **{"number": number, "bin": own, "layer_name": f"bin {number}", "head_size": SIZE, "kv_cache_dtype": "auto"},
        **{"attn_backend": backend, "_q_scale": one, "_k_scale": one, "_v_scale": one},
        gap_rules=GapRules(SinkWindowDemand(IN_BLOCK, 20, 40, protect_prompt=protect), LONGEST),
        impl=SimpleNamespace(num_heads=own.largest_part * GROUP, num_kv_heads=own.largest_part, scale=SIZE**-0.5),
        kv_cache=torch.full((3 * 40 + 1, len(own.heads), IN_BLOCK, 2 * SIZE), torch.nan),
    )
    spec = FullAttentionSpec(block_size=IN_BLOCK, num_kv_heads=len(own.heads), head_size=SIZE, dtype=torch.float32)
    config = fake_config(made, made.impl.num_heads, made.impl.num_kv_heads, SIZE, LONGEST, LONGEST if protect else None)
    made.builder = backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
    return made


class Side:
    """The layer with caches of its own; ``launches``: by the one launch."""

    def __init__(self, launches: bool, protect: bool) -> None:
        self.bins = [make_bin(number, protect) for number in range(2)]
        parts, places = [], [own.bin.layers[LAYER] for own in self.bins]
        for own, held in zip(self.bins, places, strict=True):
            part = SimpleNamespace(first=held[0], heads=tuple(own.bin.heads[place][1] for place in held))
            parts.append(PartAttention(own, part))
            parts[-1].kv_cache = own.kv_cache[:, held[0] : held[0] + len(held)]
        stock = SimpleNamespace(layer_name="layer", head_size=SIZE)
        compilation = SimpleNamespace(static_forward_context={}, splitting_ops=None)
        launch = OneLaunch(self.bins, 2, 8, LONGEST).of_layer(LAYER) if launches else None
        self.layer = SplitAttention(stock, parts, SimpleNamespace(compilation_config=compilation), launch)

    def step(self, common: CommonAttentionMetadata, slots: list[torch.Tensor], states: list[torch.Tensor]) -> Any:
        """The layer's output."""
        found = {own.layer_name: (own.builder.build(0, common), own, own.kv_cache) for own in self.bins}
        by_name = {name: (*own, slot) for (name, own), slot in zip(found.items(), slots, strict=True)}
        out = torch.zeros_like(states[0])
        with (
            mock.patch.object(bin_attention, "get_attention_context", by_name.__getitem__),
            mock.patch.object(one_launch, "get_attention_context", by_name.__getitem__),
        ):
            self.layer.attend(*states, out)
        return out


def commons(tables: torch.Tensor, protect: bool) -> Any:
    """Metadata and slots of each step; the blocks of both bins have the same numbers, in caches of their own."""
    for requests in STEPS:
        starts = torch.tensor([0] + [queries for queries, _ in requests]).cumsum(0).int()
        lengths, tokens = torch.tensor([length for _, length in requests], dtype=torch.int32), int(starts[-1])
        decoding = max(queries for queries, _ in requests) == 1
        slots = [
            tables[row, position // IN_BLOCK].long() * IN_BLOCK + position % IN_BLOCK
            for row, (queries, length) in enumerate(requests)
            for position in range(length - queries, length)
        ]
        yield (
            CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=lengths,
                seq_lens_cpu_upper_bound=lengths,
                num_reqs=ROWS,
                num_actual_tokens=tokens,
                max_query_len=max(queries for queries, _ in requests),
                max_seq_len=int(lengths.max()),
                block_table_tensor=tables,
                slot_mapping=torch.tensor(slots),
                rswa_prefix_lens=torch.tensor([length for _, length in STEPS[0]]) if protect else None,
                is_prefilling=torch.tensor([not decoding] * ROWS),
            ),
            decoding,
            # rows of padding have tokens too
            ROWS if decoding else tokens,
        )


def print_errors(protect: bool) -> None:
    draws = torch.Generator().manual_seed(0)
    tables = (torch.randperm(3 * 32, generator=draws) + 1).view(3, 32).int()
    sides, layer_heads = [Side(launches, protect) for launches in (True, False)], 4
    for common, decoding, tokens in commons(tables, protect):
        states = [
            torch.randn(tokens, n * SIZE, generator=draws) for n in (layer_heads * GROUP, layer_heads, layer_heads)
        ]
        with mock.patch.object(one_launch, "decode_paged", wraps=one_launch.decode_paged) as launches:
            outs = [side.step(common, [common.slot_mapping] * 2, states) for side in sides]
        real = common.num_actual_tokens
        error = (outs[0][:real] - outs[1][:real]).abs().max().item()
        wrong = 0
        for one, other in zip(*(side.bins for side in sides), strict=True):
            same = (one.kv_cache == other.kv_cache) | (one.kv_cache.isnan() & other.kv_cache.isnan())
            wrong += int((~same).sum())
        assert outs[1][:real].isfinite().all()
        print("max error", error, wrong, launches.call_count - int(decoding))


if __name__ == "__main__":
    with mock.patch.object(splits, "_processors", return_value=24):
        for protect in (False, True):
            print_errors(protect)
