"""The decode kernel against attention in float64, by its own buffers.

    TRITON_INTERPRET=1 python -m tests.helpers.decode_kernel

runs one float32 shape on a CPU, through the Triton interpreter, and prints the largest error with
the right window and with one that is a token too short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rlkv.benchmarks.turns import relative_error
from rlkv.kernels.step import DecodeStep

STEPS = 4


@dataclass(frozen=True)
class Shape:
    """A layer with so many heads of each kind, and the tokens cached before the first step."""

    rows: int
    full: int
    compressible: int
    group: int
    size: int
    cached: int
    sink: int = 16
    window: int = 64

    @property
    def padding(self) -> Tensor:
        """Columns of padding, int64 ``[B]``: none in the first row."""
        return torch.arange(self.rows) * 37 % (self.cached // 2 + 1)


class KernelRun:
    """Random states and buffers with the cached tokens, and NaN wherever there is none."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        options: dict[str, Any] = {"dtype": dtype, "device": device, "generator": generator}
        heads = shape.full + shape.compressible
        states = (shape.rows, heads, shape.cached + STEPS, shape.size)
        self.shape = shape
        self.keys = torch.randn(states, **options)
        self.values = torch.randn(states, **options)
        self.queries = torch.randn(STEPS, shape.rows, heads, shape.group, shape.size, **options)
        full_keys, ring_keys = self._buffers(self.keys)
        full_values, ring_values = self._buffers(self.values)
        self.full = (full_keys, full_values) if shape.full else None
        self.ring = (ring_keys, ring_values) if shape.compressible else None
        indices = [*range(shape.full), *(-1 - index for index in range(shape.compressible))]
        self.places = torch.tensor(indices, dtype=torch.int32, device=device)
        self.step = DecodeStep(
            start=torch.tensor([shape.cached], device=device),
            padding=shape.padding.to(device),
            sinks=torch.tensor([shape.sink], device=device),
            window=shape.window,
        )

    def _buffers(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Fill buffers of the full heads and rings with the cached tokens of ``[B, H, T, D]``."""
        shape = self.shape
        slots = shape.sink + shape.window
        full = torch.full_like(states[:, : shape.full], torch.nan)
        ring = states.new_full((shape.rows, shape.compressible, slots, shape.size), torch.nan)
        for row, first in enumerate(shape.padding.tolist()):
            full[row, :, first : shape.cached] = states[row, : shape.full, first : shape.cached]
            position = torch.arange(shape.cached - first, device=states.device)
            newest = position >= len(position) - shape.window
            position = position[(position < shape.sink) | newest]
            turned = shape.sink + (position - shape.sink) % shape.window
            slot = torch.where(position < shape.sink, position, turned)
            ring[row, :, slot] = states[row, shape.full :, first + position]
        return full, ring

    def inputs(self, index: int) -> list[Tensor]:
        """Return query, key and value of the token of step ``index``."""
        column = self.shape.cached + index
        return [self.queries[index], self.keys[:, :, column], self.values[:, :, column]]

    def launch(self, index: int) -> Tensor:
        """Decode the token of step ``index``: ``[B, H, G, D]``."""
        from rlkv.kernels.decode import decode

        query, key, value = self.inputs(index)
        return decode(
            query=query,
            key=key,
            value=value,
            full=self.full,
            ring=self.ring,
            places=self.places,
            step=self.step,
            scale=self.shape.size**-0.5,
        )

    def wanted(self, index: int) -> Tensor:
        """Return the output of a step in float64, without a cache."""
        shape = self.shape
        outputs = []
        for row, first in enumerate(shape.padding.tolist()):
            seen = slice(first, shape.cached + index + 1)
            key = self.keys[row, :, seen].double()
            position = torch.arange(key.shape[1], device=key.device)
            gap = (position >= shape.sink) & (position < len(position) - shape.window)
            scores = self.queries[index, row].double() @ key.transpose(1, 2) * shape.size**-0.5
            scores[shape.full :].masked_fill_(gap, -torch.inf)
            outputs.append(scores.softmax(-1) @ self.values[row, :, seen].double())
        return torch.stack(outputs)

    def error(self, steps: int = STEPS) -> float:
        """Return the largest relative error of the steps, infinite if one reads an unused entry."""
        errors = []
        for index in range(steps):
            errors.append(relative_error(self.launch(index), self.wanted(index)))
            self.step.start += 1
        return max(errors)


def main() -> None:
    from rlkv.kernels import decode

    torch.set_num_threads(1)
    shape = Shape(rows=2, full=1, compressible=1, group=3, size=24, cached=140)
    # so many multiprocessors that the full head goes in several splits
    with mock.patch.object(decode, "_processors", return_value=24):
        print("error", KernelRun(shape, torch.float32, torch.device("cpu")).error(2))
        wrong = KernelRun(shape, torch.float32, torch.device("cpu"))
        wrong.step.window -= 1
        print("error", wrong.error(1))


if __name__ == "__main__":
    main()
