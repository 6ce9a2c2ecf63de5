"""A progress line on stderr: how far, how fast, how long still, and running counts."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


def duration(seconds: float) -> str:
    """``seconds`` as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class CountingProgress:
    """A bar with rate and remaining time of *this* run: items that an earlier run finished do not count as fast."""

    def __init__(self, title: str, unit: str, total: int) -> None:
        """``unit`` names one item of ``total``, for the rate."""
        self.unit, self.total = unit, total
        self.counts: Counter[str] = Counter()
        self.done = self.resumed = 0
        # a log file gets one whole line at the end, whatever width a pipe is taken to have
        console = Console(file=sys.stderr, width=None if sys.stderr.isatty() else 160)
        columns = [
            TextColumn("{task.description}"),
            BarColumn(16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        ]
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task(title, total=total, note="")
        self._started = time.monotonic()

    def __enter__(self) -> CountingProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def resume(self, counts: Mapping[str, int]) -> None:
        """Items that were finished before this run, by kind; the clock starts here."""
        self.resumed = sum(counts.values())
        self._started = time.monotonic()
        self.advance(counts)

    def advance(self, counts: Mapping[str, int]) -> None:
        """Newly finished items by kind."""
        self.counts.update(counts)
        self.done += sum(counts.values())
        self._bar.update(self._task, completed=self.done, note=self.note())

    def note(self) -> str:
        """Rate, remaining time and counts as one phrase."""
        fresh = self.done - self.resumed
        parts = [f"{kind} {n}" for kind, n in sorted(self.counts.items(), key=lambda item: -item[1])]
        if fresh:
            rate = fresh / max(time.monotonic() - self._started, 1e-9)
            parts = [f"{rate:.2f} {self.unit}/s", f"{duration((self.total - self.done) / rate)} left", *parts]
        return ", ".join(parts)
