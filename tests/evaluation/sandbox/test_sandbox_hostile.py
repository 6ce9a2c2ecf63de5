"""Hostile programs: all count as wrong, the evaluator lives, nothing is left behind."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from rlkv.evaluation import sandbox
from rlkv.evaluation.sandbox import Isolation, Limits, Verdict, run_tests
from tests.evaluation.sandbox.conftest import load_programs
from tests.helpers.child import wait_until

PROGRAMS = {
    **load_programs("hostile"),
    "early:null_byte": "def f(x):\n    return x + 1\x00",
    "greedy:deep_source": "f = " + "(" * 100_000,
}
# one of each kind, and what needs the files and sockets of the test
QUICK = (
    "early:os_exit_in_call",
    "fake:colliding_hashes",
    "greedy:fork_bomb",
    "greedy:ignores_cpu_limit",
    "greedy:deep_source",
    "breakout:write_file",
    "breakout:kill_evaluator",
    "breakout:environment_of_parent",
    "breakout:tcp",
    "breakout:abstract_socket",
)
CALLS = load_programs("calls")
PRELUDE = """
import ctypes, fcntl, os, signal, socket, struct, time
COLUMN = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
def call(numbers, *arguments):
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = ctypes.CDLL(None, use_errno=True).syscall(numbers[COLUMN], *words)
    if result == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return result
