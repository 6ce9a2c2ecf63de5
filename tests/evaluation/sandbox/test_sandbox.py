"""Right programs pass; weak spots of tests, protections and data do not help wrong ones."""

import ctypes
import json
import os
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction

import pytest

from rlkv.evaluation import sandbox
from rlkv.evaluation.sandbox import Isolation, Limits, SandboxError, Verdict, run_tests
from rlkv.evaluation.sandbox.inside import worker
from rlkv.evaluation.sandbox.inside.judge import same_output, same_value
from tests.evaluation.sandbox.conftest import load_programs
from tests.helpers.paths import SHARED

GOOD = load_programs("good")
WEAK = load_programs("weak")
VALUES = [
    *(None, True, 0, -5, 2**63, -(2**64), 1 << 20_000, -(1 << 20_000)),
    *(0.1, float("inf"), -0.0, 1 + 2j, Decimal("1.10"), Fraction(1, 3)),
    *("", "a\x00\ud800中", b"\x00\xff", bytearray(b"a")),
    *([], [[1], (2,), {3}], (), (1, [2]), {1, "a"}, frozenset({(1, 2)})),
    *({}, {(1, 2): [3], None: {}}, range(1, 9, 2)),
    *(date(2020, 2, 29), datetime(2020, 2, 29, 1, 2, 3)),
]


@pytest.mark.parametrize("isolation", ["bubblewrap", "Landlock"], indirect=True)
@pytest.mark.parametrize("name", GOOD)
def test_right_programs_pass(name: str, isolation: Isolation) -> None:
    program, *tests = re.split(r"\n(?=assert |# test\n)", GOOD[name])
    verdict = run_tests(program, tests, Limits(wall_seconds=60))
    assert (verdict.passed, verdict.reason, verdict.detail) == (True, "passed", "")


@pytest.mark.parametrize("isolation", ["bubblewrap", "Landlock"], indirect=True)
def test_a_set_has_the_same_order_in_every_process(isolation: Isolation) -> None:
    """The test of the judge and the program are two processes: they agree on the order."""
    program = "def f(): return [*set('abcdefgh')]"
    assert run_tests(program, ["assert f() == [*set('abcdefgh')]"]).passed


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
        ("import os\nos.abort()", "killed"),
        ("while True: pass", "timeout"),
    ],
)
@pytest.mark.parametrize("isolation", ["bubblewrap", "Landlock"], indirect=True)
def test_reasons(program: str, reason: str, isolation: Isolation) -> None:
    # CPU time of 1 s, so that the last one ends by it or by the clock
    limits = Limits(wall_seconds=3, cpu_seconds=1)
    assert run_tests(program, ["assert f(3) == 4"], limits).reason == reason


@pytest.mark.parametrize("name", WEAK)
def test_weak_spots_of_tests(name: str) -> None:
    program, test = re.split(r"\n(?=assert |# test\n)", WEAK[name])
    assert not run_tests(program, [test], Limits(wall_seconds=60)).passed


