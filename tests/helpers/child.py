"""Programs of the helpers in processes of their own, servers, and waiting for either."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socketserver import BaseServer
from typing import TypeVar

from tests.helpers.paths import ROOT

S = TypeVar("S", bound=BaseServer)


def printed(
    program: str, label: str, *arguments: object, seconds: int = 280, **environment: str
) -> list[str]:
    """Return what ``tests.helpers.<program>`` prints after ``label``, line by line.

    Args:
        arguments: of the program.
        seconds: that it may take.
        environment: further variables.
    """
    command = [sys.executable, "-m", f"tests.helpers.{program}", *map(str, arguments)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=variables, timeout=seconds
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [
        line.removeprefix(label).strip()
        for line in done.stdout.splitlines()
        if line.startswith(label)
    ]


@contextmanager
def running(server: S) -> Iterator[S]:
    """A server that answers in a thread, and is closed at the end."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until ``condition()`` is true; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def free_port() -> int:
    """Return the number of a port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def variables_of_ranks(processes: int) -> list[dict[str, str]]:
    """Return the variables of each process of a distributed run, as torchrun sets them."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    return [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in map(str, range(processes))]
