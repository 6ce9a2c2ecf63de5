"""Verifiers of two workers: one with room for slow answers, one in a hurry."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rlkv.verifier import Verifier


@contextmanager
def started(timeout: float) -> Iterator[Verifier]:
    made = Verifier(num_workers=2, timeout=timeout)
    made.are_correct([(r"\boxed{\frac{1}{2}}", "0.5")])  # start-up is not part of the limit
    yield made
    made.close()


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with started(3.0) as made:
        yield made


@pytest.fixture(scope="module")
def hasty_verifier() -> Iterator[Verifier]:
    """One second is long for what must come out equal next to the bait, and keeps tests short."""
    with started(1.0) as made:
        yield made
