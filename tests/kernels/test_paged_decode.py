"""The decode kernel over block tables without a GPU: through the Triton interpreter (compiled: test_decode.py)."""

from __future__ import annotations

import pytest

from rlkv.benchmarks.check import paged_kernel
from tests.helpers.child import printed

pytest.importorskip("triton")


@pytest.mark.timeout(300)  # 20 seconds of a core
def test_it_equals_attention_in_float64_and_writes_nothing_else() -> None:
    found = [line.split() for line in printed("paged_triton", "max ", seconds=270)]
    cases = [line[1:] for line in found if line[0] == "error"]
    # float32: sums of at most 400 terms; float16: 11 bits, in the weights and in the output
    bounds = {"float32": 1e-5, "float16": 5e-3}
    assert {dtype: sum(case[0] == dtype for case in cases) for dtype in bounds} == {"float32": 6, "float16": 3}
    for dtype, error, wrong_numbers in cases:
        assert float(error) <= bounds[dtype]
        assert int(wrong_numbers) == 0
    ((_, right, wrong),) = [line for line in found if line[0] == "check"]
    assert float(right) <= 1e-5
    assert float(wrong) > paged_kernel.ALLOWED  # with windows one token too short
