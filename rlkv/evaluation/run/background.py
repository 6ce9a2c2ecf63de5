"""A thread that grades and writes rows while others are decoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Jobs run in order on one other thread; ``submit`` waits while ``capacity`` are open, and raises what one raised.

    Leaving the context waits for all jobs or, after an error, drops those that have not begun.
    """

    def __init__(self, capacity: int) -> None:
        self._pool, self._capacity = ThreadPoolExecutor(1, "grading"), capacity
        self._open: deque[Future[None]] = deque()

    def submit(self, job: Callable[[], None]) -> None:
        while self._open and (len(self._open) >= self._capacity or self._open[0].done()):
            self._open.popleft().result()
        self._open.append(self._pool.submit(job))

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for job in self._open:
                job.result()
