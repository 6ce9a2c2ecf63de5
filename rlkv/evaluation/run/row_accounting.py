"""From a row that has just ended to its line in the file: clock, bytes, verdict, off the decode loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from rlkv.cache import CacheSettings
from rlkv.cache.accounting import EntrySize, entries_by_step, nbytes_of_entries


class BatchClock:
    """Divides every moment of a batch among the rows still decoded: their seconds add up to those of the batch."""

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
