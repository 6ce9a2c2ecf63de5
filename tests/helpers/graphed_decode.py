"""Texts decoded by graphs on a CPU, through the Triton interpreter; a line for each way of decoding.

    python -m tests.helpers.graphed_decode

``texts``, whether they are those of plain torch, how many graphs were recorded, and how many tokens a graph read.  A
graph is stood in for by the same forward call with the Python numbers of its recording.  The last line is of a model
of which no graph can be made: ``refused``, whether the texts are those of plain torch, how often a graph was tried, and
what is warned of.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rlkv.kernels import splits
from rlkv.rollout import graphed_step
from tests.helpers.decode_cases import kernel
from tests.helpers.graphed_texts import AHEAD, WAYS, decode_texts


class Standin:
    """Counts recordings and replays."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, forward: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
        self.recorded += 1
        fixed = forward.__self__._fixed  # type: ignore[attr-defined]
        columns = fixed.columns
        result = forward()
        fixed.decode_step.start -= 1  # recording computes nothing

        def replay() -> None:
            self.replayed += 1
            with fixed.recorded():
                for layer in fixed._layers:
                    layer.length = columns
                result.copy_(forward())

        return replay, result

    def fail(self, forward: Callable[[], Tensor], device: torch.device) -> Any:
        """As a model that waits for the GPU: its error, and that of the capture which then cannot end."""
        self.recorded += 1
        try:
            raise RuntimeError("it waits")
        except RuntimeError:
            forward()
            raise RuntimeError("capture invalidated")  # noqa: B904


def decoded(way: dict[str, Any], record: Callable[..., Any], tokens: int = 24) -> list[list[int]]:
    """Texts by the kernel, with ``record`` in the place of what records graphs."""
    with (
        kernel(True),
        mock.patch.object(splits, "_processors", return_value=24),
        mock.patch.object(graphed_step, "record_graph", record),
        mock.patch.object(graphed_step, "AHEAD", AHEAD),
    ):
        return decode_texts(way, "cpu", tokens)


def main() -> None:
    torch.set_num_threads(1)
    for way in WAYS:
        with kernel(False):
            expected = decode_texts(way, "cpu")
        standin = Standin()
        print("texts", decoded(way, standin.record) == expected, standin.recorded, standin.replayed)
    standin = Standin()
    with warnings.catch_warnings(record=True) as caught:
        equal = decoded(way, standin.fail, tokens=10) == [ids[:10] for ids in expected]
    print("refused", equal, standin.recorded, *(warning.message for warning in caught))


if __name__ == "__main__":
    main()
