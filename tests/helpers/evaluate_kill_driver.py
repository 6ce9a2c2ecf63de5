"""Run rlkv-eval in forked children and kill -9 them at random moments; used by test_evaluate_kill.py.

    python -m tests.helpers.evaluate_kill_driver FOLDER KILLS PROBLEMS

Every problem has the four samples of the preset modern.  A process of its own, because it forks: it imports everything
once, on one thread, and each child starts at once.  A kill comes after a random number of further rows and a random
time.  Prints one JSON line: kills that hit a running evaluation, those of them that hit decoding, rounds, rounds that
wrote rows, the finished folders, seconds, and where rows were lost.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import torch

from rlkv import tiny
from rlkv.cli.eval import run as evaluate
from rlkv.evaluation.run.runner import render_problems
from rlkv.evaluation.tasks.registry import TASKS, load_task
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.hf import HFEngine

METHODS = ("full", "random-heads@0.5+rkv@40:buffer=8")
OPTIONS = ("--preset", "modern", "--tasks", "tiny", "--max-new-tokens", "40", "--batch-size", "6", "--device", "cpu")
SAMPLES = 4


def fork_evaluation(folder: Path, problems: int) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            options = ["--methods", *METHODS, "--limit", str(problems), "--sink", "4", "--window", "16"]
            evaluate(["--output-dir", str(folder), *OPTIONS, *options])
            code = 0
        finally:
            os._exit(code)
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def whole_lines(folder: Path) -> list[bytes]:
    """Rows on the disk, method by method."""
    found: list[bytes] = []
    for method in METHODS:
        file = folder / "tiny" / method / "rows-0-of-1.jsonl"
        content = file.read_bytes() if file.exists() else b""
        found += content[: content.rfind(b"\n") + 1].splitlines()
    return found


def wait_for_growth(folder: Path, lines: int, child: int) -> None:
    """Return when so many rows are on the disk, or the evaluation has ended (it stays to be reaped)."""
    while len(whole_lines(folder)) < lines:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.002)


def main(root: Path, kills_wanted: int, problems: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(0)
    model, tokenizer = tiny.load()
    prompt = render_problems(TASKS["tiny"], load_task("tiny", None, 1), tokenizer)[0].prompt
    HFEngine(model, tokenizer).generate([prompt], SamplingParams(2))  # what generate imports on first use
    started = time.monotonic()
    assert exit_code(fork_evaluation(root / "whole", problems)) == 0
    whole_seconds = time.monotonic() - started
    total = problems * SAMPLES * len(METHODS)

    kills = decoding = rounds = finished = grew = 0
    lost: list[str] = []
    folders: list[str] = []
    folder = root / "killed-0"
    while kills < kills_wanted:
        rounds += 1
        assert rounds < 10 * kills_wanted, "the evaluations end before they can be killed"
        before = whole_lines(folder)
        child = fork_evaluation(folder, problems)
        wait_for_growth(folder, len(before) + rng.randint(0, total // 8), child)
        time.sleep(rng.uniform(0, whole_seconds / 20))
        os.kill(child, 9)
        code = exit_code(child)
        after = whole_lines(folder)
        kills += code == -9
        decoding += code == -9 and len(after) < total
        if not set(before) <= set(after):
            lost.append(f"{folder.name}, round {rounds}")
        grew += len(after) > len(before)
        if code == 0:  # it got to its end: the next kills go to a new folder
            folders.append(folder.name)
            finished += 1
            folder = root / f"killed-{finished}"
    assert exit_code(fork_evaluation(folder, problems)) == 0
    folders.append(folder.name)
    counts = {"kills": kills, "hit_decoding": decoding, "rounds": rounds, "grew": grew, "rows": total}
    seconds = {"seconds": round(time.monotonic() - started, 1), "seconds_uninterrupted": round(whole_seconds, 1)}
    print(json.dumps({**counts, **seconds, "folders": folders, "lost": lost}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
