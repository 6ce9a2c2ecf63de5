"""The checks of ``rlkv-bench check`` on a GPU, one by one: ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch

from rlkv.benchmarks.check.one import Check, Setting, run_one
from rlkv.benchmarks.check.run import CHECKS


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_check(check: Check) -> None:
    row = run_one(check, Setting(torch.device("cuda")))
    if row["outcome"] == "cannot run":
        pytest.skip(row["reason"])
    assert row["outcome"] == "passes", row["reason"] + row["traceback"]
