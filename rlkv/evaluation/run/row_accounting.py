"""From a row that has just ended to its line in the file: clock, bytes, verdict, off the decode loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

from rlkv.cache import CacheSettings
from rlkv.cache.accounting import EntrySize, entries_by_step, nbytes_of_entries


class BatchClock:
    """Divides the time of a batch among its rows: every moment goes in equal parts to the rows that are still decoded.

    So the seconds of the rows add up to those of the batch, and each is known when its row ends.
    """

    def __init__(self, rows: int, now: Callable[[], float] = time.perf_counter) -> None:
        self.active, self.share, self._now = rows, 0.0, now
        self._last = now()

    def end_row(self) -> float:
        """Seconds of a row that ends now."""
        now = self._now()
        self.share += (now - self._last) / self.active
        self._last = now
        self.active -= 1
        return self.share

    def skip(self) -> None:
        """The time since the last row ended was not decoding."""
        self._last = self._now()


class BatchBytes:
    """Bytes of KV that each row of a batch holds at its own end, as if it were decoded alone.

    Args:
        full: bool ``[layers, KV heads]``; prompts: int64 ``[B]``, their tokens.
    """

    def __init__(self, settings: CacheSettings, full: Tensor, size: EntrySize, prompts: Tensor) -> None:
        self.settings, self.full, self.size, self.prompts = settings, full, size, prompts
        policy = settings.eviction
        self._entries = None if policy is None else entries_by_step(policy, prompts, settings.prefill)
        self._step, self._held = -1, torch.zeros_like(prompts)

    def of_row(self, row: int, new_tokens: int) -> tuple[int, int]:
        """Bytes in use, and of the full cache, after ``new_tokens``; rows are asked for in the order of their ends."""
        step = new_tokens - 1  # the last token is never fed
        assert step >= self._step
        while self._entries is not None and self._step < step:
            self._held = next(self._entries)
            self._step += 1
        tokens = self.prompts[row : row + 1] + step
        entries = None if self._entries is None else self._held[row : row + 1]
        held, whole = nbytes_of_entries(self.settings, self.full, self.size, tokens, entries)
        return int(held), int(whole)


class Background:
    """Jobs run in order on one other thread, so that slow ones do not hold up the caller.

    ``submit`` waits while ``capacity`` jobs are open, and raises what an earlier job raised; leaving the context waits
    for all, or, after an error, drops those that have not begun.
    """

    def __init__(self, capacity: int) -> None:
        self._pool = ThreadPoolExecutor(1, "grading")
        self._room = threading.Semaphore(capacity)
        self._failed: Future[None] | None = None

    def submit(self, job: Callable[[], None]) -> None:
        self._room.acquire()
        self._raise_failure()
        self._pool.submit(job).add_done_callback(self._end)

    def _end(self, done: Future[None]) -> None:
        if self._failed is None and not done.cancelled() and done.exception() is not None:
            self._failed = done
        self._room.release()

    def _raise_failure(self) -> None:
        if self._failed is not None:
            self._failed.result()

    def __enter__(self) -> Background:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=error is not None)
        if error is None:
            self._raise_failure()
