"""Run a resumable job in forked children and kill -9 them at random moments.

What the drivers of such tests share.

The caller is a process of its own, because it forks: it imports everything once, on one thread, and
each child starts at once.  A kill comes after a random number of further rows and a random time.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

Job = Callable[[Path], None]


def run_and_kill(root: Path, kills_wanted: int, job: Job, rows: str, total: int) -> None:
    """Print one JSON line: how the kills went, and where anything was lost.

    kills: those that hit a running job; hit_decoding: those of them before its last row; rounds;
    grew: rounds that wrote rows; rows: ``total``; folders: the finished ones; lost: folder and
    round.

    Args:
        job: does all that is not yet done in a folder.
        rows: glob of the files in the folder that have the ``total`` rows of a finished job.
    """
    torch.set_num_threads(1)
    rng = random.Random(0)
    started = time.monotonic()
    assert _exit_code(_fork(job, root / "whole")) == 0
    whole_seconds = time.monotonic() - started

    counts = dict.fromkeys(("kills", "hit_decoding", "rounds", "grew"), 0)
    lost: list[str] = []
    folder = root / "killed-0"
    folders = [folder.name]
    while counts["kills"] < kills_wanted:
        counts["rounds"] += 1
        assert counts["rounds"] < 10 * kills_wanted, "the jobs end before they can be killed"
        before = _on_disk(folder, rows)
        child = _fork(job, folder)
        _wait_for(_count(before) + rng.randint(0, total // 6), folder, rows, child)
        time.sleep(rng.uniform(0, whole_seconds / 25))
        os.kill(child, 9)
        code, after = _exit_code(child), _on_disk(folder, rows)
        counts["kills"] += code == -9
        counts["hit_decoding"] += code == -9 and _count(after) < total
        counts["grew"] += _count(after) > _count(before)
        if any(after.get(file, [])[: len(lines)] != lines for file, lines in before.items()):
            lost.append(f"{folder.name}, round {counts['rounds']}")
        if code == 0:  # it got to its end: the next kills go to a new folder
            folder = root / f"killed-{len(folders)}"
            folders.append(folder.name)
    assert _exit_code(_fork(job, folder)) == 0
    print(json.dumps({**counts, "rows": total, "folders": folders, "lost": lost}))


def _fork(job: Job, folder: Path) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            job(folder)
            code = 0
        finally:
            os._exit(code)
    return child


def _exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _on_disk(folder: Path, rows: str) -> dict[Path, list[bytes]]:
    """The complete lines of every file."""
    content = {file: file.read_bytes() for file in folder.glob(rows)}
    return {file: held[: held.rfind(b"\n") + 1].splitlines() for file, held in content.items()}


def _count(lines: dict[Path, list[bytes]]) -> int:
    return sum(map(len, lines.values()))


def _wait_for(count: int, folder: Path, rows: str, child: int) -> None:
    """Return when so many rows are on the disk, or the job has ended (it stays to be reaped)."""
    while _count(_on_disk(folder, rows)) < count:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.002)
