"""Clock, bytes and background thread of the runner, each alone."""

from __future__ import annotations

import threading

import pytest
import torch

from rlkv.cache import CacheSettings
from rlkv.cache.accounting import EntrySize, kv_nbytes
from rlkv.evaluation.run.row_accounting import Background, BatchBytes, BatchClock
from rlkv.eviction import H2O, RKV


def test_seconds_of_rows_add_up_to_those_of_the_batch() -> None:
    times = iter([10.0, 13.0, 14.0, 20.0, 24.0])
    clock = BatchClock(3, lambda: next(times))
    first = clock.end_row()  # 3 s among three rows
    second = clock.end_row()  # and 1 s between two
    clock.skip()  # 6 s of waiting
    third = clock.end_row()
    assert (first, second, third) == (1.0, 1.5, 5.5)
    assert first + second + third == (24 - 10) - (20 - 14)


@pytest.mark.parametrize("eviction", [None, RKV(budget=24, buffer=4, observation=4), H2O(ratio=0.5)])
def test_bytes_of_a_row_are_those_of_a_batch_of_its_own(eviction) -> None:
    settings = CacheSettings(sink=4, window=9, eviction=eviction)
    full = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) > 0.5
    size = EntrySize(head_dim=16, group_size=2, itemsize=4)
    prompts, new = torch.tensor([11, 40, 23, 30]), [50, 7, 7, 33]
    sizes = BatchBytes(settings, full, size, prompts)
    for row in sorted(range(4), key=lambda i: new[i]):
        held, whole = kv_nbytes(settings, full, size, prompts[[row]], prompts[[row]] + new[row] - 1)
        assert sizes.of_row(row, new[row]) == (int(held), int(whole))


def test_jobs_run_in_their_order_on_another_thread() -> None:
    ran: list[int] = []
    threads: set[int] = set()

    def job(i: int) -> None:
        ran.append(i)
        threads.add(threading.get_ident())

    with Background(capacity=3) as background:
        for i in range(50):
            background.submit(lambda i=i: job(i))
    assert ran == list(range(50))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_the_failure_of_a_job_reaches_who_gives_jobs() -> None:
    def fail() -> None:
        raise OSError("no room")

    taken: list[int] = []

    def give(capacity: int, more: int) -> None:
        with Background(capacity) as background:
            background.submit(fail)
            for i in range(more):
                background.submit(lambda: None)
                taken.append(i)

    with pytest.raises(OSError, match="no room"):
        give(capacity=1, more=1)  # one open job at a time: the next one waits for the failed one
    assert taken == []
    with pytest.raises(OSError, match="no room"):
        give(capacity=4, more=0)


def test_an_error_of_the_giver_drops_what_has_not_begun() -> None:
    begun, go_on = threading.Event(), threading.Event()
    ran: list[str] = []

    def first() -> None:
        begun.set()
        assert go_on.wait(60)
        ran.append("first")

    def give() -> None:
        with Background(capacity=4) as background:
            background.submit(first)
            background.submit(lambda: ran.append("second"))
            assert begun.wait(60)
            threading.Timer(0.05, go_on.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        give()
    assert ran == ["first"]
