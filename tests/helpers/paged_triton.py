"""The decode kernel over block tables on a CPU, through the Triton interpreter; prints the errors of every shape.

    python -m tests.helpers.paged_triton

A line is ``max error``, dtype, ratio to attention in float64, and wrong numbers in the caches; ``max check`` has the
largest error that ``rlkv-bench check`` finds, and the one that it finds if the kernel's window is one token too short.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from rlkv.benchmarks.check import paged_kernel
from rlkv.benchmarks.check.one import Findings, Setting
from rlkv.kernels import paged_decode, splits

CPU = Setting(torch.device("cpu"))
SHORT = tuple(
    replace(shape, cached=tuple(min(n, 390) for n in (*shape.cached[:2], 0))) for shape in paged_kernel.SHAPES
)
GROUPS = tuple(
    replace(SHORT[0], group=group, heads=paged_kernel.MIXED[1:3], size=24, cached=(63, 500)) for group in (1, 2, 3, 8)
)


def print_errors(shape: paged_kernel.Shape, dtype: torch.dtype, processors: int) -> None:
    with mock.patch.object(splits, "_processors", return_value=processors):
        error, wrong = paged_kernel.errors_of(shape, dtype, CPU)
    print("max error", str(dtype).removeprefix("torch."), error, wrong)


def check_error(shorter: int) -> float:
    """What the check finds with the first shape, if windows are so much shorter."""
    page, found = paged_decode.PagedBin, Findings()

    def paged(*args: Any, **kwargs: Any) -> paged_decode.PagedBin:
        made = page(*args, **kwargs)
        return made if made.prefix is None else replace(made, window=made.window - shorter)

    launch = paged_decode.decode_paged

    def shortened(query: Any, key: Any, value: Any, bins: Any, *rest: Any) -> None:
        launch(query, key, value, [paged(**vars(own)) for own in bins], *rest)

    with mock.patch.object(paged_decode, "decode_paged", shortened):
        paged_kernel.run(CPU, found, SHORT[:1])
    return found.figures["largest error"]


def main() -> None:
    torch.set_num_threads(1)
    for number, shape in enumerate(SHORT + GROUPS):
        print_errors(shape, torch.float16 if number % 3 == 2 else torch.float32, processors=(1, 24, 100)[number % 3])
    with mock.patch.object(splits, "_processors", return_value=24):
        print("max check", check_error(0), check_error(1))


if __name__ == "__main__":
    main()
