"""Run generated programs against tests: ``run_tests(program, tests, limits)`` gives a ``Verdict``.

The tests never enter the program's process. A *judge* process evaluates them; the *worker* process
of the program, started before the judge reads them, answers single calls with plain data. Only
values of exact built-in types are compared, so an object with its own ``__eq__`` proves nothing.
The judge alone writes the verdict, with a nonce that the worker never sees: leaving early, patched
builtins, printed verdicts, frames and memory give no pass.

What shuts the worker in is found by a trial (:func:`isolation`). Where bubblewrap is installed and
the system permits namespaces, the worker has a machine of its own: Python's library, a folder in
memory, no other process and no network. Otherwise Landlock (Linux 5.13) leaves it Python's library
and a temporary folder. In both cases it has resource limits, no capabilities and, of the
environment, a fixed seed of hashes alone, and a filter of system calls (x86_64, aarch64) allows
what a program needs that computes: no signals, sockets, new processes, shared memory, keys, changes
of owner, mode, time or priority. Where neither holds, no program is run: ``SandboxError``. At the
end, also that of the evaluator, the processes are killed and the folder is removed.

This stops a language model's careless or cheating program, not a determined attacker. Not covered:
weak tests; helpers that a test takes from the program; arguments changed in place; under Landlock
also the sum of all files, and names and sizes of files of others. Functions as arguments are
errors.
"""

import ast
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Limits", "SandboxError", "Verdict", "check_tests", "isolation", "run_tests"]

# all that the program may read outside its own folder: Python's library and the shared libraries
# that it loads
READABLE = {
    os.path.dirname(os.__file__),
    f"{sys.base_prefix}/lib",
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
}
DEVICES = ["/dev/null", "/dev/urandom"]
INSIDE = os.path.join(os.path.dirname(__file__), "inside")
# no site-packages, nothing of the current folder
PYTHON = [os.path.realpath(sys.executable), "-P", "-S", "-X", "utf8", "-c"]
# all of it; with another seed each time the order of a set, and so a verdict, would change
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
START = (
    "import sys; sys.path.append(sys.argv[1]); from inside.{} import main; sys.path.pop(); main()"
)
START_SECONDS = 60  # to shut the worker in, on a busy machine
END_SECONDS = 60  # to clean up
NEWEST = 1 << 16  # any version of Landlock


class SandboxError(ValueError):
    """The sandbox itself did not work: no verdict on the program."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one run: wall-clock time for all tests together, ``file_bytes`` for each file."""

    wall_seconds: float = 60.0  # much more: a busy machine must not fail a right program
    cpu_seconds: int = 5
    memory_bytes: int = 512 << 20
    file_bytes: int = 16 << 20
    open_files: int = 64


@dataclass(frozen=True)
class Verdict:
    """Result of one program.

    Attributes:
        reason: passed, failed (a false assertion), error (an exception, in the program or in a
            test), exit (it left before the end of the tests), timeout, memory or killed (by a
            signal).
        detail: where, and what was raised.
    """

    reason: str
    detail: str

    @property
    def passed(self) -> bool:
        return self.reason == "passed"


