"""Right programs pass, weak spots of a test do not help; nothing is left when the evaluator ends."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rlkv.evaluation.sandbox import Job, Limits, SandboxError, protections, run_many, run_tests
from tests.helpers.good_programs import GOOD


@pytest.mark.parametrize("without", [(), ("namespaces",)], ids=["all", "filters"])
@pytest.mark.parametrize("name", GOOD)
def test_right_programs_pass(name: str, without: tuple[str, ...]) -> None:
    program, tests = GOOD[name]
    verdict = run_tests(program, tests, Limits(wall_seconds=60), without=without)
    assert (verdict.passed, verdict.reason, verdict.detail) == (True, "passed", "")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def f(x): return 0", "failed"),
        ("def f(x): return 1 / 0", "error"),
        ("def g(x): return x", "error"),
        ("import os\ndef f(x): os._exit(0)", "exit"),
        ("import sys\nsys.exit()", "exit"),
        ("def f(x): return [0] * (1 << 40)", "memory"),
        ("import time\ntime.sleep(60)", "timeout"),
        ("print('a' * 2_000_000)", "output"),
        ("import os\nos.abort()", "killed"),
        ("while True: pass", "timeout"),
    ],
)
def test_reasons(program: str, reason: str) -> None:
    # CPU time of 1 s, so that the last one ends by it or by the clock
    assert run_tests(program, ["assert f(3) == 4"], Limits(wall_seconds=3, cpu_seconds=1)).reason == reason


@pytest.mark.parametrize(
    ("program", "test"),
    [
        # helpers of the test are the genuine ones, whatever the program calls by their names
        ("def f(x): return 0\ndef set(x): return 0\ndef sorted(x): return 0", "assert set([f(1)]) == set([2])"),
        ("class math:\n    isclose = lambda *a, **k: True\ndef f(x): return 0", "assert math.isclose(f(1), 2)"),
        ("import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0", "assert math.isclose(f(1), 2)"),
        # a builtin of that name does not stand in for the missing function
        ("", "assert sum([10, 15]) == 25"),
        # a test that catches everything does not hide that the program has left
        ("import os\ndef f(x): os._exit(0)", "try:\n    f(1)\nexcept:\n    pass\nelse:\n    assert False"),
        # objects cannot be compared, in whatever place
        ("class E:\n    __eq__ = lambda s, o: True\ndef f(x): return [E()]", "assert f(1) == [2]"),
        ("class E:\n    __eq__ = lambda s, o: True\ndef f(x): return {'a': E()}", "assert f(1) == {'a': 2}"),
        ("class E:\n    __eq__ = lambda s, o: True\ndef f(x): return E()", "assert f(1) in (1, 2)"),
        ("class E:\n    __eq__ = lambda s, o: True\ndef f(x): return E()", "assert 2 == f(1)"),
        ("class E:\n    __ne__ = lambda s, o: False\ndef f(x): return E()", "assert not f(1) != 2"),
        ("class E:\n    __lt__ = __gt__ = lambda s, o: True\ndef f(x): return E()", "assert f(1) < 2"),
        ("class E(float):\n    __sub__ = lambda s, o: 0\ndef f(x): return E(9)", "assert abs(f(1) - 2) < 1e-6"),
        ("class E:\n    def __repr__(s): raise SystemExit\ndef f(x): return E()", "assert f(1) is None, f(1)"),
    ],
)  # fmt: skip
def test_weak_spots_of_tests(program: str, test: str) -> None:
    assert not run_tests(program, [test], Limits(wall_seconds=60)).passed


def test_setup_and_shared_names() -> None:
    program = (
        "class Node:\n    def __init__(self, v):\n        self.v, self.left = v, None\ndef f(n):\n    return n.left.v"
    )
    setup = "root = Node(1)\nroot.left = Node(2)\ndef twice():\n    return 2 * f(root)"
    assert run_tests(program, ["assert f(root) == 2", "assert twice() == 4"], setup=setup).passed
    assert not run_tests(program, ["assert f(root) == 2"]).passed


def test_many_in_order() -> None:
    jobs = [Job(f"def f(x): return x + {n}", ["assert f(3) == 4"]) for n in range(6)]
    assert [verdict.passed for verdict in run_many(jobs, 3)] == [n == 1 for n in range(6)]
    with pytest.raises(ValueError, match="workers=0"):
        run_many(jobs, 0)


@pytest.mark.parametrize("tests", [[], ["f(3)"], ["assert f("], ["assert f(3) == 4", "pass"]])
def test_tests_that_are_none(tests: list[str]) -> None:
    with pytest.raises(ValueError, match="test"):
        run_tests("def f(x): return 4", tests)


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="memory_bytes is 0"):
        Limits(memory_bytes=0)


def test_missing_protections_are_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkv.evaluation.sandbox.run._said", set())
    without = ("namespaces", "landlock", "seccomp")
    assert not protections(without) & {"files", *without}
    for _ in range(2):
        assert run_tests("def f(x): return 4", ["assert f(3) == 4"], without=without).passed
    (said,) = [record.getMessage() for record in caplog.records]
    assert "no network" in said
    assert "no access to this user's files" in said


def test_a_broken_sandbox_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkv.evaluation.sandbox.run.START", "raise RuntimeError('broken')")
    with pytest.raises(SandboxError, match="broken"):
        run_tests("", ["assert f(3) == 4"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_evaluator_ends(number: int, tmp_path: Path) -> None:
    # a suite in the background passes on that SIGINT is ignored
    code = """
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from rlkv.evaluation.sandbox import Limits, run_tests
        print("started", flush=True)
        run_tests("import time\\ntime.sleep(600)", ["assert f(3) == 4"], Limits(wall_seconds=600))
        """
    evaluator = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert evaluator.stdout is not None
    with evaluator.stdout:
        evaluator.stdout.readline()
        wait_until(lambda: len(runs_in(tmp_path)) >= 4)  # supervisor, judge, first process, worker
        evaluator.send_signal(number)
        evaluator.wait(60)
    wait_until(lambda: not runs_in(tmp_path) and not list(tmp_path.iterdir()))


def wait_until(condition: object, seconds: float = 60.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def runs_in(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if b"inside.supervisor" in command and os.fsencode(folder) in command:
            found.append(int(path.parent.name))
    return found
