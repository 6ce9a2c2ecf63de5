"""Turns, memory at its highest, and what counts as too little of it."""

from __future__ import annotations

import pytest
import torch

from rlkv.benchmarks.turns import fits, peak_bytes, turns


def test_each_round_starts_with_another() -> None:
    assert "".join(turns("abc", 4)) == "abcbcacababc"


def test_the_peak_counts_what_is_held_at_once() -> None:
    def work() -> None:
        for _ in range(3):
            torch.empty(1000, dtype=torch.uint8).add_(1)
        first, second = torch.empty(4000, dtype=torch.uint8), torch.empty(2000, dtype=torch.uint8)
        del first, second

    assert 6000 <= peak_bytes(work, torch.device("cpu")) < 7000


def test_only_a_lack_of_memory_means_that_work_does_not_fit() -> None:
    assert fits(lambda: None)
    assert not fits(lambda: torch.empty(2**60))

    def fail() -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        fits(fail)
