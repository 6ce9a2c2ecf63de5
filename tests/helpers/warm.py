"""Programs in processes of their own that need not import torch, transformers and trl first.

The processes are forks of one server per test process (``multiprocessing``'s forkserver).  Not for
tests of imports or of variables that a library reads when it is imported (``HF_*``).
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess

import torch

from tests.helpers.child import variables_of_ranks

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["datasets", "peft", "trl.trainer.grpo_trainer", "transformers.models.llama", "wandb"]
)


def start(
    command: Sequence[object],
    folder: Path | None = None,
    streams: Path | None = None,
    **variables: str,
) -> BaseProcess:
    """A process that runs ``PROGRAM.py ARGUMENTS`` or ``-m MODULE ARGUMENTS`` on one thread.

    Args:
        folder: where it runs; default: here.
        streams: folder whose files ``in``, ``out`` and ``err`` it reads and writes; default:
            nothing is kept.
        variables: added to this process's environment.
    """
    words = list(map(str, command))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    arguments = (words, str(folder or Path.cwd()), environment, streams)
    process = _CONTEXT.Process(target=_run, args=arguments)
    process.start()
    return process


def run(
    command: Sequence[object],
    folder: Path | None = None,
    text: str = "",
    timeout: float = 250,
    **variables: str,
) -> CompletedProcess[str]:
    """The outcome of :func:`start`, with ``text`` as standard input."""
    with tempfile.TemporaryDirectory() as made:
        streams = Path(made)
        (streams / "in").write_text(text)
        process = start(command, folder, streams, **variables)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
        out, err = ((streams / name).read_text() for name in ("out", "err"))
        assert process.exitcode is not None
        return CompletedProcess(list(map(str, command)), process.exitcode, out, err)


def run_ranks(
    command: Sequence[object], streams: Path, timeout: float = 280, **variables: str
) -> list[tuple[int, str]]:
    """Two processes of one distributed run, as torchrun starts them: exit code and output of each.

    Args:
        streams: a folder for their output.
    """
    folders = [streams / rank for rank in "01"]
    started = []
    for folder, own in zip(folders, variables_of_ranks(2), strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "in").touch()
        own |= {"PYTHONUNBUFFERED": "1", **variables}
        started.append(start(command, None, folder, **own))
    for process in started:
        process.join(timeout)
    found = []
    for process, folder in zip(started, folders, strict=True):
        if process.exitcode is None:
            process.kill()
            process.join()
        assert process.exitcode is not None
        output = (folder / "out").read_text() + (folder / "err").read_text()
        found.append((process.exitcode, output))
    return found


def _run(words: list[str], folder: str, environment: dict[str, str], streams: Path | None) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        with open(os.devnull if streams is None else streams / name, "w") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.stdin = open(os.devnull if streams is None else streams / "in")  # noqa: SIM115
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
