"""The verifier's worker: a process of its own that may hang, run out of memory or crash without harm.

Run by path, never imported.  It reads one JSON list ``[answer, candidate]`` a line from stdin and writes ``1``
or ``0`` a line to stdout; the first line that it writes is ``ready``, or ``error`` and why it cannot work.
It ends when stdin closes, that is, with its parent.  Only math-verify's LaTeX grammar is used: its other
extractors go through ``eval``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

MEMORY_LIMIT_BYTES = 4 << 30


def _prepare(memory_limit: int) -> Any:
    """Keep stdout for verdicts alone, leave Ctrl-C to the parent, limit memory; returns the verdict stream."""
    verdicts = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # the kernel's default action ends the process even inside one endless C call, which no handler would
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):  # macOS has no limit on address space
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    logging.disable(logging.CRITICAL)
    return verdicts


def main() -> None:
    """Serve until stdin closes; the only argument is the limit per pair, in seconds of CPU time."""
    timeout = float(sys.argv[1])
    verdicts = _prepare(MEMORY_LIMIT_BYTES)
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except Exception as error:
        verdicts.write(f"error {type(error).__name__}: {error}\n".replace("\n", " ") + "\n")
        return

    @lru_cache(maxsize=64)
    def parsed(text: str) -> list[Any]:
        # math-verify's own timeouts are off: they hang too, and would be a second clock
        return parse("\\boxed{" + text + "}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)

    def equal(answer: str, candidate: str) -> bool:
        try:
            return bool(verify(parsed(answer), parsed(candidate), timeout_seconds=None))
        except (Exception, MemoryError):
            return False

    equal("\\frac{1}{2}", "0.5")  # the first parse builds the grammar's tables
    verdicts.write("ready\n")
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, timeout)
        answer, candidate = json.loads(line)
        verdict = equal(answer, candidate)
        signal.setitimer(signal.ITIMER_PROF, 0)
        verdicts.write("1\n" if verdict else "0\n")


if __name__ == "__main__":
    main()
