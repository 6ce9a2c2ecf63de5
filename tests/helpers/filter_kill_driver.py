"""Run the filter job in forked children and kill -9 them at random moments; used by test_filter_kill.py.

A process of its own, because it forks: it imports everything once, on one thread, and each child starts at once.
A kill comes after a random number of further batches and a random time.  Prints one JSON line: kills that hit a
running job, rounds, rounds in which the job wrote something, the finished folders, and where anything was lost.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import torch

from rlkv.data import filter_job
from rlkv.data.filter_config import FilterConfig
from rlkv.rollout.base import Completion, FinishReason, SamplingParams
from rlkv.rollout.hf import HFEngine
from rlkv.tiny.tokenizer import build_tokenizer
from tests.helpers.models import make_tiny_model

PROBLEMS, NEW_TOKENS, BATCH = 120, 24, 4


class BoxingEngine(HFEngine):
    """A random model that now and then answers: the tokens decide on a boxed digit, so that all statuses occur."""

    def _completion(self, ids: list[int], reason: FinishReason, seconds: float) -> Completion:
        done = super()._completion(ids, reason, seconds)
        digest = sum((i + 1) * token for i, token in enumerate(done.token_ids))
        text = f"{done.text} \\boxed{{ {digest % 10} }}" if digest % 7 else done.text
        return Completion(done.token_ids, text, done.finish_reason)


def build_engine() -> BoxingEngine:
    tokenizer = build_tokenizer()
    model = make_tiny_model("llama", vocab_size=len(tokenizer), num_hidden_layers=1)
    model.generation_config.eos_token_id = list(range(0, len(tokenizer), 12))  # many ends: lengths vary
    return BoxingEngine(model, tokenizer, batch_size=BATCH)


def run_job(folder: Path, engine: BoxingEngine) -> None:
    FilterConfig.load_engine = lambda config, positions: engine  # type: ignore[method-assign]
    config = FilterConfig(
        model="tiny",  # in name only: the hub is not asked
        input="tiny",
        num_problems=PROBLEMS,
        output_dir=str(folder),
        max_new_tokens=NEW_TOKENS,
        max_length=400,
        batch_size=BATCH,
        buckets=("0-4:5", "4-8:5", "8-16:5", "16-24:5"),
    )
    filter_job.run_filter(config)


def fork_job(folder: Path, engine: BoxingEngine) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run_job(folder, engine)
            code = 0
        finally:
            os._exit(code)
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def lines_on_disk(folder: Path) -> list[bytes]:
    shards = sorted((folder / "shards").glob("*.jsonl")) if (folder / "shards").exists() else []
    content = b"".join(path.read_bytes() for path in shards)
    return content[: content.rfind(b"\n") + 1].splitlines()


def wait_for_growth(folder: Path, lines: int, child: int) -> None:
    """Return when so many lines are on the disk, or the job has ended (it stays to be reaped)."""
    while len(lines_on_disk(folder)) < lines:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.001)


def main(root: Path, kills_wanted: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(0)
    engine = build_engine()
    engine.generate(["find a ?"], SamplingParams(2))  # what generate imports on first use
    started = time.monotonic()
    assert exit_code(fork_job(root / "whole", engine)) == 0
    full_seconds = time.monotonic() - started

    kills = rounds = finished = grew = 0
    lost: list[str] = []
    folders: list[str] = []
    folder = root / "killed-0"
    while kills < kills_wanted:
        rounds += 1
        assert rounds < 10 * kills_wanted, "the jobs end before they can be killed"
        before = lines_on_disk(folder)
        child = fork_job(folder, engine)
        wait_for_growth(folder, len(before) + rng.randint(0, 6) * BATCH, child)
        time.sleep(rng.uniform(0, full_seconds / 30))
        os.kill(child, 9)
        code = exit_code(child)
        kills += code == -9
        if lines_on_disk(folder)[: len(before)] != before:
            lost.append(str(folder))
        grew += len(lines_on_disk(folder)) > len(before)
        if code == 0:  # it got to its end: the next kills go to a new folder
            folders.append(folder.name)
            finished += 1
            folder = root / f"killed-{finished}"
    assert exit_code(fork_job(folder, engine)) == 0
    folders.append(folder.name)
    print(json.dumps({"kills": kills, "rounds": rounds, "folders": folders, "lost": lost, "grew": grew}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
