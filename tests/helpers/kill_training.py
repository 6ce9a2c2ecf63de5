"""Kill training runs with SIGKILL at random moments and compare what they end with to a run that
nobody killed.

    python -m tests.helpers.kill_training --kills 20
    python -m tests.helpers.kill_training --kills 50 --steps 20 --processes 2    # DDP, all at once

Children are forked from one process that has trained a step, so that a kill costs no imports.  They
are killed up to three steps after their start and a random part of a step later.  A run that ends
before its kill is compared and started again; every finished run must have the gates, the mean of
the gates and the log of the uninterrupted one, each step logged once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import get_last_checkpoint

from rlkv.training.run_folder import PARTIAL
from tests.helpers import random_run


class Runs:
    """Children that train for some steps.

    Args:
        steps: of a whole run.
        processes: of one run; several train under DDP.
        log: file of what they print.
    """

    def __init__(self, steps: int, processes: int, log: Path) -> None:
        self.steps, self.processes, self.log = steps, processes, log

    def start(self, folder: Path) -> list[int]:
        """Train in ``folder``; the ids of the processes."""
        shared: dict[str, str] = {}
        if self.processes > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
            shared |= {"WORLD_SIZE": str(self.processes), "LOCAL_WORLD_SIZE": str(self.processes)}
        return [
            self._fork(folder, shared and shared | {"RANK": rank, "LOCAL_RANK": rank})
            for rank in self._ranks()
        ]

    def _ranks(self) -> list[str]:
        return [str(rank) for rank in range(self.processes)]

    def _fork(self, folder: Path, variables: dict[str, str]) -> int:
        child = os.fork()
        if child:
            return child
        status = 1
        try:
            os.environ.update(variables)
            with self.log.open("a") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            random_run.run(folder, ["--max-steps", str(self.steps), "--save-total-limit", "2"])
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

    def check(self, statuses: list[int]) -> None:
        if any(statuses):
            raise SystemExit(
                f"a training run ended with statuses {statuses}:\n{self.log.read_text()[-3000:]}"
            )

    def outcome(self, folder: Path) -> dict[str, Any]:
        """What must not depend on kills."""
        gates = torch.load(folder / "gates.pt", weights_only=True)
        logs = {
            name: [
                {
                    key: value
                    for key, value in json.loads(line).items()
                    if not key.startswith("time/")
                }
                for line in (folder / name).read_text().splitlines()
            ]
            for name in ("log.jsonl", "gates.jsonl")
        }
        for records in logs.values():
            assert [record["step"] for record in records] == list(range(1, self.steps + 1)), (
                "a step is lost or doubled"
            )
        return {"alpha": gates["alpha"].tolist(), "rank": gates["rank"].tolist(), **logs}


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


def wait_for(children: list[int], folder: Path, step: int) -> bool:
    """Until the checkpoint of ``step`` is complete; False if the run ends before that."""
    while saved(folder) < step:
        if ended(children):
            return False
        time.sleep(0.002)
    return True


def ended(children: list[int]) -> bool:
    """Whether all children have ended; they can still be waited for."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return all(os.waitid(os.P_PID, child, flags) is not None for child in children)


def wait(children: list[int]) -> list[int]:
    return [os.waitpid(child, 0)[1] for child in children]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="rlkv-kill-"))
    runs, steps = Runs(arguments.steps, arguments.processes, root / "output.txt"), arguments.steps
    random_run.run(root / "warm", ["--max-steps", "1"])
    began = time.monotonic()
    runs.check(wait(runs.start(root / "whole")))
    step_seconds = (time.monotonic() - began) / steps
    expected = runs.outcome(root / "whole")
    rng = random.Random(arguments.seed)
    kills, whole = 0, 0
    hits: Counter[str] = Counter()
    folder = root / "run-0"
    while True:
        before, ahead = saved(folder), rng.randint(0, 3)
        children = runs.start(folder)
        # the export is hit often enough
        if kills < arguments.kills and (before < steps or rng.random() < 0.25):
            if wait_for(children, folder, min(steps, before + ahead)):
                # ahead = 0: during the start and the first step, which take a few times a step
                time.sleep(rng.uniform(0, 1.5 if ahead else 5) * step_seconds)
            if not ended(children):
                for child in children:
                    os.kill(child, signal.SIGKILL)
                wait(children)
                kills += 1
                hits[where(folder)] += 1
                continue
        runs.check(wait(children))
        assert runs.outcome(folder) == expected, (
            f"{folder}: differs from the run that was not killed"
        )
        whole += 1
        if kills >= arguments.kills:
            break
        folder = root / f"run-{whole}"
    shutil.rmtree(root)
    print(
        f"{kills} kills, {whole} runs ended, all equal to the uninterrupted one; hit: "
        f"{dict(sorted(hits.items()))}"
    )


if __name__ == "__main__":
    main()
