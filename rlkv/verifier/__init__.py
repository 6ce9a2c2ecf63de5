"""Is this answer right?  Extract it, compare it, and survive whatever a model writes."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from numbers import Real
from pathlib import Path

from rlkv.utils.runtime import require
from rlkv.verifier.extraction import (
    MAX_ANSWER_CHARS,
    NEVER_EQUAL,
    extract_answer,
    reference_answer,
)
from rlkv.verifier.reading import Pairs, pairs_to_compare

__all__ = ["is_correct"]

WORKER_FILE = Path(__file__).with_name("worker.py")
START_SECONDS = 120.0  # importing sympy on a busy machine
# the limit is CPU time, so that a busy machine does not make right answers wrong; then wall time
WALL_FACTOR = 10
PAIRS_PER_WORKER = 16  # waiting pairs above which another worker starts


class _Worker:
    """One process that compares, and ends with this one: when its input closes, or by its timer."""

    def __init__(self, timeout: float) -> None:
        self.busy = True
        self._timeout = timeout
        self.is_ready = False
        # -P: the package's folder must not shadow libraries of the same names
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER_FILE), str(timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def compare(self, pairs: Pairs) -> bool | None:
        """Return whether one of the pairs is equal; None if the process did not answer."""
        if not self.is_ready:
            reply = self._read(START_SECONDS)
            if reply != b"ready\n":
                reason = reply.decode(errors="replace").strip() or "it ended or took too long"
                raise RuntimeError(f"the verifier's worker process could not start: {reason}")
            self.is_ready = True
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(pairs).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:  # it died while it was idle
            return None
        reply = self._read(WALL_FACTOR * self._timeout)
        return reply == b"1\n" if reply in (b"0\n", b"1\n") else None

    def _read(self, seconds: float) -> bytes:
        """Return the next line; empty if the process ended or took too long."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        # poll, because select refuses descriptors above 1,024
        waiting = select.poll()
        waiting.register(self.process.stdout, select.POLLIN | select.POLLHUP)
        while (left := deadline - time.monotonic()) > 0:
            if waiting.poll(1000 * left):
                return self.process.stdout.readline()
        return b""

    def stop(self) -> bool:
        """Kill the process; return whether it had been killed by others, such as for its memory."""
        # its own timer ends it by SIGPROF, and a process that is late is still there
        code = self.process.poll()
        if code is None:
            with suppress(subprocess.TimeoutExpired):  # its pipe closes before it can be reaped
                code = self.process.wait(0.1)
        self.process.kill()
        self.process.wait()
        self.forget()
        return code not in (None, -signal.SIGPROF)

    def forget(self) -> None:
        """Close this side of the pipes only."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(OSError):  # unsent bytes for a dead process
                pipe.close()


Answer = str | int | float | None
_INTEGER = re.compile(r"[-+]?\d{1,100}")


def _text(answer: Answer) -> str:
    """Return the answer as text; empty for what equals nothing, such as NaN and truth values."""
    if isinstance(answer, bool) or not isinstance(answer, (str, Real)):
        return ""
    if isinstance(answer, float) and not math.isfinite(answer):
        return ""
    text = str(answer).strip()
    if text.lower() in NEVER_EQUAL or len(text) > MAX_ANSWER_CHARS or "\0" in text:
        return ""
    return text


def _reference(answer: Answer) -> str:
    return _text(reference_answer(answer) if isinstance(answer, str) else answer)


def has_answer(answer: Answer) -> bool:
    """Return whether a right ``answer`` is given: nothing equals None, NaN, true or ""."""
    return bool(_reference(answer))


def _decide(answer: str, candidate: str) -> bool | Pairs:
    """Return the verdict where no algebra is needed, else pairs of which one must be equal."""
    if not answer or not candidate:
        return False
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(candidate):
        return int(answer) == int(candidate)
    if " ".join(answer.split()) == " ".join(candidate.split()):
        return bool(answer.strip("$. "))
    return pairs_to_compare(answer, candidate)


def check_installed() -> None:
    """Raise ``ValueError`` without math-verify, which this process does not import."""
    if importlib.util.find_spec("math_verify") is None:
        require("math_verify", "eval")


class Verifier:
    """Verdicts on batches of answers, by processes that start when there is work for them.

    A pair that takes longer than ``timeout`` seconds of CPU time (ten times that of wall time), or
    that crashes its worker, is not equal.  Safe to use from several threads (one batch at a time)
    and after a fork (the child starts its own processes).
    """

    def __init__(self, num_workers: int = 2, timeout: float = 5.0) -> None:
        if num_workers < 1 or not timeout > 0:
            raise ValueError(
                f"a verifier needs num_workers >= 1 and timeout > 0, got {num_workers} and "
                f"{timeout}"
            )
        self.num_workers = num_workers
        self.timeout = timeout
        self._have_none()

    def _have_none(self) -> None:
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()  # one batch at a time
        self._guard = threading.Lock()  # of the list of workers, in a batch
        self._owner = os.getpid()
        self._is_stopping = False

    def are_equal(self, pairs: Iterable[tuple[Answer, Answer]]) -> list[bool]:
        """Return whether each ``(right answer, candidate)`` means the same.

        NaN, None, truth values and empty equal nothing.  Of a right answer in GSM8K's form, what
        follows ``####`` counts.

        Raises:
            ValueError: if math-verify is needed and not installed.
            RuntimeError: if a process cannot start.
        """
        decided: list[bool] = []
        jobs: dict[int, Pairs] = {}
        for answer, candidate in pairs:
            verdict = _decide(_reference(answer), _text(candidate))
            if not isinstance(verdict, bool):
                jobs[len(decided)] = verdict
            decided.append(verdict is True)
        for i, verdict in zip(jobs, self._run(list(jobs.values())), strict=True):
            decided[i] = verdict
        return decided

    def are_correct(self, pairs: Iterable[tuple[str | None, Answer]]) -> list[bool]:
        """Return whether each ``(output, right answer)`` ends in that answer."""
        return self.are_equal(
            (answer, extract_answer(output) if output else None) for output, answer in pairs
        )

    def close(self) -> None:
        """End the worker processes; they start again when needed."""
        with self._lock:
            if os.getpid() == self._owner:
                self._stop_all()

    def _run(self, jobs: list[Pairs]) -> list[bool]:
        """Return whether one ``(right answer, candidate)`` of each job is equal."""
        if not jobs:
            return []
        if os.getpid() != self._owner:  # forked: these processes are the parent's
            for worker in self._workers:
                worker.forget()
            self._have_none()
        check_installed()
        with self._lock:
            self._is_stopping = False
            threads = min(self.num_workers, -(-len(jobs) // PAIRS_PER_WORKER))
            executor = ThreadPoolExecutor(threads, "verifier")
            try:
                return list(executor.map(self._compare, jobs))
            except BaseException:
                executor.shutdown(wait=False, cancel_futures=True)
                self._stop_all()  # a late reply must not be taken for the next batch's
                raise
            finally:
                executor.shutdown()

    def _compare(self, pairs: Pairs) -> bool:
        for _ in range(2):  # a worker that was killed may not have died of this job
            with self._guard:
                worker = self._idle_worker()
            verdict = worker.compare(pairs)
            if verdict is not None:
                worker.busy = False
                return verdict
            with self._guard:
                self._workers.remove(worker)
            if not worker.stop() or self._is_stopping:
                break
        return False

    def _idle_worker(self) -> _Worker:
        """Return a live process for one of the ``num_workers`` threads."""
        for worker in [worker for worker in self._workers if not worker.busy]:
            if worker.process.poll() is None:
                worker.busy = True
                return worker
            self._workers.remove(worker)
            worker.stop()
        worker = _Worker(self.timeout)
        self._workers.append(worker)
        return worker

    def _stop_all(self) -> None:
        self._is_stopping = True
        for worker in self._workers:
            worker.process.kill()
        for worker in list(self._workers):
            worker.stop()
        self._workers = []


_DEFAULT = Verifier()  # its workers start when first needed
are_correct = _DEFAULT.are_correct


def is_correct(output: str | None, answer: Answer) -> bool:
    """Return whether ``output`` ends in the right ``answer``.

    Never hangs: a comparison that takes more than five seconds of CPU time counts as not equal.

    Raises:
        ValueError: if math-verify is needed and not installed (pip install 'rlkv[eval]').
    """
    return are_correct([(output, answer)])[0]
