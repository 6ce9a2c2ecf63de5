"""The background thread of the runner."""

from __future__ import annotations

import threading

import pytest

from rlkv.evaluation.runner import Background


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