def test_setup_and_shared_names() -> None:
    program = (
        "class Node:\n    def __init__(self, v): self.v, self.left = v, None\ndef f(n): "
        "return n.left.v"
    )
    setup = "root = Node(1)\nroot.left = Node(2)\ndef twice():\n    return 2 * f(root)"
    assert run_tests(program, ["assert f(root) == 2", "assert twice() == 4"], setup=setup).passed
    assert not run_tests(program, ["assert f(root) == 2"]).passed


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "without tests"),
        (["assert f("], r"'assert f\(' is not Python"),
        (["assert " + "-" * 100_000 + "1"], "is not Python"),
        ([""], "'' has no assert"),
        (["assert f(3) == 4", "f(3)"], r"'f\(3\)' has no assert"),
    ],
)
def test_tests_that_are_none(tests: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_tests("def f(x): return 4", tests)


def test_plain_data_comes_back_as_it_was() -> None:
    for value in VALUES:
        back = worker.decode(json.loads(json.dumps(worker.encode(value))))
        assert (type(back), back) == (type(value), value)


@pytest.mark.parametrize(
    ("machine", "architecture", "numbers"),
    [
        ("x86_64", 0xC000003E, (0, 231, 62, 41, 56, 257, 72, 16, 53, 302)),
        ("aarch64", 0xC00000B7, (63, 94, 129, 198, 220, 56, 25, 29, 199, 261)),
    ],
)
def test_filter(
    machine: str, architecture: int, numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[int, ...]] = []

    def install(_name: str, _option: int, _mode: int, program: bytes, *_: int) -> None:
        length, address = struct.unpack("HP", program)
        steps.extend(struct.iter_unpack("HBBI", ctypes.string_at(address, 8 * length)))

    def decide(number: int, *arguments: int, machine: int = architecture) -> int:
        """Do as the kernel: a reading of BPF as in Documentation/networking/filter.rst."""
        data = struct.pack("IIQ6Q", number, machine, 0, *arguments, *[0] * (6 - len(arguments)))
        position = register = 0
        while True:
            code, if_true, if_false, operand = steps[position]
            position += 1
            if code == 0x06:
                return operand & 0xFFFF
            if code == 0x20:
                register = struct.unpack_from("I", data, operand)[0]
            elif code == 0x54:
                register &= operand
            else:
                is_true = {0x15: register == operand, 0x35: register >= operand}[code]
                position += if_true if is_true else if_false

    monkeypatch.setattr(worker, "call", install)
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("", "", "", "", "riscv64")))
    with pytest.raises(OSError, match="no filter of system calls for riscv64"):
        worker.filter_calls()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("", "", "", "", machine)))
    worker.filter_calls()
    assert len(steps) < 4096  # the kernel's limit
    read, exit_group, kill, socket, clone, openat, fcntl, ioctl, socketpair, prlimit = numbers
    assert {decide(number) for number in (read, exit_group)} == {0}
    assert {decide(number) for number in (kill, socket)} == {1}
    # other numbers: 32-bit
    assert {decide(number, machine=0x40000003) for number in (read, exit_group)} == {1}
    assert [decide(clone, flags) for flags in (0x3D0F00, 0x11)] == [0, 1]  # a thread, a process
    opened = [decide(openat, 0, 0, flags) for flags in (0, 0o101, 0o1101, 0o1000, 0o1003, 3)]
    assert opened == [0, 0, 0, 1, 1, 1]
    assert [decide(fcntl, 0, command) for command in (1, 4, 8, 10, 1 << 32 | 8)] == [0, 0, 1, 1, 1]
    assert [decide(ioctl, 0, command) for command in (0x5401, 0x5412, 0x8901)] == [0, 1, 1]
    assert [decide(socketpair, 1, kind) for kind in (1, 0o2004001, 2, 5)] == [0, 0, 1, 1]
    assert decide(socketpair, 30, 1) == 1  # of another family
    assert [decide(prlimit, process) for process in (0, 7)] == [0, 1]
    # newer calls and x32
    assert {decide(number) for number in (435, 437, 500, 1 << 30 | read)} == {38}


UNPROTECTED = (
    "import sys; sys.path.append(sys.argv[1]); from inside import worker; import os; "
    "worker._restrict_files = lambda *_: os.stat('/no such file'); from inside.{} import main; "
    "main()"
)


def test_programs_are_refused_where_nothing_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.find_isolation.cache_clear()
    monkeypatch.setattr(sandbox, "START", UNPROTECTED)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(
        SandboxError,
        match=r"not installed.*Landlock does not work.*no such file.*install bubblewrap",
    ):
        run_tests("def f(x): return 4", ["assert f(3) == 4"])
    with pytest.raises(SandboxError, match="no such file"):  # also when it no longer works
        sandbox._run(Isolation(landlock=1), {"program": "", "tests": {}}, Limits())


def test_a_bubblewrap_that_does_not_work_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def run(way: Isolation, *_: object) -> tuple[str, Verdict]:
        ran.append(way)
        if way.bubblewrap:
            raise SandboxError("no namespaces")
        return "(3)", Verdict("passed", "")

    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/bwrap")
    monkeypatch.setattr(sandbox, "_run", run)
    sandbox.find_isolation.cache_clear()
    try:
        assert sandbox.isolation() == "Landlock (3) and a filter of system calls"
    finally:
        sandbox.find_isolation.cache_clear()
    assert [way.bubblewrap for way in ran] == ["/usr/bin/bwrap", None]


# --- standard input

SETUP = "from inside.judge import same_output"
LIMITS = Limits(wall_seconds=60)


TESTS = ["assert same_output(output, '12')"]


def reason(program: str) -> str:
    return run_tests(program, TESTS, LIMITS, setup=SETUP, stdin="3 4\n5\n").reason


