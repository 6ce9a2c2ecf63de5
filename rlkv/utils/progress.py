"""The one progress bar of all commands, on stderr: progress, rate, time left and a note."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

LOG_WIDTH = 160  # a log file gets whole lines, whatever width a pipe is taken to have


def duration(seconds: float) -> str:
    """Format ``seconds`` as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class ProgressBar:
    """A bar whose rate and time left are those of *this* run; made by :func:`progress_bar`."""

    def __init__(self, bar: Progress, title: str, unit: str, total: int | None) -> None:
        self.unit = unit
        self.total = total
        self.done = 0
        self.counts: Counter[str] = Counter()
        self._bar = bar
        self._task = bar.add_task(title, total=total, note="")
        self._resumed = 0
        self._started = time.monotonic()

    def resume(self, items: int | Mapping[str, int]) -> None:
        """Count what earlier runs finished: a number, or one per kind.

        The clock starts here, if this run has finished nothing yet.
        """
        fresh = self.done - self._resumed
        self.advance(items)
        self._resumed = self.done - fresh
        if not fresh:
            self._started = time.monotonic()

    def advance(self, items: int | Mapping[str, int] = 1) -> None:
        """Count ``items`` more; numbers per kind are shown as running totals."""
        if not isinstance(items, int):
            self.counts.update(items)
            items = sum(items.values())
        kinds = [f"{kind} {number}" for kind, number in self.counts.most_common()]
        self.update(self.done + items, note=", ".join(kinds))

    def update(
        self, done: int, total: int | None = None, title: str | None = None, note: str = ""
    ) -> None:
        """Show that ``done`` of ``total`` items are finished, with ``note`` at the end."""
        self.done = done
        if total is not None:
            self.total = total
        shown = ", ".join(part for part in (self.pace(), note) if part)
        self._bar.update(
            self._task, completed=done, total=self.total, note=shown, description=title
        )

    def pace(self) -> str:
        """Return the rate of this run and the time left; empty until it has finished something."""
        fresh = self.done - self._resumed
        if fresh <= 0:
            return ""
        rate = fresh / max(time.monotonic() - self._started, 1e-9)
        left = "" if self.total is None else f", {duration((self.total - self.done) / rate)} left"
        return f"{rate:.3g} {self.unit}/s{left}"


@contextmanager
def progress_bar(
    title: str, unit: str, total: int | None = None, disable: bool = False
) -> Iterator[ProgressBar]:
    """Show a bar until the block ends; ``unit`` names one item of ``total``, for the rate."""
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=Console(file=sys.stderr, width=None if sys.stderr.isatty() else LOG_WIDTH),
        disable=disable,
    ) as bar:
        yield ProgressBar(bar, title, unit, total)
