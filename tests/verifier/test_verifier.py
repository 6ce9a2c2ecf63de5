"""The verifier: what counts as the answer, what counts as equal, and that nothing makes it hang."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from rlkv.verifier.verifier import Verifier, are_correct, extract_answer, is_correct, last_box
from tests.helpers.paths import SHARED

DATA = SHARED / "data"
TIMEOUT = 3.0
HASTY = 1.0


@pytest.fixture(scope="module")
def verifier():
    made = Verifier(num_workers=2, timeout=TIMEOUT)
    made.is_correct(r"\boxed{\frac{1}{2}}", "0.5")  # start-up is not part of the limit
    yield made
    made.close()


@pytest.fixture(scope="module")
def hasty_verifier():
    """One second is long for what must come out equal next to the bait, and keeps the tests short."""
    made = Verifier(num_workers=2, timeout=HASTY)
    made.is_correct(r"\boxed{\frac{1}{2}}", "0.5")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{3}", "3"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"a } b } \boxed{4} } {", "4"),
        (r"{ { { \boxed{4}", "4"),
        (r"x = 2 \\\boxed{4}", "4"),
        (r"x = 2 \\boxed{4}", "4"),
        (r"\boxed{1} The final answer is 2", "1"),
        ("The final answer is: $\\frac{1}{2}$. I hope it is correct", r"\frac{1}{2}"),
        ("Thus the Final Answer is 3.5.\nBye 9", "3.5"),
        ("the final answer is \\(x+1\\), final answer is **12**", "12"),
        ("the answer might be 7", None),
        ("", None),
        (r"\boxed{}", None),
        (r"\boxed{1" + "\0" + "}", None),
        (r"\boxed{" + "1" * 5000 + "}", None),
    ],
)
def test_extraction(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_the_last_number_is_not_an_answer() -> None:
    assert extract_answer("The total is 1,250 apples.") is None


EQUAL = [
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", r"\dfrac12"),
    ("10000", "10,000"),
    ("007", "7"),
    ("7", r"\textbf{(007)}"),
    ("7", r"\textbf{(C) } 7"),
    ("5", "x=5"),
    (r"90^\circ", "90"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"(a+5)(b+2)", "ab+2a+5b+10"),
    ("1,-2", "-2,1"),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19},1-\sqrt{19}"),
    ("2k+2", "2(k+1)"),
    ("$12$", "12."),
    (12, "12"),
    ("even", "Even"),
]
DIFFERENT = [
    ("12", "21"),
    (r"\sqrt{51}", r"\sqrt{52}"),
    (r"\text{east}", r"\text{seat}"),
    ("east", "seat"),
    ("7", "7x"),
    ("7", "7, 8"),
    ("7,8", "7"),
    (r"\frac{1}{3}", "0.333"),
    ("x^2+1", "x^2-1"),
]
NEVER = [None, "", " ", float("nan"), "nan", "NaN", "None", "null", "$$"]


@pytest.mark.parametrize(("answer", "candidate"), EQUAL)
def test_equal(verifier: Verifier, answer: str, candidate: str) -> None:
    assert verifier.are_equal([(answer, candidate)]) == [True]


@pytest.mark.parametrize(("answer", "candidate"), DIFFERENT)
def test_different(verifier: Verifier, answer: str, candidate: str) -> None:
    assert verifier.are_equal([(answer, candidate), (candidate, answer)]) == [False, False]


@pytest.mark.parametrize("nothing", NEVER)
def test_nothing_equals_nothing(verifier: Verifier, nothing: object) -> None:
    assert verifier.are_equal([(nothing, nothing), ("7", nothing), (nothing, "7")]) == [False] * 3
    assert not verifier.is_correct(r"\boxed{nan}", nothing)


def test_batches_keep_their_order(verifier: Verifier) -> None:
    pairs = [(rf"\boxed{{\frac{{{i}}}{{7}}}}", rf"\frac{{{2 * i if i % 3 else 2 * i + 1}}}{{14}}") for i in range(60)]
    assert verifier.are_correct(pairs) == [i % 3 != 0 for i in range(60)]
    assert len(verifier.pool._workers) == 2


def test_module_functions() -> None:
    assert is_correct(r"\boxed{ 7 }", "7")
    assert not is_correct("", "7")
    assert not is_correct(None, "7")
    assert are_correct([(r"\boxed{7}", "7"), (r"\boxed{7}", "8")]) == [True, False]


BAIT = {
    "ten_megabytes": "word 12 { \\alpha } " * 550_000,
    "ten_megabytes_of_open_boxes": "\\boxed{" * 1_500_000,
    "ten_megabytes_of_open_braces": "{" * 10_000_000,
    "ten_megabytes_of_sentences": "the final answer is " * 500_000,
    "ten_megabytes_of_digits_boxed": "\\boxed{" + "9" * 10_000_000 + "}",
    "ten_megabytes_of_backslashes": "\\" * 10_000_000,
    "ten_megabytes_of_dollars": "final answer is " + "$" * 10_000_000,
    "unbalanced": "\\boxed{\\frac{1}{2",
    "closing_only": "}" * 100_000 + "\\boxed}{7",
    "nested_boxes": "\\boxed{" * 1000 + "7" + "}" * 1000,
    "nested_boxes_open": "\\boxed{" * 1000 + "7",
    "nested_braces": "\\boxed{" + "{" * 400 + "8" + "}" * 400 + "}",
    "nested_fractions": "\\boxed{" + "\\frac{" * 140 + "1" + "}{2}" * 140 + "}",
    "nested_parentheses": "\\boxed{" + "(" * 450 + "8" + ")" * 450 + "}",
    "tower": "\\boxed{9**9**9**9}",
    "tower_latex": "\\boxed{9^{9^{9^{9}}}}",
    "tower_huge": "\\boxed{(10^{10})^{(10^{10})^{10}}}",
    "factorials": "\\boxed{((99999999!)!)!}",
    "binomial": "\\boxed{\\binom{10^{9}}{5 \\cdot 10^{8}}}",
    "sum": "\\boxed{\\sum_{k=1}^{10^{9}} \\sin(k^k)}",
    "integral": "\\boxed{\\int_0^1 \\int_0^1 e^{\\sin(x^y)} \\sqrt{\\tan(x y)} dx dy}",
    "code": "\\boxed{__import__('os').system('touch HACKED')}",
    "code_block": "```python\nimport os; os._exit(0)\n``` \\boxed{exit()}",
    "nul_bytes": "\\boxed{7\0}",
    "nul_everywhere": "\0" * 1_000_000,
    "surrogate": "\\boxed{\ud800}",
    "newlines": "\\boxed{8\n1\n}",
    "regex_bait_digits": "\\boxed{" + "1," * 480 + "!}",
    "regex_bait_letters": "\\boxed{" + "a" * 900 + "!}",
    "regex_bait_spaces": "\\boxed{8" + " " * 900 + "x}",
    "regex_bait_dollars": "\\boxed{" + "$" * 900 + "}",
    "regex_bait_equations": "\\boxed{" + "a=" * 450 + "}",
    "regex_bait_text": "\\boxed{" + "\\text{and}" * 90 + "}",
}


@pytest.mark.parametrize("name", BAIT)
def test_adversarial_text_is_not_equal_within_the_limit(
    hasty_verifier: Verifier, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = BAIT[name]
    hasty_verifier.is_correct(r"\boxed{\frac{1}{2}}", "0.5")  # a worker that the last case killed starts again
    started, started_cpu = time.monotonic(), time.process_time()
    assert hasty_verifier.are_correct([(text, "7")]) == [False]
    assert time.process_time() - started_cpu < 5, "reading the text"
    # the worker's limit is CPU time: only a machine that is busy with other things gets near this
    assert time.monotonic() - started < 60
    # the reply belongs to its own pair, and the run goes on
    assert hasty_verifier.are_equal([(r"\frac{2}{4}", "0.5"), (r"\frac{2}{4}", "0.6")]) == [True, False]
    assert not list(tmp_path.iterdir())


def test_the_right_answer_may_be_bait_too(hasty_verifier: Verifier) -> None:
    for name in ("tower_latex", "nested_parentheses", "surrogate"):
        content = last_box(BAIT[name])
        assert hasty_verifier.are_equal([(content, "7")]) == [False]


def test_the_limit_is_cpu_time(hasty_verifier: Verifier) -> None:
    assert hasty_verifier.are_equal([(r"\frac{2}{4}", "0.5")]) == [True]
    pids = [w.process.pid for w in hasty_verifier.pool._workers]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # a machine so busy that the worker gets no time

    def go_on() -> None:
        time.sleep(2 * HASTY)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    waker = threading.Thread(target=go_on)
    waker.start()
    assert hasty_verifier.are_equal([(r"\frac{3}{6}", "0.5")]) == [True]
    waker.join()


def test_a_worker_that_never_answers_is_killed() -> None:
    with closing(Verifier(num_workers=1, timeout=0.2)) as quick:
        assert quick.are_equal([(r"\frac{2}{4}", "0.5")]) == [True]
        worker = quick.pool._workers[0].process
        os.kill(worker.pid, signal.SIGSTOP)
        assert quick.are_equal([(r"\frac{3}{6}", "0.5")]) == [False]
        assert worker.poll() is not None


def test_a_killed_worker_costs_no_verdict(verifier: Verifier) -> None:
    assert verifier.are_equal([(r"\frac{2}{4}", "0.5")]) == [True]
    for worker in verifier.pool._workers:
        os.kill(worker.process.pid, 9)  # idle
    assert verifier.are_equal([(r"\frac{2}{4}", "0.5")] * 3) == [True] * 3


def test_a_worker_killed_at_work_costs_no_verdict_and_no_endless_retries(verifier: Verifier) -> None:
    slow = (r"((99999999!)!)!", "7")  # runs into the limit of three seconds
    killed = []

    def kill_at_work() -> None:
        for _ in range(2):
            time.sleep(0.5)
            busy = [w.process.pid for w in verifier.pool._workers if w.job is not None]
            for pid in busy:
                os.kill(pid, signal.SIGKILL)
            killed.extend(busy)

    assert verifier.are_equal([(r"\frac{2}{4}", "0.5")]) == [True]
    killer = threading.Thread(target=kill_at_work)
    killer.start()
    assert verifier.are_equal([slow, (r"\frac{2}{4}", "0.5")]) == [False, True]
    killer.join()
    assert killed


def test_fork_gets_its_own_workers(verifier: Verifier) -> None:
    assert verifier.are_equal([(r"\frac{2}{4}", "0.5")]) == [True]
    pids = {w.process.pid for w in verifier.pool._workers}
    child = os.fork()
    if child == 0:
        right = verifier.are_equal([(r"\frac{3}{6}", "0.5"), (r"\frac{3}{6}", "0.7")]) == [True, False]
        others = {w.process.pid for w in verifier.pool._workers}
        verifier.close()
        os._exit(0 if right and not others & pids else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert verifier.are_equal([(r"\frac{2}{4}", "0.5")]) == [True]
    assert {w.process.pid for w in verifier.pool._workers} == pids


def test_threads_do_not_mix_up_replies(verifier: Verifier) -> None:
    wrong = []

    def check(k: int) -> None:
        pairs = [(rf"\frac{{{i}}}{{{k}}}", rf"\frac{{{2 * i + i % 2}}}{{{2 * k}}}") for i in range(1, 20)]
        if verifier.are_equal(pairs) != [i % 2 == 0 for i in range(1, 20)]:
            wrong.append(k)

    threads = [threading.Thread(target=check, args=(k,)) for k in (23, 29, 31, 37)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
@pytest.mark.parametrize("busy", [False, True])
def test_workers_die_with_a_killed_parent(busy: bool) -> None:
    program = (
        "from rlkv.verifier.verifier import Verifier\n"
        "v = Verifier(num_workers=1, timeout=2.0)\n"
        "v.are_equal([('1/2', '0.5')])\n"
        "print(v.pool._workers[0].process.pid, flush=True)\n"
        + ("v.are_equal([('7', r'((99999999!)!)!')])\n" if busy else "")
        + "import time; time.sleep(120)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    assert _alive(worker)
    time.sleep(0.2)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 100
    while _alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(worker)


def test_missing_math_verify_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    fresh = Verifier()
    assert fresh.is_correct(r"\boxed{7}", "7"), "plain cases need no math-verify"
    with pytest.raises(ValueError, match=r"rlkv\[eval\]"):
        fresh.is_correct(r"\boxed{\frac{1}{2}}", "0.5")


def test_importing_the_verifier_does_not_import_sympy() -> None:
    code = "import sys, rlkv.verifier.verifier; assert 'sympy' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def _load(name: str) -> list[dict[str, str]]:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["deepscaler_aime.jsonl", "math500.jsonl"])
def test_reference_solutions_are_accepted(verifier: Verifier, name: str) -> None:
    rows = _load(name)
    accepted = verifier.are_correct([(r["solution"], r["answer"]) for r in rows])
    assert sum(accepted) >= 0.99 * len(rows)


@pytest.mark.parametrize("name", ["deepscaler_aime.jsonl", "math500.jsonl"])
def test_the_next_problems_answer_is_refused(verifier: Verifier, name: str) -> None:
    rows = _load(name)
    following = [*rows[1:], rows[0]]
    pairs = [(a["solution"], b["answer"]) for a, b in zip(rows, following, strict=True) if a["answer"] != b["answer"]]
    assert len(pairs) > 0.95 * len(rows)
    assert sum(verifier.are_correct(pairs)) <= 0.005 * len(pairs)
