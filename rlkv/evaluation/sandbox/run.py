"""The evaluator's side of the sandbox."""

import ast
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

START = "import sys; sys.path.append(sys.argv[1]); from inside.judge import main; sys.path.pop(); main()"
_warned: set[str] = set()


class SandboxError(RuntimeError):
    """The sandbox itself did not work: no verdict on the program."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one run; wall-clock time holds for all tests together, ``file_bytes`` for each file."""

    wall_seconds: float = 60.0  # much more: a busy machine must not fail a right program
    cpu_seconds: int = 5
    memory_bytes: int = 512 << 20
    file_bytes: int = 16 << 20
    open_files: int = 64


@dataclass(frozen=True)
class Verdict:
    """Result of one program; ``detail`` says where, ``seconds`` is wall-clock time with start and clean-up.

    ``reason``: passed, failed (a false assertion), error (an exception, in the program or in a test), exit (it left
    before the end of the tests), timeout, memory or killed (by a signal).
    """

    reason: str
    detail: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether all tests passed."""
        return self.reason == "passed"


def run_tests(
    program: str, tests: Sequence[str], limits: Limits | None = None, *, setup: str = "", stdin: str | None = None
) -> Verdict:
    """Run an untrusted program (not as ``__main__``), then ``setup``, then tests with at least one assert each.

    With ``stdin`` the program runs as ``__main__`` with that text as its input; tests know what it wrote as ``output``,
    and none of its other names.

    Raises:
        ValueError: a test is not Python or contains no assert, or there are no tests.
        SandboxError: the sandbox cannot run on this machine.
    """
    if not tests:
        raise ValueError("a code task without tests: give at least one assert statement")
    for test in (setup, *tests):
        try:
            nodes = list(ast.walk(ast.parse(test)))
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"the test {test!r} is not Python: {error}") from error
        if test is not setup and not any(isinstance(node, ast.Assert) for node in nodes):
            raise ValueError(f"the test {test!r} has no assert statement: it would pass with any program")
    start, nonce, pipe = time.monotonic(), secrets.token_hex(16), subprocess.PIPE
    numbered = {f"test {number}": test for number, test in enumerate(tests, 1)}
    job = json.dumps({"program": program, "tests": numbered, "setup": setup, "stdin": stdin, "nonce": nonce})
    folder = tempfile.mkdtemp(prefix="rlkv-sandbox-")
    arguments = [os.path.dirname(__file__), folder, json.dumps(asdict(limits or Limits()))]
    # -I -S: no environment, no site-packages, nothing of the current folder
    command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", START, *arguments]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env={}, start_new_session=True) as process:
        try:
            output, errors = process.communicate(job.encode())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            subprocess.run(["rm", "-rf", folder])
    missing, *verdicts = output.splitlines() or [b""]
    if not missing:
        raise SandboxError(f"the sandbox did not start (it needs Linux): {errors.decode(errors='replace')[-500:]}")
    for protection in set(json.loads(missing)) - _warned:
        _warned.add(protection)
        logging.getLogger(__name__).warning("the sandbox for generated programs lacks on this machine: %s", protection)
    ended = ["timeout", "wall-clock time"] if process.returncode == -signal.SIGALRM else ["killed", "with the judge"]
    reason, detail = next((json.loads(line)[1:] for line in verdicts if nonce.encode() in line), ended)
    return Verdict(reason, detail, time.monotonic() - start)
