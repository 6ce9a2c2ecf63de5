"""The kernels of the CUDA path, interpreted, in a process of their own."""

from __future__ import annotations

import pytest

from tests.helpers.child import printed

pytest.importorskip("vllm")

CASES = {"gaps": 10, "local": 6, "mixed": 4, "evicting": 12}


def test_the_cuda_path_equals_the_torch_path() -> None:
    errors: dict[str, list[float]] = {path: [] for path in CASES}
    for line in printed("triton_paths", ""):
        path, _, error = line.partition(" ")
        if path in errors:
            errors[path].append(float(error))
    assert {path: len(found) for path, found in errors.items()} == CASES
    assert not any(errors["gaps"])
    for path in ("local", "mixed", "evicting"):
        # float32 sums of at most 300 terms of size ~1; max would lose NaN
        assert all(error < 2e-6 for error in errors[path]), path
