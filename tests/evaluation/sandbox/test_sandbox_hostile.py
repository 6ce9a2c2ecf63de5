"""Hostile programs: all count as wrong, the evaluator lives, nothing is left behind."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlkv.evaluation.sandbox import Limits, Verdict, run, run_tests
from tests.helpers.hostile_programs import PROGRAMS, TESTS

LIMITS = Limits(wall_seconds=1.0, cpu_seconds=1, memory_bytes=256 << 20, file_bytes=4 << 20)
VARIABLE = "RLKV_TEST_OF_THE_SANDBOX"


def processes_of(folder: Path) -> list[str]:
    """Processes of runs in this folder: judge and worker, whose arguments name it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if b"inside.judge" in command and os.fsencode(folder) in command:
            found.append(path.parent.name)
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def state_of_evaluator() -> tuple[object, ...]:
    return (
        Path("/proc/self/limits").read_text(),
        os.getpriority(os.PRIO_PROCESS, 0),
        set(os.listdir("/proc/self/fd")),
        threading.active_count(),
    )


def test_hostile_programs_count_as_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(PROGRAMS) == 132
    assert run_tests("f = lambda x: x + 1", TESTS).passed
    if run._warned:
        pytest.skip(f"this machine permits too little to run them on it: {sorted(run._warned)}")
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
        names = {"PID": str(os.getpid()), "FILE": str(file), "PORT": port, "SOCKET": abstract, "VARIABLE": VARIABLE}

        def judge(program: str) -> Verdict:
            for name, value in names.items():
                program = program.replace(f"@{name}@", value)
            return run_tests(program, TESTS, LIMITS)

        before = state_of_evaluator()
        with ThreadPoolExecutor(8) as pool:  # most of them wait
            verdicts = dict(zip(PROGRAMS, pool.map(judge, PROGRAMS.values()), strict=True))
        print(Counter(verdict.reason for verdict in verdicts.values()))
        assert [name for name, verdict in verdicts.items() if verdict.passed] == []
        assert state_of_evaluator() == before
        for listener in (tcp, unix):
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()
    assert run_tests("f = lambda x: x + 1", TESTS).passed
    assert file.read_text() == "private"
    wait_until(lambda: not processes_of(runs))
    assert list(runs.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_evaluator_ends(number: int, tmp_path: Path) -> None:
    # a suite in the background passes on that SIGINT is ignored
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from rlkv.evaluation.sandbox import Limits, run_tests\n"
        "run_tests('import time; time.sleep(600)', ['assert f(3) == 4'], Limits(wall_seconds=600))"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL) as evaluator:
        wait_until(lambda: len(processes_of(tmp_path)) == 2)  # judge, worker
        evaluator.send_signal(number)
    wait_until(lambda: not processes_of(tmp_path) and not list(tmp_path.iterdir()))
