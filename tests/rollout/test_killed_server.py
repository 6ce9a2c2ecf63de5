"""A rollout server that is really killed while it samples.

The training runs in this process with ``--rollout vllm-server``; a thread waits until the server is
busy, kills it, and starts a new one on the same port.  At the end every step must be there once,
with the rewards and lengths of an undisturbed run, and the gates up to rounding.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from rlkv.utils.files import read_log
from tests.helpers import random_run
from tests.helpers.child import free_port
from tests.helpers.paths import ROOT

# 48 rows of up to 60 tokens, 4 at a time: a rollout takes long enough to be hit
OPTIONS = """--max-completion-length 60 --prompts-per-step 6 --num-generations 8
    --per-device-train-batch-size 48 --rollout-rows 4 --learning-rate 0.3 --save-steps 50"""
STEPS = 5
SERVER = "--sink 2 --window 6 --dtype float32 --max-rows 4 --kv-gib 0.02 --eager"


class Server:
    """``rollout/serve_vllm.py`` as a process that can be killed and started again.

    Of transformers: the training it is compared with samples by itself, and vLLM draws other
    tokens.
    """

    def __init__(self, model: Path, log: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.command = [sys.executable, str(ROOT / "rollout" / "serve_vllm.py"), *SERVER.split()]
        self.command += ["--model", str(model), "--port", str(port), "--engine", "hf"]
        self.log = log
        self.start()

    def start(self) -> None:
        with self.log.open("a") as out:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(self.command, stdout=out, stderr=out, env=environment)

    def busy_version(self) -> str | None:
        """Return the version of the gates that it samples with now."""
        try:
            with urlopen(f"{self.url}/health", timeout=5) as answer:
                health = json.loads(answer.read())
        except OSError:
            return None
        return health["version"] if health["busy"] and health["version"] != "none" else None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def haunt(server: Server, delay: float, done: threading.Event, hits: list[str]) -> None:
    """Kill the server once, while it samples and so many seconds after a rollout began."""
    while not hits and not done.is_set():
        version = server.busy_version()
        if version is None:
            time.sleep(0.005)
            continue
        time.sleep(delay)
        if server.busy_version() == version:
            server.kill()
            hits.append(version)
            server.start()


def outcome(folder: Path) -> list[dict[str, Any]]:
    """Return what must not depend on kills, step by step."""
    records = read_log(folder / "log.jsonl")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    names = ("reward/mean", "reward/std", "response/length_mean", "response/length_max")
    return [{name: record[name] for name in names} for record in records]


@pytest.mark.slow
def test_training_outlives_its_rollout_server(tmp_path: Path) -> None:
    model, tokenizer = random_run.make_policy()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    options = [*OPTIONS.split(), "--model", str(tmp_path / "model"), "--max-steps", str(STEPS)]
    undisturbed = random_run.run(tmp_path / "undisturbed", options)
    server = Server(tmp_path / "model", tmp_path / "server.txt")
    hits: list[str] = []
    done = threading.Event()
    records = read_log(tmp_path / "undisturbed" / "log.jsonl")
    # on a fast machine a rollout is over in a few tenths of a second
    delay = min(record["time/rollout_s"] for record in records) / 4
    ghost = threading.Thread(target=haunt, args=(server, delay, done, hits))
    try:
        ghost.start()
        url = ["--rollout-servers", server.url, "--rollout-patience", "300"]
        found = random_run.run(tmp_path / "disturbed", [*options, "--rollout", "vllm-server", *url])
    finally:
        done.set()
        ghost.join()
        server.kill()
    assert outcome(tmp_path / "disturbed") == outcome(tmp_path / "undisturbed")
    assert (found.alpha - undisturbed.alpha).abs().max().item() < 1e-4
    assert hits, "the training ended before the kill: give more steps"
