"""Run a resumable job in forked children and kill -9 them at random moments.

    python -m tests.helpers.kill_driver filter|evaluation|training FOLDER KILLS

This process imports everything once, on one thread, so that a child starts at once.  A kill comes
after a random number of further rows and a random time.  The uninterrupted job is in FOLDER/whole;
the last line that is printed is JSON: how the kills went, and which folders to compare with it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlkv import tiny
from rlkv.cli.jobs import run_eval
from rlkv.data.filter import FilterConfig, run_filter
from rlkv.evaluation.runner import render_problems
from rlkv.evaluation.tasks.registry import TASKS, load_task
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.hf import HFEngine
from tests.helpers import random_run
from tests.helpers.child import variables_of_ranks
from tests.helpers.models import build_tokenizer, make_tiny_model


@dataclass
class Job:
    """A job that is killed.

    Attributes:
        work: does all that is not yet done in a folder.
        rows: glob of the files in the folder that have the ``total`` rows of a finished job.
        keeps_rows: whether a restart leaves all rows that are on the disk.
        processes: that work together, as torchrun starts them.
    """

    work: Callable[[Path], object]
    rows: str
    total: int
    keeps_rows: bool = True
    processes: int = 1

    def start(self, folder: Path) -> list[int]:
        """Fork the processes and return their ids."""
        if self.processes == 1:
            return [self._fork(folder, {})]
        return [self._fork(folder, variables) for variables in variables_of_ranks(self.processes)]

    def _fork(self, folder: Path, variables: dict[str, str]) -> int:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ.update(variables)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                self.work(folder)
                code = 0
            finally:
                os._exit(code)
        return child

    def on_disk(self, folder: Path) -> dict[Path, list[bytes]]:
        """Return the complete lines of every file."""
        content = {file: file.read_bytes() for file in folder.glob(self.rows)}
        return {file: held[: held.rfind(b"\n") + 1].splitlines() for file, held in content.items()}

    def count(self, folder: Path) -> int:
        return sum(map(len, self.on_disk(folder).values()))


def have_ended(children: list[int]) -> bool:
    """Return whether all have ended; they can still be waited for."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return all(os.waitid(os.P_PID, child, flags) is not None for child in children)


def exit_codes(children: list[int]) -> set[int]:
    return {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}


def run_and_kill(job: Job, root: Path, kills_wanted: int) -> None:
    """Print how many kills hit a running job, and how many of them before its last row.

    Printed too: ``grew``, the rounds that wrote rows; ``lost``, those after which rows were gone.
    """
    rng = random.Random(0)
    started = time.monotonic()
    assert exit_codes(job.start(root / "whole")) == {0}
    whole_seconds = time.monotonic() - started
    counts = dict.fromkeys(("kills", "hit_decoding", "rounds", "grew"), 0)
    lost: list[str] = []
    folder = root / "killed-0"
    folders = [folder.name]
    while counts["kills"] < kills_wanted:
        counts["rounds"] += 1
        assert counts["rounds"] < 10 * kills_wanted, "the jobs end before they can be killed"
        before = job.on_disk(folder)
        rows_before = job.count(folder)
        wanted = rows_before + rng.randint(0, job.total // 6)
        children = job.start(folder)
        while job.count(folder) < wanted and not have_ended(children):
            time.sleep(0.002)
        time.sleep(rng.uniform(0, whole_seconds / 25))
        for child in children:
            os.kill(child, signal.SIGKILL)
        codes = exit_codes(children)
        was_killed = -signal.SIGKILL in codes
        after = job.on_disk(folder)
        rows_after = job.count(folder)
        counts["kills"] += was_killed
        counts["hit_decoding"] += was_killed and rows_after < job.total
        counts["grew"] += rows_after > rows_before
        for file, lines in before.items():
            if job.keeps_rows and after.get(file, [])[: len(lines)] != lines:
                lost.append(f"{folder.name}, round {counts['rounds']}")
        if codes == {0}:  # it got to its end: the next kills go to a new folder
            folder = root / f"killed-{len(folders)}"
            folders.append(folder.name)
    assert exit_codes(job.start(folder)) == {0}
    print(json.dumps({**counts, "rows": job.total, "folders": folders, "lost": lost}))


# --- the jobs


def boxing_tokenizer() -> Any:
    """Make a tokenizer that now and then reads an answer, as random models give none."""
    tokenizer = build_tokenizer()
    decode = tokenizer.decode

    def boxed(ids: list[int], **options: Any) -> str:
        digest = sum((i + 1) * token for i, token in enumerate(ids))
        text = decode(ids, **options)
        return f"{text} \\boxed{{ {digest % 10} }}" if digest % 7 else text

    tokenizer.decode = boxed
    return tokenizer


def filter_job(root: Path) -> Job:
    tokenizer = boxing_tokenizer()
    model = make_tiny_model("llama", vocab_size=len(tokenizer), num_hidden_layers=1)
    # many ends, so that lengths vary
    model.generation_config.eos_token_id = list(range(0, len(tokenizer), 12))
    engine = HFEngine(model, tokenizer, batch_size=4)
    engine.generate(["find a ?"], SamplingParams(2))  # what generate imports on first use
    FilterConfig.load_engine = lambda config: engine  # type: ignore[method-assign]

    def work(folder: Path) -> None:
        config = FilterConfig(
            model="tiny",  # in name only: the hub is not asked
            input="tiny",
            num_problems=120,
            output_dir=str(folder),
            max_new_tokens=24,
            max_length=400,
            batch_size=4,
            buckets=("0-4:5", "4-8:5", "8-16:5", "16-24:5"),
        )
        run_filter(config)

    return Job(work, "shards/*.jsonl", total=120)


EVALUATION = """--preset modern --tasks tiny --limit 3 --sink 4 --window 16 --max-new-tokens 40
    --batch-size 6 --device cpu --methods full random-heads@0.5+rkv@40:buffer=8"""


def evaluation_job(root: Path) -> Job:
    model, tokenizer = tiny.load()
    prompt = render_problems(TASKS["tiny"], load_task("tiny", None, 1), tokenizer)[0].prompt
    HFEngine(model, tokenizer).generate([prompt], SamplingParams(2))  # as in filter_job

    def work(folder: Path) -> None:
        run_eval(["--output-dir", str(folder), *EVALUATION.split()])

    # four samples of each problem with two methods
    return Job(work, "tiny/*/rows-0-of-1.jsonl", total=3 * 4 * 2)


def training_job(root: Path) -> Job:
    random_run.run(root / "warm", ["--max-steps", "1"])

    def work(folder: Path) -> None:
        random_run.run(folder, ["--max-steps", "6", "--save-total-limit", "2"])

    # a restart cuts the log back to the last checkpoint
    return Job(work, "log.jsonl", total=6, keeps_rows=False, processes=2)


JOBS = {"filter": filter_job, "evaluation": evaluation_job, "training": training_job}

if __name__ == "__main__":
    torch.set_num_threads(1)
    name, folder_name, kills = sys.argv[1:]
    run_and_kill(JOBS[name](Path(folder_name)), Path(folder_name), int(kills))
