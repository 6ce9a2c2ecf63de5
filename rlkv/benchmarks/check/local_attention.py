"""The local branch of mixed attention against an explicit mask: on a GPU FlexAttention, on a CPU
the banded form.

Shapes: B rows, T tokens, H KV heads, G query heads per KV head, D size of a head.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlkv.attention.branches import local_attention
from rlkv.attention.call import MixedCall
from rlkv.benchmarks.agreement import relative_error
from rlkv.benchmarks.check.explicit import explicit_attention, visible_keys
from rlkv.benchmarks.check.fallback import compiled_graphs, is_dense, is_fallback, why_fallback
from rlkv.benchmarks.check.one import Check, Findings, Setting
from rlkv.benchmarks.turns import timed
from rlkv.rollout.footprint import GIB, free_memory

MODES = ("grad", "no grad", "inference", "checkpointed")
# a window of 255 instead of 256 makes 0.023, 127 sinks instead of 128 0.017; rounding made 0.004 in
# bfloat16 and 3e-7 in float32 (banded form, T = 700)
TOLERANCE = {torch.bfloat16: 0.01, torch.float32: 1e-5}


@dataclass(frozen=True)
class Sizes:
    """Cases are all lengths x batches x groups, a group with its number of KV heads, in all
    :data:`MODES`.
    """

    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]
    head_dim: int
    sink: int
    window: int


# the groups of Llama-8B and Qwen-7B, with the sink and window of training
ON_GPU = Sizes((50, 127, 128, 129, 513, 3001, 8192), (1, 3, 16), ((4, 8), (7, 4)), 128, 128, 256)
ON_CPU = Sizes((50, 300), (1, 3), ((4, 2), (7, 1)), 16, 16, 32)


@dataclass(frozen=True)
class Case:
    """One shape, on a device; three rows are padded on the left, sixteen on the right."""

    length: int
    batch: int
    group: int
    kv_heads: int

    def padding(self, device: torch.device) -> Tensor:
        """Bool ``[B, T]``, True for real tokens; the first row has no padding."""
        order, shift = (
            torch.arange(self.length, device=device),
            torch.arange(self.batch, device=device)[:, None],
        )
        return order >= 5 * shift if self.batch < 4 else order < self.length - shift

    def states(self, setting: Setting, size: int) -> tuple[list[Tensor], Tensor]:
        """Query ``[B, H * G, T, D]``, key and value ``[B, H, T, D]``, and weights of the outputs, 0
        for padding.
        """
        torch.manual_seed(0)
        heads = (
            self.kv_heads * self.group,
            self.kv_heads,
            self.kv_heads,
            self.kv_heads * self.group,
        )
        options: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype}
        *states, weight = (torch.randn(self.batch, h, self.length, size, **options) for h in heads)
        return states, weight * self.padding(setting.device)[:, None, :, None]

    def needed_bytes(self, setting: Setting, size: int) -> int:
        """About the memory that states and reference take; a block mask is small."""
        states = (
            8
            * self.batch
            * self.kv_heads
            * self.group
            * self.length
            * size
            * setting.dtype.itemsize
        )
        return states + 20 * self.group * self.length**2


def attend(
    mode: str, states: list[Tensor], weight: Tensor, call: MixedCall, sizes: Sizes
) -> list[Tensor]:
    """Output of the local branch and, in modes with gradients, those of query, key and value."""
    scale = sizes.head_dim**-0.5
    branch = partial(local_attention, call=call, sink=sizes.sink, window=sizes.window, scale=scale)
    if mode in ("no grad", "inference"):
        with torch.no_grad() if mode == "no grad" else torch.inference_mode():
            return [branch(*states)]
    inputs = [state.detach().requires_grad_() for state in states]
    out: Any = (
        checkpoint(branch, *inputs, use_reentrant=False)
        if mode == "checkpointed"
        else branch(*inputs)
    )
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


def wanted_rows(
    case: Case, states: list[Tensor], weight: Tensor, sizes: Sizes
) -> dict[int, list[Tensor]]:
    """What :func:`attend` should give for the first and the last row: output and gradients, without
    the row.
    """
    found = {}
    real_BT = case.padding(weight.device)
    for row in {0, case.batch - 1}:
        visible = visible_keys(real_BT[row], sizes.sink, sizes.window)
        query, outer = (
            tensor[row].unflatten(0, (case.kv_heads, case.group)) for tensor in (states[0], weight)
        )
        heads = [
            explicit_attention(query[h], states[1][row, h], states[2][row, h], visible, outer[h])
            for h in range(case.kv_heads)
        ]
        of_heads = [torch.stack(tensors) for tensors in zip(*heads, strict=True)]
        found[row] = [of_heads[0].flatten(0, 1), of_heads[1].flatten(0, 1), *of_heads[2:]]
    return found


def largest_error(found: list[Tensor], wanted: dict[int, list[Tensor]], real_BT: Tensor) -> float:
    """The largest relative error of output and gradients over the rows of ``wanted``, padding left
    out.
    """
    return max(
        relative_error(own[row][:, real_BT[row]], expected[:, real_BT[row]])
        for row, tensors in wanted.items()
        for own, expected in zip(found, tensors, strict=False)  # no gradients in some modes
    )


def measure(
    mode: str, case: Case, tensors: Any, sizes: Sizes, setting: Setting, found: Findings
) -> dict[str, Any]:
    """A case in one mode: its error, graphs compiled for it and again for the same shape, seconds,
    and peak bytes.

    ``peak_bytes`` are those of attention with a block mask that exists, ``mask_bytes`` of making it
    too.
    """
    states, weight, wanted = tensors
    real = case.padding(setting.device)

    def new_call() -> MixedCall:
        return MixedCall(case.batch, case.length, case.length, 0, real, True, lambda: None)

    before = compiled_graphs()
    error = largest_error(attend(mode, states, weight, new_call(), sizes), wanted, real)
    once, call = compiled_graphs(), new_call()
    seconds, mask_bytes = peak_of(
        setting, found, partial(attend, mode, states, weight, call, sizes)
    )
    _, peak_bytes = peak_of(setting, found, partial(attend, mode, states, weight, call, sizes))
    row: dict[str, Any] = {"mode": mode, **asdict(case), "error": error, "seconds": seconds}
    row |= {"compiled": once - before, "recompiled": compiled_graphs() - once}
    return row | {"peak_bytes": peak_bytes, "mask_bytes": mask_bytes}


def peak_of(setting: Setting, found: Findings, work: Any) -> tuple[float, int]:
    """Seconds of ``work()``, and the bytes that it held beyond what was held before; 0 on a CPU."""
    before, seconds = found.new_peak(setting), timed(work, setting.device)
    return seconds, torch.cuda.max_memory_allocated(
        setting.device
    ) - before if setting.on_gpu else 0


def judge(row: dict[str, Any], found: Findings, setting: Setting) -> None:
    """Note what is wrong with a case."""
    name = "{mode}, T {length}, B {batch}, group {group}".format(**row)
    tolerance, heads = TOLERANCE[setting.dtype], row["group"] * row["kv_heads"]
    found.require(
        row["error"] < tolerance,
        f"{name}: relative error {row['error']:.2g}, allowed {tolerance:g}",
    )
    found.require(not row["recompiled"], f"{name}: compiled again for a shape that it had just run")
    dense = is_dense(row["peak_bytes"], row["batch"], heads, row["length"])
    found.require(
        not dense, f"{name}: {row['peak_bytes'] / GIB:.1f} GiB, as much as dense scores take"
    )


def run(setting: Setting, found: Findings, sizes: Sizes | None = None) -> None:
    sizes = sizes or (ON_GPU if setting.on_gpu else ON_CPU)
    left_out, refused, graphs = 0, [], []
    for group, kv_heads in sizes.groups:
        torch._dynamo.reset()  # a process serves one model
        start = compiled_graphs()
        for length, batch in product(sizes.lengths, sizes.batches):
            case, free = Case(length, batch, group, kv_heads), free_memory(setting.device)
            if free is not None and case.needed_bytes(setting, sizes.head_dim) > 0.8 * free:
                left_out += len(MODES)
                continue
            states, weight = case.states(setting, sizes.head_dim)
            wanted = wanted_rows(case, states, weight, sizes)
            for mode in MODES:
                try:
                    row = measure(mode, case, (states, weight, wanted), sizes, setting, found)
                except Exception as error:
                    if not is_fallback(error):
                        raise
                    refused.append(f"{mode}, T {length}, B {batch}, group {group}")
                    continue
                found.details.append(row)
                judge(row, found, setting)
        graphs.append(compiled_graphs() - start)
    found.require(
        not refused, f"{why_fallback()} ({len(refused)} cases, first {''.join(refused[:1])})"
    )
    _summarise(found, left_out, graphs)


def _summarise(found: Findings, left_out: int, graphs: list[int]) -> None:
    rows = found.details
    found.figures |= {
        "cases": len(rows),
        "left out for memory": left_out,
        "graphs per model": max(graphs),
    }
    if rows:
        found.figures["largest error"] = max(row["error"] for row in rows)
        found.figures["attention GiB"] = max(row["peak_bytes"] for row in rows) / GIB
        found.figures["block mask GiB"] = max(row["mask_bytes"] for row in rows) / GIB


CHECK = Check(
    "local_attention",
    "The local branch and its gradients equal an explicit mask, compiled, in O(T).",
    run,
)
