"""The decode kernel without a GPU: through the Triton interpreter, and compiled for GPUs that are
not there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkv.benchmarks.check import decode_kernel
from tests.helpers.child import printed

pytest.importorskip("triton")
pytestmark = pytest.mark.timeout(600)  # 40 seconds of a core: minutes where others want it too


@pytest.fixture(scope="module")
def interpreted() -> list[str]:
    return printed("decode_triton", "max ", seconds=570)


def test_it_equals_the_reference_and_the_torch_path(interpreted: list[str]) -> None:
    cases = [line.split()[1:] for line in interpreted if line.startswith("error")]
    # float32: sums of at most 1,024 terms; float16: 11 bits, in the weights and in the output
    bounds = {"float32": 1e-5, "float16": 5e-3}
    counts = {dtype: sum(case[0] == dtype for case in cases) for dtype in bounds}
    assert counts == {"float32": 33, "float16": 11}
    for dtype, reference, torch_path, wrong_numbers in cases:
        assert float(reference) <= bounds[dtype]
        assert float(torch_path) <= bounds[dtype]
        assert int(wrong_numbers) == 0


def test_models_decode_as_without_it(interpreted: list[str]) -> None:
    flows = [line.split()[1:] for line in interpreted if line.startswith("difference")]
    assert len(flows) == 4
    for difference, launches_amiss in flows:
        assert float(difference) < 2e-5  # as other comparisons of these models
        assert int(launches_amiss) == 0


def test_the_check_up_finds_a_wrong_window(interpreted: list[str]) -> None:
    (found,) = [line.split()[1:] for line in interpreted if line.startswith("check")]
    right, wrong = map(float, found)
    assert right <= 1e-5
    assert wrong > decode_kernel.ALLOWED


def test_it_compiles_for_gpus(tmp_path: Path) -> None:
    kernels = printed(
        "decode_compile", "compiled", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)
    )
    assert len(kernels) == 4
    for kernel in kernels:
        variant, shared, stack, wide_loads, in_order, loads_ahead = kernel.split()
        assert int(shared) <= 49, (
            variant
        )  # two programs share the 100 KiB of the smallest multiprocessors
        assert int(stack) <= 16, variant  # no tile is moved out of the registers
        assert wide_loads == "True", variant
        assert in_order == "True", variant
        assert int(loads_ahead) >= 2, variant  # keys and values of the next block
