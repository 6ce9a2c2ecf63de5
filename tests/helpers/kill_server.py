"""Kill the rollout server with SIGKILL in the middle of rollouts, and compare the training with an
undisturbed one.

    python -m tests.helpers.kill_server --kills 10 --engine vllm

The training runs in this process with ``--rollout vllm-server``; a thread waits until the server is
busy sampling, kills it, and starts a new one on the same port.  At the end every step must be there
once, with the rewards and lengths of the undisturbed run (which samples in its own process), and
the gates up to rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch

from rlkv.utils.files import read_log
from tests.helpers import random_run
from tests.helpers.paths import ROOT

# 48 rows of up to 60 tokens, 4 at a time: a rollout takes long enough to be hit
OPTIONS = ["--max-completion-length", "60", "--prompts-per-step", "6", "--num-generations", "8"]
OPTIONS += [
    "--per-device-train-batch-size",
    "48",
    "--rollout-rows",
    "4",
    "--learning-rate",
    "0.3",
    "--save-steps",
    "50",
]


class Server:
    """``rollout/serve_vllm.py`` as a process that can be killed and started again."""

    def __init__(self, model: Path, engine: str, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [
            sys.executable,
            str(ROOT / "rollout" / "serve_vllm.py"),
            "--model",
            str(model),
            "--sink",
            "2",
        ]
        self.command += [
            "--window",
            "6",
            "--dtype",
            "float32",
            "--port",
            str(self.port),
            "--engine",
            engine,
        ]
        self.command += ["--max-rows", "4", "--kv-gib", "0.02", "--eager"]
        self.log = log
        self.start()

    def start(self) -> None:
        with self.log.open("a") as out:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(self.command, stdout=out, stderr=out, env=environment)

    def health(self) -> dict[str, Any] | None:
        try:
            with urlopen(f"{self.url}/health", timeout=5) as answer:
                return json.loads(answer.read())
        except OSError:
            return None

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


def haunt(
    server: Server, kills: int, seed: int, latest: float, done: threading.Event, hits: list[str]
) -> None:
    """Kill the server while it samples, ``kills`` times, each in another rollout, at up to
    ``latest`` seconds.
    """
    rng = random.Random(seed)
    while len(hits) < kills and not done.is_set():
        health = server.health()
        if health is None or not health["busy"] or health["version"] in ("none", *hits):
            time.sleep(0.005)
            continue
        time.sleep(rng.uniform(0, latest))
        health = server.health()
        if health is not None and health["busy"]:
            server.kill()
            hits.append(health["version"])
            server.start()


def outcome(folder: Path, steps: int) -> list[dict[str, Any]]:
    """What must not depend on kills, step by step."""
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, steps + 1)), (
        "a step is lost or doubled"
    )
    names = ("reward/mean", "reward/std", "response/length_mean", "response/length_max")
    return [{name: record[name] for name in names} for record in records]


def check_killed_server(root: Path, kills: int, steps: int, engine: str, seed: int = 0) -> float:
    """Compare a training whose server is killed with an undisturbed one, in ``root``.

    The gates' difference.
    """
    model, tokenizer = random_run.make_policy()
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    options = [*OPTIONS, "--model", str(root / "model"), "--max-steps", str(steps)]
    undisturbed = random_run.run(root / "undisturbed", options)
    server = Server(root / "model", engine, root / "server.txt")
    hits: list[str] = []
    done = threading.Event()
    records = read_log(root / "undisturbed" / "log.jsonl")
    # on a fast machine a rollout is over in a few tenths of a second
    latest = min(record["time/rollout_s"] for record in records) / 2
    ghost = threading.Thread(target=haunt, args=(server, kills, seed, latest, done, hits))
    try:
        ghost.start()
        url = ["--rollout-servers", server.url, "--rollout-patience", "300"]
        found = random_run.run(root / "disturbed", [*options, "--rollout", "vllm-server", *url])
    finally:
        done.set()
        ghost.join()
        server.kill()
    assert outcome(root / "disturbed", steps) == outcome(root / "undisturbed", steps)
    difference = (found.alpha - undisturbed.alpha).abs().max().item()
    assert difference < 1e-4, f"the gates differ by {difference}"
    assert len(hits) == len(set(hits)) == kills, (
        f"only {len(hits)} kills before the training ended: give more --steps"
    )
    return difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--engine", default="vllm", help="what the server samples with: vllm or hf")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rlkv-kill-server-") as root:
        difference = check_killed_server(Path(root), **vars(arguments))
    print(
        f"{arguments.kills} kills in as many rollouts, {arguments.steps} steps, no prompt lost, "
        f"gates within {difference:.1e} of the undisturbed run"
    )


if __name__ == "__main__":
    main()
