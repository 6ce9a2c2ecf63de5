"""The kernels of the CUDA path, interpreted: programs in processes of their own, which print the
largest errors.
"""

from __future__ import annotations

import pytest

from tests.helpers.child import printed

pytest.importorskip("vllm")


def errors_of(program: str) -> list[str]:
    return printed(program, "max error")


def test_sinks_and_window_equal_the_torch_path() -> None:
    errors = [float(error) for error in errors_of("local_triton")]
    assert len(errors) == 12
    assert max(errors) < 2e-6  # float32 sums of at most 300 terms of size ~1


def test_mixed_attention_equals_the_torch_path() -> None:
    errors = [float(error) for error in errors_of("mixed_triton")]
    assert len(errors) == 2
    assert max(errors) < 2e-6  # float32 sums of at most 300 terms of size ~1


def test_eviction_equals_the_torch_path() -> None:
    found: dict[str, list[float]] = {}
    for line in errors_of("evicting_triton"):
        dtype, error = line.split()
        found.setdefault(dtype, []).append(float(error))
    assert {dtype: len(errors) for dtype, errors in found.items()} == {"float32": 32, "float16": 10}
    assert max(found["float32"]) < 2e-6
    assert max(found["float16"]) < 5e-3  # outputs of size up to 3, in 11 bits


def test_gaps_are_cut_out_of_block_tables_as_by_torch() -> None:
    differences = [int(number) for number in errors_of("gaps_triton")]
    assert len(differences) == 21
    assert not any(differences)
