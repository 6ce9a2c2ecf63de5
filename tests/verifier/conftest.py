"""Verifiers of two workers: one with room for slow answers, one in a hurry."""

from collections.abc import Iterator

import pytest

from rlkv.verifier import Verifier


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    made = Verifier(num_workers=2, timeout=3.0)
    made.is_correct(r"\boxed{\frac{1}{2}}", "0.5")  # start-up is not part of the limit
    yield made
    made.close()


@pytest.fixture(scope="module")
def hasty_verifier() -> Iterator[Verifier]:
    """One second is long for what must come out equal next to the bait, and keeps tests short."""
    made = Verifier(num_workers=2, timeout=1.0)
    made.is_correct(r"\boxed{\frac{1}{2}}", "0.5")
    yield made
    made.close()