@pytest.mark.parametrize(
    "program",
    [
        "a, b = map(int, input().split())\nprint(a + b + int(input()))",
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        "import sys\nsys.stdout.write(str(sum(int(x) for line in sys.stdin for x in "
        "line.split())))\nsys.exit(1)",
        "import os\nos.write(1, b'%d' % sum(map(int, open(0).read().split())))",
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint(5 + sum(map(int, "
        "input().split())))",
        "print(sum(map(int, open('/dev/stdin').read().split())), file=open('/dev/stdout', 'w'))",
        "import sys\nsys.stderr = open('/dev/stderr', 'w')\nprint('read', "
        "file=sys.stderr)\nprint(12)",
        "import threading, time\ndef main(): time.sleep(0.1); print(12)\n"
        "threading.Thread(target=main).start()",
        "import atexit, io, os, sys\nsys.stdout = io.StringIO()\nprint(12)\n"
        "atexit.register(lambda: os.write(1, sys.stdout.getvalue().encode()))",
        "import os, sys\nsys.stdout.write('12')\nsys.stdout.close()",
        "import os, sys\nclass Out:\n    def write(self, text): os.write(1, text.encode())\n"
        "    def flush(self): pass\nsys.stdout = Out()\nprint(12)",
        "import sys\nprint(12, flush=True)\nsys.stdout = None",
        "from concurrent.futures import ThreadPoolExecutor as E\nE(1).submit(print, 12)",
        "import resource as r\nr.setrlimit(r.RLIMIT_STACK, (r.getrlimit(r.RLIMIT_STACK)[1],) * "
        "2)\nprint(12)",
    ],
)
@pytest.mark.parametrize("isolation", ["bubblewrap", "Landlock"], indirect=True)
def test_programs_that_read_standard_input(program: str, isolation: Isolation) -> None:
    assert reason(program) == "passed"


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("print(13)", "failed"),
        ("", "failed"),
        ("output = '12'", "failed"),  # only what was written counts
        ("print(12", "error"),
        ("print(12)\nraise ValueError", "error"),
        ("input(), input(), input()", "error"),
        ("print(12)\nimport os\nos._exit(0)", "exit"),
    ],
)
def test_wrong_programs_that_read_standard_input(program: str, verdict: str) -> None:
    assert reason(program) == verdict


def test_without_input_nothing_of_the_program_is_output() -> None:
    verdict = run_tests("print(12)", TESTS, LIMITS, setup=SETUP)
    assert verdict.reason == "error"


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1 2\n3", "1 2 \n3\n", True),
        ("1.0 2", "1 2.00", True),
        ("yes", "Yes", False),
        ("1 2", "1\n2", False),
        ("1", "1\n1", False),
        ("0.1000001", "0.1", False),
        ("a 1", "a 1.0", False),  # words are compared as they are
        ("", "", True),
    ],
)
def test_outputs(found: str, expected: str, same: bool) -> None:
    assert same_output(found, expected) is same


def test_values() -> None:
    assert same_value((1, 2), [1, 2])
    assert same_value(2, 2)
    assert not same_value([(1, 2)], [[1, 2]])  # as in the benchmark: the outermost tuple alone
    assert not same_value(None, [])


# --- MBPP

FILE = SHARED / "data" / "mbpp_test.jsonl"
WITHOUT_SETUP = {367}  # its tests use trees that the published file leaves out


@pytest.mark.skipif(not FILE.is_file(), reason="the benchmarks' files are not here")
@pytest.mark.parametrize("step", [25, pytest.param(1, marks=pytest.mark.slow)])
def test_reference_programs_of_mbpp_pass_and_others_fail(step: int) -> None:
    tasks = [json.loads(line) for line in FILE.read_text().splitlines()][::step]
    limits = Limits(wall_seconds=120, cpu_seconds=60)

    def passed(programs: list[str]) -> set[int]:
        with ThreadPoolExecutor(4) as pool:
            verdicts = pool.map(
                lambda program, task: run_tests(program, task["test"], limits), programs, tasks
            )
            found = zip(tasks, verdicts, strict=True)
            return {task["task_id"] for task, verdict in found if verdict.passed}

    ids = {task["task_id"] for task in tasks}
    assert passed([task["code"] for task in tasks]) == ids - WITHOUT_SETUP
    wrong = []  # every function of the reference answers something that no test expects
    for task in tasks:
        names = re.findall(r"^def +(\w+)", task["code"], re.MULTILINE)
        assert names
        wrong.append("\n".join(f"def {name}(*a, **k): return 'no such value'" for name in names))
    assert passed(wrong) == passed([""] * len(tasks)) == set()
