"""The decode kernel on a CPU, through the Triton interpreter; prints the errors of every case.

    python -m tests.helpers.decode_triton

A line of a case is ``max error``, dtype, ratio to the reference, ratio to the torch path, and wrong
numbers in the buffers; of a whole model ``max difference``, that of the logits, and launches too
few or too many.  ``max check`` has the largest error that ``rlkv-bench check`` finds, and the one
that it finds with a wrong window.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from dataclasses import replace
from unittest import mock

import torch

from rlkv.benchmarks.check import decode_kernel
from rlkv.benchmarks.check.one import Findings, Setting
from rlkv.kernels import decode as splits
from tests.helpers.decode_cases import Case, Run, covering_cases, extreme_cases
from tests.helpers.decode_flows import FLOWS, difference


def print_errors(case: Case, dtype: torch.dtype) -> None:
    with mock.patch.object(splits, "_processors", return_value=case.processors):
        errors = Run(case, dtype, "cpu").errors()
    print(
        "max error",
        str(dtype).removeprefix("torch."),
        errors.reference,
        errors.torch_path,
        errors.buffers,
    )


def check_error(window: int) -> float:
    """What the check finds with few heads and short texts, if the kernel's window is ``window``."""
    found, step = Findings(), decode_kernel.DecodeStep
    shapes = tuple(
        replace(shape, cached=min(shape.cached, 120))
        for shape in decode_kernel.SHAPES
        if shape.full == 1
    )
    with mock.patch.object(
        decode_kernel, "DecodeStep", lambda *numbers: step(*numbers[:-1], window)
    ):
        decode_kernel.run(Setting(torch.device("cpu")), found, shapes)
    return found.figures["largest error"]


def main() -> None:
    torch.set_num_threads(1)
    for number, case in enumerate(covering_cases()):
        print_errors(case, torch.float16 if number % 4 == 3 else torch.float32)
    for number, case in enumerate(extreme_cases()):
        print_errors(case, torch.float16 if number % 2 else torch.float32)
    with mock.patch.object(splits, "_processors", return_value=24):
        for flow in FLOWS:
            print("max difference", *difference(flow, "cpu"))
        print("max check", check_error(decode_kernel.WINDOW), check_error(decode_kernel.WINDOW - 1))


if __name__ == "__main__":
    main()
