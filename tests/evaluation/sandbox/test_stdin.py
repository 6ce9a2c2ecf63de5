"""Programs that read standard input and write standard output, whichever way they do it."""

from __future__ import annotations

import pytest

from rlkv.evaluation.sandbox import Isolation, Limits, run_tests
from rlkv.evaluation.sandbox.inside.judge import same_output, same_value

SETUP = "from inside.judge import same_output"
LIMITS = Limits(wall_seconds=60)


def reason(program: str, stdin: str = "3 4\n5\n", expected: str = "12") -> str:
    return run_tests(
        program, [f"assert same_output(output, {expected!r})"], LIMITS, setup=SETUP, stdin=stdin
    ).reason


@pytest.mark.parametrize(
    "program",
    [
        "a, b = map(int, input().split())\nprint(a + b + int(input()))",
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        "import sys\nsys.stdout.write(str(sum(int(x) for line in sys.stdin for x in "
        "line.split())))\nsys.exit(1)",
        "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))\nexit()",
        "import os\nos.write(1, b'%d' % sum(map(int, open(0).read().split())))",
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint(5 + sum(map(int, "
        "input().split())))",
        "def main():\n    print(sum(map(int, open(0).read().split())))\nif __name__ == "
        "'__main__':\n    main()",
        "print(sum(map(int, open('/dev/stdin').read().split())), file=open('/dev/stdout', 'w'))",
        "import sys\nsys.stderr = open('/dev/stderr', 'w')\nprint('read', "
        "file=sys.stderr)\nprint(12)",
        "import resource as r\nr.setrlimit(r.RLIMIT_STACK, (r.getrlimit(r.RLIMIT_STACK)[1],) * "
        "2)\nprint(12)",
    ],
)
@pytest.mark.parametrize("isolation", ["bubblewrap", "Landlock"], indirect=True)
def test_right_programs(program: str, isolation: Isolation) -> None:
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
        ("while True: pass", "timeout"),
    ],
)
def test_wrong_programs(program: str, verdict: str) -> None:
    assert reason(program) == verdict


def test_without_input_nothing_of_the_program_is_output() -> None:
    verdict = run_tests("print(12)", ["assert same_output(output, '12')"], LIMITS, setup=SETUP)
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
