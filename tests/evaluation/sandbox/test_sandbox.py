"""Right programs pass; weak spots of a test, of the protections and of the data on the way do not
help wrong ones.
"""

import ctypes
import json
import os
import struct
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from rlkv.evaluation import sandbox
from rlkv.evaluation.sandbox import Isolation, Limits, SandboxError, Verdict, run_tests
from rlkv.evaluation.sandbox.inside import worker
from rlkv.evaluation.tasks.registry import load_task
from tests.helpers.good_programs import GOOD

EQUAL = (
    "class E:\n    __eq__ = __lt__ = __gt__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n"
)
VALUES = [
    None, True, 0, -5, 2**63, -(2**64), 1 << 20_000, -(1 << 20_000), 0.1, float("inf"), -0.0, 1 + 2j,
    "", "a\x00\ud800中", b"\x00\xff", bytearray(b"a"), [], [[1], (2,), {3}], (), (1, [2]), {1, "a"},
    frozenset({(1, 2)}), {}, {(1, 2): [3], None: {}}, range(1, 9, 2), Decimal("1.10"), Fraction(1, 3),
    date(2020, 2, 29), datetime(2020, 2, 29, 1, 2, 3),
]  # fmt: skip


@pytest.mark.parametrize("isolation", ["bubblewrap", "Landlock"], indirect=True)
@pytest.mark.parametrize("name", GOOD)
def test_right_programs_pass(name: str, isolation: Isolation) -> None:
    verdict = run_tests(*GOOD[name], Limits(wall_seconds=60))
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
        ("import os\nos.abort()", "killed"),
        ("while True: pass", "timeout"),
    ],
)
@pytest.mark.parametrize("isolation", ["bubblewrap", "Landlock"], indirect=True)
def test_reasons(program: str, reason: str, isolation: Isolation) -> None:
    # CPU time of 1 s, so that the last one ends by it or by the clock
    assert (
        run_tests(program, ["assert f(3) == 4"], Limits(wall_seconds=3, cpu_seconds=1)).reason
        == reason
    )


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
        ("import os\ndef f(x): os._exit(0)", "try:\n    f(1)\nexcept:\n    pass\nelse:\n    assert "
                                             "False"),
        # objects cannot be compared, in whatever place, and functions cannot be sent
        (EQUAL + "def f(x): return [E()]", "assert f(1) == [2]"),
        (EQUAL + "def f(x): return {'a': E()}", "assert f(1) == {'a': 2}"),
        (EQUAL + "def f(x): return E()", "assert f(1) in (1, 2)"),
        (EQUAL + "def f(x): return E()", "assert 2 == f(1)"),
        (EQUAL + "def f(x): return E()", "assert not f(1) != 2"),
        (EQUAL + "def f(x): return E()", "assert f(1) < 2"),
        ("class E(float):\n    __sub__ = lambda s, o: 0\ndef f(x): return E(9)", "assert abs(f(1) - 2) < 1e-6"),
        ("class E:\n    def __repr__(s): raise SystemExit\ndef f(x): return E()", "assert f(1) is None, f(1)"),
        ("def f(x): return 4", "assert f(lambda: 3) == 4"),
    ],
)  # fmt: skip
def test_weak_spots_of_tests(program: str, test: str) -> None:
    assert not run_tests(program, [test], Limits(wall_seconds=60)).passed


def test_setup_and_shared_names() -> None:
    program = (
        "class Node:\n    def __init__(self, v): self.v, self.left = v, None\ndef f(n): "
        "return n.left.v"
    )
    setup = "root = Node(1)\nroot.left = Node(2)\ndef twice():\n    return 2 * f(root)"
    assert run_tests(program, ["assert f(root) == 2", "assert twice() == 4"], setup=setup).passed
    assert not run_tests(program, ["assert f(root) == 2"]).passed


