"""Is this answer right? Library, worker pool and the worker's own process."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from numbers import Real
from pathlib import Path

from rlkv.utils.runtime import require
from rlkv.verifier.extraction import MAX_ANSWER_CHARS, extract_answer, reference_answer
from rlkv.verifier.reading import Pairs, pairs_to_compare

__all__ = ["is_correct"]

WORKER_FILE = Path(__file__).with_name("worker.py")
START_SECONDS = 120.0  # importing sympy on a busy machine
# the limit is CPU time, so that a busy machine does not make right answers wrong; then wall time
WALL_FACTOR = 10
PAIRS_PER_WORKER = 16  # waiting pairs above which another worker starts


class _Worker:
    """One process with at most one pair at a time; ``deadline`` is when it has to have answered."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        # -P: the package's folder must not shadow libraries of the same names
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER_FILE), str(timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests, self.replies = self.process.stdin, self.process.stdout
        self.ready = self.was_killed_by_others = False
        self.job: int | None = None
        self.deadline = time.monotonic() + START_SECONDS

    def submit(self, job: int, pairs: Pairs) -> bool:
        """Hand over a job; False if the process is gone."""
        try:
            self.requests.write(json.dumps(pairs).encode() + b"\n")
            self.requests.flush()
        except OSError:
            return False
        self.job = job
        self.deadline = time.monotonic() + WALL_FACTOR * self.timeout
        return True

    def stop(self) -> None:
        """Kill the process and reap it."""
        late = time.monotonic() >= self.deadline
        self.process.kill()
        self.forget()
        # neither its own timer nor this side's: the out-of-memory killer, for instance
        self.was_killed_by_others = self.process.wait() != -signal.SIGPROF and not late

    def forget(self) -> None:
        """Close this side of the pipes only."""
        for pipe in (self.requests, self.replies):
            with suppress(OSError):  # unsent bytes for a dead process
                pipe.close()


class WorkerPool:
    """Up to ``num_workers`` processes, started when there is work for them, replaced when killed.

    Safe to use from several threads (one batch at a time) and after a fork (the child starts its
    own processes).  The processes end with their parent: an idle one when its input closes, a busy
    one by its own timer.
    """

    def __init__(self, num_workers: int, timeout: float) -> None:
        """``timeout`` is the limit for one pair, in seconds of CPU time.

        Ten times that is the limit in wall time.
        """
        if num_workers < 1 or not timeout > 0:
            raise ValueError(
                f"a verifier needs num_workers >= 1 and timeout > 0, got {num_workers} and "
                f"{timeout}"
            )
        self.num_workers = num_workers
        self.timeout = timeout
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def run(self, pairs: list[Pairs]) -> list[bool]:
        """Whether one ``(right answer, candidate)`` of each job is equal.

        A job that outlasts the limit has none.

        A pair whose worker dies otherwise gets one more try: the pair may not have caused it.

        Raises:
            ValueError: if math-verify is not installed.
            RuntimeError: if a process cannot start.
        """
        if not pairs:
            return []
        if os.getpid() != self._owner:  # forked: these processes are the parent's
            for worker in self._workers:
                worker.forget()
            self._workers, self._lock, self._owner = [], threading.Lock(), os.getpid()
        if importlib.util.find_spec("math_verify") is None:
            require("math_verify", "eval")
        with self._lock:
            try:
                return self._run(pairs)
            except BaseException:
                self._stop_all()  # a late reply must not be taken for the next batch's
                raise

    def close(self) -> None:
        """Kill the processes."""
        with self._lock:
            if os.getpid() == self._owner:
                self._stop_all()

    def _stop_all(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def _drop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.stop()

    def _run(self, pairs: list[Pairs]) -> list[bool]:
        verdicts = [False] * len(pairs)
        waiting = deque(range(len(pairs)))
        retried: set[int] = set()
        while waiting or any(w.job is not None for w in self._workers):
            self._start_missing(len(waiting))
            for worker in [w for w in self._workers if w.ready and w.job is None]:
                if waiting:
                    if worker.submit(waiting[0], pairs[waiting[0]]):
                        waiting.popleft()
                    else:
                        self._drop(worker)  # it died idle; the pair goes to another
            for worker, reply in self._wait():
                job, worker.job = worker.job, None
                if reply == b"ready\n" and not worker.ready:
                    worker.ready = True
                elif job is not None and reply in (b"0\n", b"1\n"):
                    verdicts[job] = reply == b"1\n"
                else:
                    self._drop(worker)
                    if job is not None and job not in retried and worker.was_killed_by_others:
                        retried.add(job)
                        waiting.appendleft(job)
                    if not worker.ready:
                        reason = (
                            reply.decode(errors="replace").strip() or "it ended or took too long"
                        )
                        raise RuntimeError(
                            f"the verifier's worker process could not start: {reason}"
                        )
        return verdicts

    def _start_missing(self, waiting: int) -> None:
        busy = sum(w.job is not None for w in self._workers)
        wanted = min(self.num_workers, busy + -(-waiting // PAIRS_PER_WORKER))
        while len(self._workers) < wanted:
            self._workers.append(_Worker(self.timeout))

    def _wait(self) -> list[tuple[_Worker, bytes]]:
        """Replies of the next workers to answer; an empty reply is a death or a missed deadline."""
        expecting = [w for w in self._workers if w.job is not None or not w.ready]
        if not expecting:
            return []
        with selectors.DefaultSelector() as selector:
            for worker in expecting:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
            left = min(w.deadline for w in expecting) - time.monotonic()
            answered = [key.data for key, _ in selector.select(max(0.0, left))]
        late = [w for w in expecting if w not in answered and w.deadline <= time.monotonic()]
        return [(w, w.replies.readline()) for w in answered] + [(w, b"") for w in late]


Answer = str | int | float | None
_NEVER_EQUAL = {"", "nan", "none", "null"}
_INTEGER = re.compile(r"[-+]?\d{1,100}")


def _text(answer: Answer) -> str:
    """The answer as text; empty for what equals nothing: no number or text, NaN, infinity as a
    number.
    """
    if isinstance(answer, bool) or not isinstance(answer, (str, Real)):
        return ""
    if isinstance(answer, float) and not math.isfinite(answer):
        return ""
    text = str(answer).strip()
    if text.lower() in _NEVER_EQUAL or len(text) > MAX_ANSWER_CHARS or "\0" in text:
        return ""
    return text


def _decide(answer: str, candidate: str) -> bool | Pairs:
    """The verdict where no algebra is needed, else the pairs of which one must be equal."""
    if not answer or not candidate:
        return False
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(candidate):
        return int(answer) == int(candidate)
    if " ".join(answer.split()) == " ".join(candidate.split()):
        return bool(answer.strip("$. "))
    return pairs_to_compare(answer, candidate)


class Verifier:
    """Verdicts on batches of answers; see :class:`rlkv.verifier.WorkerPool` for the processes
    behind it.

    A pair that takes longer than ``timeout`` seconds of CPU time (ten times that of wall time), or
    that crashes its worker, is not equal.
    """

    def __init__(self, num_workers: int = 2, timeout: float = 5.0) -> None:
        self.pool = WorkerPool(num_workers, timeout)

    def are_equal(self, pairs: Iterable[tuple[Answer, Answer]]) -> list[bool]:
        """Whether each ``(right answer, candidate)`` means the same.

        NaN, None, truth values and empty equal nothing.

        Of a right answer in GSM8K's form, what follows ``####`` counts.
        """
        decided: list[bool] = []
        jobs: list[Pairs] = []
        waiting: list[int] = []
        for answer, candidate in pairs:
            text = answer if not isinstance(answer, str) else reference_answer(answer)
            verdict = _decide(_text(text), _text(candidate))
            if not isinstance(verdict, bool):
                waiting.append(len(decided))
                jobs.append(verdict)
            decided.append(verdict is True)
        for i, verdict in zip(waiting, self.pool.run(jobs), strict=True):
            decided[i] = verdict
        return decided

    def are_correct(self, pairs: Iterable[tuple[str | None, Answer]]) -> list[bool]:
        """Whether each ``(output, right answer)`` ends in that answer."""
        return self.are_equal(
            (answer, extract_answer(output) if output else None) for output, answer in pairs
        )

    def is_correct(self, output: str | None, answer: Answer) -> bool:
        """Whether ``output`` ends in the right ``answer``."""
        return self.are_correct([(output, answer)])[0]

    def close(self) -> None:
        """End the worker processes; they start again when needed."""
        self.pool.close()


_DEFAULT = Verifier()  # its workers start when first needed
are_correct = _DEFAULT.are_correct


def is_correct(output: str | None, answer: Answer) -> bool:
    """Whether ``output`` ends in the right ``answer``.

    Never hangs: a comparison that takes more than five seconds of CPU time counts as not equal.

    Raises:
        ValueError: if math-verify is needed and not installed (pip install 'rlkv[eval]').
    """
    return _DEFAULT.is_correct(output, answer)