judge, stop = os.getppid(), signal.SIGSTOP
told = struct.pack("iiiiii", stop, 0, -1, 0, os.getpid(), os.getuid()) + bytes(104)
def f(x): return x + 1
"""
TESTS = ["assert f(3) == 4", "assert f(10) == 11"]
LIMITS = Limits(wall_seconds=1.0, cpu_seconds=1, memory_bytes=256 << 20, file_bytes=4 << 20)
VARIABLE = "RLKV_TEST_OF_THE_SANDBOX"


@pytest.fixture(autouse=True)
def adopted() -> Iterator[None]:
    """Orphans of processes below this one become its children, which :func:`running` finds."""
    prctl, subreaper = ctypes.CDLL(None).prctl, 36
    prctl(subreaper, 1, 0, 0, 0)
    yield
    prctl(subreaper, 0, 0, 0, 0)


def running(name: str = "") -> list[str]:
    """Judges, workers and bubblewraps among the descendants of this process; with ``name``: of that
    program.
    """
    parents: dict[str, str] = {}
    commands: dict[str, bytes] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            parents[path.name] = parent
            commands[path.name] = b"" if state == "Z" else (path / "cmdline").read_bytes()

    def is_ours(number: str) -> bool:
        while number in parents and number != str(os.getpid()):
            number = parents[number]
        return number == str(os.getpid())

    program = f"from inside.{name}".encode()
    return [
        number for number, command in commands.items() if program in command and is_ours(number)
    ]


def state_of_evaluator() -> tuple[object, ...]:
    return (
        Path("/proc/self/limits").read_text(),
        os.getpriority(os.PRIO_PROCESS, 0),
        set(os.listdir("/proc/self/fd")),
        threading.active_count(),
    )


@pytest.mark.parametrize("isolation", ["bubblewrap", "Landlock 1"], indirect=True)
@pytest.mark.parametrize("names", [QUICK, pytest.param(list(PROGRAMS), marks=pytest.mark.slow)])
def test_hostile_programs_count_as_wrong(
    isolation: Isolation, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {name: PROGRAMS[name] for name in names}
    file, runs = tmp_path / "file", tmp_path / "runs"
    file.write_text("private")
    runs.mkdir()
    monkeypatch.setenv(VARIABLE, "secret")
    monkeypatch.setattr(tempfile, "tempdir", str(runs))
    abstract = f"rlkv-sandbox-{os.getpid()}-{time.monotonic_ns()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{abstract}")
        unix.listen()
        port = str(tcp.getsockname()[1])
        filled = {
            "PID": str(os.getpid()),
            "FILE": str(file),
            "PORT": port,
            "SOCKET": abstract,
            "VARIABLE": VARIABLE,
        }

        def judge(program: str) -> Verdict:
            for name, value in filled.items():
                program = program.replace(f"@{name}@", value)
            return run_tests(program, TESTS, LIMITS)

        before = state_of_evaluator()
        with ThreadPoolExecutor(8) as pool:  # most of them wait
            verdicts = dict(zip(programs, pool.map(judge, programs.values()), strict=True))
        print(Counter(verdict.reason for verdict in verdicts.values()))
        assert [name for name, verdict in verdicts.items() if verdict.passed] == []
        assert state_of_evaluator() == before
        for listener in (tcp, unix):
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()
    assert run_tests("f = lambda x: x + 1", TESTS).passed
    assert file.read_text() == "private"
    wait_until(lambda: not running())
    assert list(runs.iterdir()) == []


def traces(*files: Path) -> list[object]:
    """What calls outside the sandbox would leave behind."""
    found: list[object] = [path.read_text() for path in sorted(Path("/proc/sysvipc").glob("*"))]
    for file in files:
        facts = file.stat()
        found.append(
            (facts.st_mode, facts.st_uid, facts.st_mtime_ns, os.listxattr(file), file.read_text())
        )
    return found


@pytest.mark.parametrize(
    "isolation",
    ["bubblewrap", "Landlock 1", pytest.param("Landlock", marks=pytest.mark.slow)],
    indirect=True,
)
def test_calls_that_reach_outside_are_refused(
    isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readable = tmp_path / "readable"
    readable.mkdir()
    private, read = tmp_path / "file", readable / "file"
    private.write_text("private")
    read.write_text("read")
    names = {"FILE": str(private), "READ": str(read), "SOCKET": str(tmp_path / "socket")}
    monkeypatch.setattr(sandbox, "READABLE", [*sandbox.READABLE, str(readable)])

    def judge(attack: str) -> Verdict:
        for name, value in names.items():
            attack = attack.replace(f"@{name}@", value)
        return run_tests(PRELUDE + attack, TESTS, Limits(wall_seconds=10))

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(names["SOCKET"])
        listener.setblocking(False)
        before = traces(private, read)
        with ThreadPoolExecutor(4) as pool:
            verdicts = dict(zip(CALLS, pool.map(judge, CALLS.values()), strict=True))
        with pytest.raises(BlockingIOError):
            listener.recv(1)
    refusals = ("program: PermissionError: [Errno 1]", "program: OSError: [Errno 38]")
    wrong = {
        name: verdict
        for name, verdict in verdicts.items()
        if not verdict.detail.startswith(refusals)
    }
    assert wrong == {}
    assert traces(private, read) == before
    assert judge("").passed


@pytest.mark.parametrize("start", ["", "print(7, flush=True); "])
@pytest.mark.parametrize(
    "judge",
    [
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "os.fork() or (os.setsid(), time.sleep(5))",  # holds the judge's output
    ],
)
def test_the_evaluator_never_waits_without_limit(
    judge: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "find_isolation", lambda: (Isolation(landlock=1), "Landlock"))
    monkeypatch.setattr(sandbox, "START", f"import os, signal, time; {start}{judge}")
    monkeypatch.setattr(sandbox, "START_SECONDS", 0.5)
    monkeypatch.setattr(sandbox, "END_SECONDS", 0.5)
    begun = time.monotonic()
    if start:
        assert run_tests("", TESTS, Limits(wall_seconds=0.5)).reason == "timeout"
    else:
        with pytest.raises(sandbox.SandboxError, match="no verdict after 2 s"):
            run_tests("", TESTS, Limits(wall_seconds=0.5))
    assert time.monotonic() - begun < 4.5


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_evaluator_ends(number: int, tmp_path: Path) -> None:
    # a suite in the background passes on that SIGINT is ignored
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from rlkv.evaluation.sandbox import Limits, run_tests\n"
        "run_tests('import time; time.sleep(600)', ['assert f(3) == 4'], Limits(wall_seconds=600))"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL
    ) as evaluator:
        wait_until(lambda: running("judge") and running("worker"))
        evaluator.send_signal(number)
    wait_until(lambda: not running() and not list(tmp_path.iterdir()))


@pytest.mark.parametrize(
    "patch",
    [
        "subprocess.Popen = lambda *_, **__: os.kill(os.getpid(), 9)",
        "subprocess.Popen.communicate = lambda *_, **__: os.kill(os.getpid(), 9)",
    ],
)
def test_nothing_is_left_when_the_evaluator_ends_early(patch: str, tmp_path: Path) -> None:
    code = (
        f"import os, subprocess; {patch}\n"
        "from rlkv.evaluation.sandbox import run_tests\n"
        "run_tests('f = 1', ['assert f == 1'])"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    # many: which instruction of a starting bubblewrap the end meets is left to chance
    command = [sys.executable, "-c", code]
    for evaluator in [subprocess.Popen(command, env=environment) for _ in range(12)]:
        assert evaluator.wait() == -signal.SIGKILL
    wait_until(lambda: not running() and not list(tmp_path.iterdir()))