@dataclass(frozen=True)
class Isolation:
    """Means that keep a program from the machine, beside limits and the filter of system calls.

    Attributes:
        bubblewrap: path of ``bwrap``; None: without.
        landlock: newest version of Landlock to use; 0: none.
    """

    bubblewrap: str | None = None
    landlock: int = 0

    def command(self, folder: str, limits: Limits) -> list[str]:
        """Return what starts the worker.

        In bubblewrap ``folder`` is in memory, with a bound for all files together.
        """
        if self.bubblewrap is None:
            return self._python(os.path.dirname(INSIDE), folder, limits)
        command = [self.bubblewrap, "--unshare-all", "--die-with-parent", "--new-session"]
        command += ["--cap-drop", "ALL"]
        command += ["--size", str(4 * limits.file_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp"]
        command += ["--ro-bind", INSIDE, "/inside", "--ro-bind", PYTHON[0], PYTHON[0]]
        for path in sorted(READABLE):
            command += ["--ro-bind-try", path, path]
        for path in DEVICES:
            command += ["--dev-bind", path, path]
        # there is no /proc, to which these names lead elsewhere: the files that the worker makes
        command += ["--symlink", "/tmp/stdin", "/dev/stdin"]
        command += ["--symlink", "/tmp/stdout", "/dev/stdout"]
        command += ["--symlink", "/dev/null", "/dev/stderr"]
        return [*command, "--remount-ro", "/", "--", *self._python("/", "/tmp", limits)]

    def _python(self, package: str, folder: str, limits: Limits) -> list[str]:
        options = {
            "folder": folder,
            "readable": sorted(READABLE),
            "devices": DEVICES,
            "landlock": self.landlock,
            "limits": asdict(limits),
        }
        return [*PYTHON, START.format("worker"), package, json.dumps(options)]


@functools.cache
def find_isolation() -> tuple[Isolation, str]:
    """Return what works on this machine, and its name; ``SandboxError`` if nothing does."""
    failures = []
    trials = {
        "bubblewrap": Isolation(bubblewrap=shutil.which("bwrap")),
        "Landlock": Isolation(landlock=NEWEST),
    }
    job = {"program": "f = 1", "tests": {"test 1": "assert f == 1"}}
    for name, found in trials.items():
        if found == Isolation():
            failures.append("bubblewrap is not installed")
            continue
        try:
            version, verdict = _run(found, job, Limits())
        except SandboxError as error:
            failures.append(f"{name} does not work here ({error})")
            continue
        if verdict.passed:
            return found, f"{name} {version}".strip() + " and a filter of system calls"
        failures.append(f"{name} does not work here ({verdict.reason} {verdict.detail})")
    raise SandboxError(
        f"generated programs cannot be run safely on this machine: {', '.join(failures)}; install "
        "bubblewrap (bwrap) 0.7 or newer on Linux, or leave the tasks with programs out"
    )


def isolation() -> str:
    """Return what shuts programs in on this machine; ``SandboxError`` if nothing does."""
    return find_isolation()[1]


def check_tests(tests: Sequence[str], setup: str = "") -> None:
    """Raise ``ValueError`` if there are no tests, or one is not Python or contains no assert."""
    if not tests:
        raise ValueError("a code task without tests: give at least one assert statement")
    for number, test in enumerate((setup, *tests)):
        try:
            nodes = list(ast.walk(ast.parse(test)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            what = "test" if number else "setup of the tests"
            raise ValueError(f"the {what} {test!r} is not Python: {error}") from error
        if number and not any(isinstance(node, ast.Assert) for node in nodes):
            raise ValueError(
                f"the test {test!r} has no assert statement: it would pass with any program"
            )


def run_tests(
    program: str,
    tests: Sequence[str],
    limits: Limits | None = None,
    *,
    setup: str = "",
    stdin: str | None = None,
) -> Verdict:
    """Run an untrusted program (not as ``__main__``), then ``setup``, then tests with asserts.

    With ``stdin`` the program runs as ``__main__`` with that text as its input; tests know what it
    wrote as ``output``, and none of its other names.

    Raises:
        ValueError: as :func:`check_tests`.
        SandboxError: the sandbox cannot run on this machine.
    """
    check_tests(tests, setup)
    numbered = {f"test {number}": test for number, test in enumerate(tests, 1)}
    job = {"program": program, "tests": numbered, "setup": setup, "stdin": stdin}
    return _run(find_isolation()[0], job, limits or Limits())[1]


def _run(isolation: Isolation, job: Mapping[str, Any], limits: Limits) -> tuple[str, Verdict]:
    """Return what the worker says of its isolation, and the verdict."""
    nonce = secrets.token_hex(16)
    # made by the judge, which outlives this process: killed between making it and starting the
    # judge, this process would leave it behind
    folder = os.path.join(tempfile.gettempdir(), f"rlkv-sandbox-{secrets.token_hex(8)}")
    options = {
        "folder": folder,
        "start_seconds": START_SECONDS,
        "wall_seconds": limits.wall_seconds,
        "evaluator": os.getpid(),
        "worker": isolation.command(folder, limits),
    }
    command = [*PYTHON, START.format("judge"), os.path.dirname(INSIDE), json.dumps(options)]
    text = json.dumps({"setup": "", "stdin": None, **job, "nonce": nonce}).encode()
    longest = START_SECONDS + limits.wall_seconds + END_SECONDS
    output = b""
    errors = b""
    ended = ["killed", "with the judge"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(text, timeout=longest)
            if process.returncode == -signal.SIGALRM:
                ended = ["timeout", "wall-clock time"]
        except subprocess.TimeoutExpired as late:
            # the judge was stopped, or another process holds its output
            output = late.output or b""
            ended = ["timeout", f"no verdict after {longest:.0f} s"]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            subprocess.run(["rm", "-rf", folder])
    used, *verdicts = output.splitlines() or [b""]
    if not used:
        lines = errors.decode(errors="replace").strip().splitlines() or [" ".join(ended)]
        raise SandboxError(f"the sandbox did not start: {lines[-1][-500:]}")
    for line in verdicts:
        if nonce.encode() in line:
            ended = json.loads(line)[1:]
            break
    reason, detail = ended
    version = json.loads(used)
    return f"({version})" if version else "", Verdict(reason, detail)
