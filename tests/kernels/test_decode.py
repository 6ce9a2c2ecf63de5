"""The decode kernel without a GPU: in the Triton interpreter, and compiled for GPUs.

All shapes and dtypes: ``tests/gpu/test_kernels.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.child import printed

pytest.importorskip("triton")


def test_it_equals_float64_and_a_wrong_window_shows() -> None:
    right, wrong = map(float, printed("decode_kernel", "error", TRITON_INTERPRET="1"))
    assert right <= 1e-5  # float32: sums of at most 144 terms
    assert wrong > 5e-3


def test_it_compiles_for_gpus(tmp_path: Path) -> None:
    variables = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    *kernels, gaps = printed("decode_compile", "", **variables)
    assert gaps == "gaps 0"
    assert len(kernels) == 3
    for kernel in kernels:
        _, variant, shared, stack, in_order = kernel.split()
        # two programs share the 100 KiB of the smallest multiprocessors
        assert int(shared) <= 49, variant
        assert int(stack) <= 16, variant  # no tile is moved out of the registers
        assert in_order == "True", variant
