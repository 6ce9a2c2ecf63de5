"""Nothing makes the verifier hang: hostile answers, CPU time, killed workers, forks, threads."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from rlkv.verifier import Verifier
from tests.helpers.child import wait_until

BAIT = {
    "ten_megabytes": "word 12 { \\alpha } " * 550_000,
    "ten_megabytes_of_open_boxes": "\\boxed{" * 1_500_000,
    "ten_megabytes_of_open_braces": "{" * 10_000_000,
    "ten_megabytes_of_digits_boxed": "\\boxed{" + "9" * 10_000_000 + "}",
    "ten_megabytes_of_backslashes": "\\" * 10_000_000,
    "closing_only": "}" * 100_000 + "\\boxed}{7",
    "nested_boxes_open": "\\boxed{" * 1000 + "7",
    "nested_braces": "\\boxed{" + "{" * 400 + "8" + "}" * 400 + "}",
    "nested_parentheses": "\\boxed{" + "(" * 450 + "8" + ")" * 450 + "}",
    "tower_latex": "\\boxed{9^{9^{9^{9}}}}",
    "tower_huge": "\\boxed{(10^{10})^{(10^{10})^{10}}}",
    "factorials": "\\boxed{((99999999!)!)!}",
    "binomial": "\\boxed{\\binom{10^{9}}{5 \\cdot 10^{8}}}",
    "integral": "\\boxed{\\int_0^1 \\int_0^1 e^{\\sin(x^y)} \\sqrt{\\tan(x y)} dx dy}",
    "code": "\\boxed{__import__('os').system('touch HACKED')}",
    "nul_bytes": "\\boxed{7\0}",
    "surrogate": "\\boxed{\ud800}",
    "regex_bait_digits": "\\boxed{" + "1," * 480 + "!}",
    "regex_bait_letters": "\\boxed{" + "a" * 900 + "!}",
    "regex_bait_equations": "\\boxed{" + "a=" * 450 + "}",
    "regex_bait_text": "\\boxed{" + "\\text{and}" * 90 + "}",
}


# one of each kind; the others take long and are slow tests
QUICK = (
    "ten_megabytes_of_open_boxes",
    "nested_parentheses",
    "tower_latex",
    "code",
    "nul_bytes",
    "surrogate",
    "regex_bait_digits",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in BAIT],
)
def test_adversarial_text_is_not_equal_within_the_limit(
    hasty_verifier: Verifier, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = BAIT[name]
    # a worker that the last case killed starts again
    hasty_verifier.are_correct([(r"\boxed{\frac{1}{2}}", "0.5")])
    started = time.monotonic()
    assert hasty_verifier.are_correct([(text, "7")]) == [False]
    # seconds where reading is linear, hours where it is not
    assert time.monotonic() - started < 60
    # the reply belongs to its own pair, and the run goes on
    pairs = [(r"\frac{2}{4}", "0.5"), (r"\frac{2}{4}", "0.6")]
    assert hasty_verifier.are_equal(pairs) == [True, False]
    assert not list(tmp_path.iterdir())


def test_the_limit_is_cpu_time(hasty_verifier: Verifier) -> None:
    assert hasty_verifier.are_equal([(r"\frac{2}{4}", "0.5")]) == [True]
    pids = [w.process.pid for w in hasty_verifier._workers]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # a machine so busy that the worker gets no time

    def go_on() -> None:
        time.sleep(2 * hasty_verifier.timeout)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    waker = threading.Thread(target=go_on)
    waker.start()
    assert hasty_verifier.are_equal([(r"\frac{3}{6}", "0.5")]) == [True]
    waker.join()


def test_a_worker_that_never_answers_is_killed() -> None:
    with closing(Verifier(num_workers=1, timeout=0.2)) as quick:
        assert quick.are_equal([(r"\frac{2}{4}", "0.5")]) == [True]
        worker = quick._workers[0].process
        os.kill(worker.pid, signal.SIGSTOP)
        assert quick.are_equal([(r"\frac{3}{6}", "0.5")]) == [False]
        assert worker.poll() is not None


def test_a_worker_killed_at_work_costs_no_verdict_and_no_endless_retries(
    verifier: Verifier,
) -> None:
    slow = (r"((99999999!)!)!", "7")  # runs into the limit of three seconds
    killed = []

    def kill_at_work() -> None:
        for _ in range(2):
            time.sleep(0.5)
            busy = [w.process.pid for w in verifier._workers if w.busy and w.is_ready]
            for pid in busy:
                os.kill(pid, signal.SIGKILL)
            killed.extend(busy)

    assert verifier.are_equal([(r"\frac{2}{4}", "0.5")]) == [True]
    for worker in verifier._workers:
        os.kill(worker.process.pid, signal.SIGKILL)  # idle: others take its place
    assert verifier.are_equal([(r"\frac{2}{4}", "0.5")] * 3) == [True] * 3
    killer = threading.Thread(target=kill_at_work)
    killer.start()
    assert verifier.are_equal([slow, (r"\frac{2}{4}", "0.5")]) == [False, True]
    killer.join()
    assert killed


def test_fork_gets_its_own_workers(verifier: Verifier) -> None:
    assert verifier.are_equal([(r"\frac{2}{4}", "0.5")]) == [True]
    pids = {w.process.pid for w in verifier._workers}
    child = os.fork()
    if child == 0:
        pairs = [(r"\frac{3}{6}", "0.5"), (r"\frac{3}{6}", "0.7")]
        right = verifier.are_equal(pairs) == [True, False]
        others = {w.process.pid for w in verifier._workers}
        verifier.close()
        os._exit(0 if right and not others & pids else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert verifier.are_equal([(r"\frac{2}{4}", "0.5")]) == [True]
    assert {w.process.pid for w in verifier._workers} == pids


def test_threads_do_not_mix_up_replies(verifier: Verifier) -> None:
    wrong = []

    def check(k: int) -> None:
        pairs = [
            (rf"\frac{{{i}}}{{{k}}}", rf"\frac{{{2 * i + i % 2}}}{{{2 * k}}}") for i in range(1, 20)
        ]
        if verifier.are_equal(pairs) != [i % 2 == 0 for i in range(1, 20)]:
            wrong.append(k)

    threads = [threading.Thread(target=check, args=(k,)) for k in (23, 29, 31, 37)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(verifier._workers) == 2


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
@pytest.mark.parametrize("busy", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_workers_die_with_a_killed_parent(busy: bool) -> None:
    program = (
        "from rlkv.verifier import Verifier\n"
        "v = Verifier(num_workers=1, timeout=2.0)\n"
        "v.are_equal([('1/2', '0.5')])\n"
        "print(v._workers[0].process.pid, flush=True)\n"
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
    wait_until(lambda: not _alive(worker), seconds=100)