@pytest.mark.parametrize("tests", [[], ["f(3)"], ["assert f("], ["assert f(3) == 4", "pass"]])
def test_tests_that_are_none(tests: list[str]) -> None:
    with pytest.raises(ValueError, match="test"):
        run_tests("def f(x): return 4", tests)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_plain_data_comes_back_as_it_was(value: object) -> None:
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
        """What the kernel would do with a call: a reading of BPF as in
        Documentation/networking/filter.rst.
        """
        data = struct.pack("IIQ6Q", number, machine, 0, *arguments, *[0] * (6 - len(arguments)))
        position, register = 0, 0
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
                position += (
                    if_true
                    if {0x15: register == operand, 0x35: register >= operand}[code]
                    else if_false
                )

    monkeypatch.setattr(worker, "call", install)
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("", "", "", "", machine)))
    worker.filter_calls()
    assert len(steps) < 4096  # the kernel's limit
    read, exit_group, kill, socket, clone, openat, fcntl, ioctl, socketpair, prlimit = numbers
    assert {decide(number) for number in (read, exit_group)} == {0}
    assert {decide(number) for number in (kill, socket)} == {1}
    assert {decide(number, machine=0x40000003) for number in (read, exit_group)} == {
        1
    }  # other numbers: 32-bit
    assert [decide(clone, flags) for flags in (0x3D0F00, 0x11)] == [0, 1]  # a thread, a process
    assert [decide(openat, 0, 0, flags) for flags in (0, 0o101, 0o1101, 0o1000, 0o1003, 3)] == [
        0,
        0,
        0,
        1,
        1,
        1,
    ]
    assert [decide(fcntl, 0, command) for command in (1, 4, 8, 10, 1 << 32 | 8)] == [0, 0, 1, 1, 1]
    assert [decide(ioctl, 0, command) for command in (0x5401, 0x5412, 0x8901)] == [0, 1, 1]
    assert [decide(socketpair, 1, kind) for kind in (1, 0o2004001, 2, 5)] == [0, 0, 1, 1]
    assert decide(socketpair, 30, 1) == 1  # of another family
    assert [decide(prlimit, process) for process in (0, 7)] == [0, 1]
    assert {decide(number) for number in (435, 437, 500, 1 << 30 | read)} == {
        38
    }  # newer calls and x32


def test_a_machine_without_a_filter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("", "", "", "", "riscv64")))
    with pytest.raises(OSError, match="no filter of system calls for riscv64"):
        worker.filter_calls()


UNPROTECTED = (
    "import sys; sys.path.append(sys.argv[1]); from inside import worker; import os; "
    "worker._restrict_files = lambda *_: os.stat('/no such file'); from inside.{} import main; "
    "main()"
)


def test_programs_are_refused_where_nothing_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sandbox.find_isolation.cache_clear()
    monkeypatch.setattr(sandbox, "START", UNPROTECTED)
    monkeypatch.setattr("shutil.which", lambda name: None)
    data = tmp_path / "mbpp_test.jsonl"
    data.write_text('{"prompt": "Add.", "test": ["assert f(3) == 4"], "code": ""}')
    with pytest.raises(
        SandboxError,
        match=r"not installed.*Landlock does not work.*no such file.*install bubblewrap",
    ):
        run_tests("def f(x): return 4", ["assert f(3) == 4"])
    with pytest.raises(ValueError, match="install bubblewrap"):  # before any text is generated
        load_task("mbpp", data)
    with pytest.raises(SandboxError, match="no such file"):  # also when it no longer works
        sandbox._run(Isolation(landlock=1), {"program": "", "tests": {}}, Limits())


def test_a_bubblewrap_that_does_not_work_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def run(way: Isolation, *_: object) -> tuple[str, Verdict]:
        ran.append(way)
        if way.bubblewrap:
            raise SandboxError("no namespaces")
        return "(3)", Verdict("passed", "", 0.0)

    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/bwrap")
    monkeypatch.setattr(sandbox, "_run", run)
    sandbox.find_isolation.cache_clear()
    try:
        assert sandbox.isolation() == "Landlock (3) and a filter of system calls"
    finally:
        sandbox.find_isolation.cache_clear()
    assert [way.bubblewrap for way in ran] == ["/usr/bin/bwrap", None]
