"""Hostile programs: all count as wrong, the evaluator lives, nothing is left behind."""

import os
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlkv.evaluation.sandbox import Limits, Verdict, protections, run_tests
from tests.helpers.hostile_programs import PROGRAMS, TESTS

LIMITS = Limits(
    wall_seconds=1.0, cpu_seconds=1.0, memory_bytes=256 << 20, file_bytes=4 << 20, output_bytes=1 << 16, processes=8
)
AT_A_TIME = 8  # most of them wait
VARIABLE = "RLKV_TEST_OF_THE_SANDBOX"
# harmless with namespaces alone: a server in its own network, a namespace below its own
NEED_THE_FILTER = {"breakout:listen", "breakout:new_namespace"}
LATE = "f = lambda x: x + 1"  # a right program: the sandbox still works after all the wrong ones


class Surroundings:
    """What the hostile programs aim at, and whether it is still as it was."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "file"
        self.file.write_text("private")
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.abstract = socket.socket(socket.AF_UNIX)
        name = f"rlkv-sandbox-{os.getpid()}-{time.monotonic_ns()}"
        self.abstract.bind(f"\0{name}")
        self.abstract.listen()
        self.names = {
            "@PID@": str(os.getpid()),
            "@FILE@": str(self.file),
            "@PORT@": str(self.tcp.getsockname()[1]),
            "@SOCKET@": name,
            "@VARIABLE@": VARIABLE,
        }

    def fill_in(self, program: str) -> str:
        for name, value in self.names.items():
            program = program.replace(name, value)
        return program

    def was_called(self) -> bool:
        for listener in (self.tcp, self.abstract):
            listener.setblocking(False)
            try:
                listener.accept()
            except BlockingIOError:
                continue
            return True
        return False


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Surroundings]:
    monkeypatch.setenv(VARIABLE, "secret")
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "runs"))
    result = Surroundings(tmp_path)
    yield result
    result.tcp.close()
    result.abstract.close()


def processes_of(folder: Path) -> list[str]:
    """Processes of runs in this folder: all are forks of one whose arguments name it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in command:
            found.append(path.parent.name)
    return found


# all; own user, Landlock and system-call filter; own user and namespaces
@pytest.mark.parametrize(
    "without", [(), ("namespaces",), ("landlock", "seccomp")], ids=["all", "filters", "namespaces"]
)
def test_hostile_programs_count_as_wrong(without: tuple[str, ...], surroundings: Surroundings, tmp_path: Path) -> None:
    assert len(PROGRAMS) >= 60
    held = protections(without)
    if not (held >= {"namespaces", "files"} or held >= {"landlock", "seccomp"}):
        pytest.skip(f"this machine permits too little to run them on it: {sorted(held)}")
    descriptors, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    limits_before, priority = resource_limits(), os.getpriority(os.PRIO_PROCESS, 0)

    def run(program: str) -> Verdict:
        return run_tests(surroundings.fill_in(program), TESTS, LIMITS, without=without)

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        verdicts = dict(zip(PROGRAMS, pool.map(run, PROGRAMS.values()), strict=True))
    print(
        Counter(verdict.reason for verdict in verdicts.values()), f"slowest {max(v.seconds for v in verdicts.values())}"
    )

    right = {name for name, verdict in verdicts.items() if verdict.passed or verdict.reason == "passed"}
    assert right == (NEED_THE_FILTER if "seccomp" in without else set())
    assert run_tests(LATE, TESTS, without=without).passed
    assert surroundings.file.read_text() == "private"
    assert not surroundings.was_called()
    assert list((tmp_path / "runs").iterdir()) == []
    assert processes_of(tmp_path / "runs") == []
    assert (resource_limits(), os.getpriority(os.PRIO_PROCESS, 0)) == (limits_before, priority)
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == (descriptors, threads)


def resource_limits() -> str:
    return Path("/proc/self/limits").read_text()
