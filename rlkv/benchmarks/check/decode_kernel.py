"""The decode kernel, compiled for the GPU, against attention in float64.

Shapes: B rows, H KV heads, G queries per KV head, T tokens, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rlkv.benchmarks.agreement import relative_error
from rlkv.benchmarks.check.explicit import exact_token
from rlkv.benchmarks.check.one import CannotRun, Check, Findings, Setting
from rlkv.kernels.step import DecodeStep

SINK, WINDOW, STEPS = 16, 64, 4
ALLOWED = 5e-3  # of bfloat16's 8 bits in the weights and in the output


@dataclass(frozen=True)
class Shape:
    """A layer with so many heads of each kind, and the tokens cached before the first step."""

    rows: int
    full: int
    compressible: int
    group: int
    size: int
    cached: int

    @property
    def padding(self) -> Tensor:
        """Columns of padding, int64 ``[B]``: none in the first row."""
        return torch.arange(self.rows) * 37 % (self.cached // 2 + 1)


SHAPES = (
    Shape(rows=1, full=8, compressible=0, group=4, size=128, cached=1),
    Shape(rows=3, full=0, compressible=8, group=4, size=128, cached=900),
    Shape(rows=1, full=1, compressible=7, group=4, size=128, cached=32_000),
    Shape(rows=16, full=4, compressible=4, group=4, size=128, cached=8192),
    Shape(rows=2, full=1, compressible=3, group=7, size=128, cached=3000),
    Shape(rows=4, full=3, compressible=6, group=3, size=64, cached=600),
)


def run(setting: Setting, found: Findings, shapes: tuple[Shape, ...] = SHAPES) -> None:
    if find_spec("triton") is None:
        raise CannotRun("triton is not installed")
    for shape in shapes:
        error = _error(shape, setting)
        found.details.append({"error": error, **vars(shape)})
        found.require(error <= ALLOWED, f"{shape}: relative error {error:.2g}, allowed {ALLOWED:g}")
    found.figures |= {
        "layers": len(shapes),
        "largest error": max(row["error"] for row in found.details),
    }


def _error(shape: Shape, setting: Setting) -> float:
    """The largest of all steps; NaN in what the kernel must not read makes it infinite."""
    torch.manual_seed(0)
    rows, heads, total = shape.rows, shape.full + shape.compressible, shape.cached + STEPS
    options: Any = {"dtype": setting.dtype, "device": setting.device}
    keys, values = (torch.randn(rows, heads, total, shape.size, **options) for _ in range(2))
    queries = torch.randn(STEPS, rows, heads, shape.group, shape.size, **options)
    buffers = [_filled(states, shape) for states in (keys, values)]
    step_once = _stepper(shape, buffers, setting)
    errors = []
    for column, query in enumerate(queries, start=shape.cached):
        out = step_once(query, keys[:, :, column], values[:, :, column])
        wanted = torch.stack(
            [_attention(shape, row, column, query, keys, values) for row in range(rows)]
        )
        errors.append(relative_error(out, wanted))
    return max(errors)


def _filled(states: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Buffers of the full heads and of the rings with the cached tokens of states ``[B, H, T, D]``,
    NaN elsewhere.
    """
    full = states[:, : shape.full].clone()
    full[:, :, shape.cached :] = torch.nan
    ring = states.new_full((shape.rows, shape.compressible, SINK + WINDOW, shape.size), torch.nan)
    for row, first in enumerate(shape.padding.tolist()):
        full[row, :, :first] = torch.nan
        position = torch.arange(shape.cached - first, device=states.device)
        position = position[(position < SINK) | (position >= len(position) - WINDOW)]
        slot = torch.where(position < SINK, position, SINK + (position - SINK) % WINDOW)
        ring[row, :, slot] = states[row, shape.full :, first + position]
    return full, ring


def _stepper(
    shape: Shape, buffers: list[tuple[Tensor, Tensor]], setting: Setting
) -> Callable[..., Tensor]:
    """A function that decodes the next token from query, key and value."""
    from rlkv.kernels.decode import decode

    device = setting.device
    (full_keys, ring_keys), (full_values, ring_values) = buffers
    full = (full_keys, full_values) if shape.full else None
    ring = (ring_keys, ring_values) if shape.compressible else None
    indices = [*range(shape.full), *(-1 - index for index in range(shape.compressible))]
    places = torch.tensor(indices, dtype=torch.int32, device=device)
    start, sinks = (torch.tensor([number], device=device) for number in (shape.cached, SINK))
    step = DecodeStep(start, shape.padding.to(device), sinks, WINDOW)

    def step_once(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = decode(query, key, value, full, ring, places, step, shape.size**-0.5)
        step.start += 1
        return out

    return step_once


def _attention(
    shape: Shape, row: int, column: int, query: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Output ``[H, G, D]`` in float64 of a row's token at ``column``."""
    seen = slice(int(shape.padding[row]), column + 1)
    whole, local = exact_token(query[row], keys[row, :, seen], values[row, :, seen], SINK, WINDOW)
    return torch.cat([whole[: shape.full], local[shape.full :]])


CHECK = Check(
    "kernel_decode",
    "The decode kernel equals attention in float64 and reads nothing else.",
    run,
    needs_gpu=True,
)
