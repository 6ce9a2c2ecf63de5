"""Kill training runs with SIGKILL at random moments and compare what they end with to a run that nobody killed.

    python -m tests.helpers.kill_training --kills 20

Children are forked from one process that has trained a step, so that a kill costs no imports.  A child is killed up
to three steps after its start and a random part of a step later.  A run that ends before its kill is compared
and started again; every finished run must have the gates, the mean of the gates and the log of the uninterrupted one,
each step logged once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import get_last_checkpoint

from rlkv.training.checkpoints import PARTIAL
from tests.helpers import random_run

STEPS = 12
OPTIONS = ["--max_steps", str(STEPS), "--save_total_limit", "2"]


def start(folder: Path, log: Path) -> int:
    """A child that trains in ``folder``; its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with log.open("a") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        random_run.run(folder, OPTIONS)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def outcome(folder: Path) -> dict[str, Any]:
    """What must not depend on kills."""
    gates = torch.load(folder / "gates.pt", weights_only=True)
    logs = {
        name: [
            {key: value for key, value in json.loads(line).items() if not key.startswith("time/")}
            for line in (folder / name).read_text().splitlines()
        ]
        for name in ("log.jsonl", "gates.jsonl")
    }
    for records in logs.values():
        assert [record["step"] for record in records] == list(range(1, STEPS + 1)), "a step is lost or doubled"
    return {"alpha": gates["alpha"].tolist(), "rank": gates["rank"].tolist(), **logs}


def check(status: int, log: Path) -> None:
    if status != 0:
        raise SystemExit(f"a training run ended with status {status}:\n{log.read_text()[-3000:]}")


def saved(folder: Path) -> int:
    """The step of the newest complete checkpoint."""
    newest = get_last_checkpoint(str(folder)) if folder.exists() else None
    return 0 if newest is None else int(newest.rpartition("-")[2])


def where(folder: Path) -> str:
    """What the kill hit, as far as the files tell."""
    if (folder / PARTIAL).exists():
        return "while a checkpoint was written"
    if (folder / "adapter_weights.tsv").exists():
        return "during the export"
    return f"at or after step {saved(folder)}"


def wait_for(child: int, folder: Path, step: int) -> int | None:
    """Until the checkpoint of ``step`` is complete; the child's status if it ends before that."""
    while saved(folder) < step:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.002)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="rlkv-kill-"))
    log = root / "output.txt"
    random_run.run(root / "warm", ["--max_steps", "1"])
    began = time.monotonic()
    check(os.waitpid(start(root / "whole", log), 0)[1], log)
    step_seconds = (time.monotonic() - began) / STEPS
    expected = outcome(root / "whole")
    rng = random.Random(arguments.seed)
    kills, runs = 0, 0
    hits: Counter[str] = Counter()
    folder = root / "run-0"
    while True:
        before, ahead = saved(folder), rng.randint(0, 3)
        child = start(folder, log)
        if kills < arguments.kills and (before < STEPS or rng.random() < 0.25):  # the export is hit often enough
            status = wait_for(child, folder, min(STEPS, before + ahead))
            if status is None:
                # ahead = 0: during the start and the first step, which take a few times a step
                time.sleep(rng.uniform(0, 1.5 if ahead else 5) * step_seconds)
                ended, found = os.waitpid(child, os.WNOHANG)
                if not ended:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    kills += 1
                    hits[where(folder)] += 1
                    continue
                status = found
        else:
            _, status = os.waitpid(child, 0)
        check(status, log)
        assert outcome(folder) == expected, f"{folder}: differs from the run that was not killed"
        runs += 1
        if kills >= arguments.kills:
            break
        folder = root / f"run-{runs}"
    shutil.rmtree(root)
    print(f"{kills} kills, {runs} runs ended, all equal to the uninterrupted one; hit: {dict(sorted(hits.items()))}")


if __name__ == "__main__":
    main()
