"""Commands that each run once, in the order of their needs, some at a time; a list that was stopped resumes.

A stage has ended when its file ``done`` exists and the files that it needs are those that it had: ``ended.json`` in the
results folder has their digests, so that a copy of the folder resumes too.  Programs write ``done`` last and resume by
themselves.  ``stages.json`` keeps what all stages were started with (options, digests of config files, version): one
folder never mixes results of different settings.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rlkv import __version__
from rlkv.utils.atomic import write_json
from rlkv.utils.provenance import digest
from rlkv.utils.store import differences

RECORD, LOCK, ENDED = "stages.json", "lock", "ended.json"
EMPTYING = None  # in place of the record, while an earlier run's results are removed
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
LOCK_SECONDS, POLL_SECONDS = 5.0, 0.25  # stages of a list that was just killed are still ending


@dataclass(frozen=True, kw_only=True)
class StagesConfig:
    """Options of a program that runs stages on a built-in model."""

    model: Literal["tiny", "smol"] = "tiny"
    """built-in model"""
    output_dir: Path | None = None
    """where everything goes; default: a folder of the program and the model in results/"""
    fresh: bool = False
    """drop the results of an earlier run"""
    quick: bool = False
    """every stage at a tenth of the size"""

    def folder(self, **defaults: str) -> Path:
        """The folder as a user names it; ``defaults``: its name in results/, by model."""
        return self.output_dir or Path("results", defaults[self.model])


@dataclass(frozen=True)
class Stage:
    """A Python program with its arguments, and the file that it leaves when it has ended.

    ``needs`` are ``done`` files of other stages; if one has changed since, this stage runs again.
    """

    name: str
    command: list[str]
    done: Path
    needs: tuple[Path, ...] = ()

    def digests(self, root: Path) -> list[str]:
        """Of the files that it needs."""
        return [digest((root / file).read_bytes()) for file in self.needs]

    def has_ended(self, root: Path, folder: Path) -> bool:
        files_exist = all((root / file).exists() for file in (self.done, *self.needs))
        return files_exist and _ended(folder).get(self.name) == self.digests(root)

    def note_end(self, root: Path, folder: Path) -> None:
        write_json(folder / ENDED, _ended(folder) | {self.name: self.digests(root)})


def _ended(folder: Path) -> dict[str, list[str]]:
    """Stages that have ended, with the digests of what they needed."""
    record = folder / ENDED
    return json.loads(record.read_text()) if record.exists() else {}


def run_stages(
    stages: Sequence[Stage], root: Path, folder: Path, jobs: int = 1, threads: int | None = None, fresh: bool = False
) -> None:
    """Run the stages that have not ended, at most ``jobs`` at a time; what they print goes to ``folder/logs``.

    They end with this process when it is interrupted or terminated; on Linux also when it is killed.

    Args:
        root: where the commands run; paths of the stages are relative to it.
        threads: of OpenMP in every stage; None leaves them to the environment.
        fresh: remove what an earlier run left in ``folder``.

    Raises:
        ValueError: if a stage fails (the others are stopped), ``folder`` was started with other settings or
            holds something else, or another process is using it.
    """
    started_with = {stage.name: _facts(stage, root, folder) for stage in stages}
    environment = {**os.environ, **({} if threads is None else {"OMP_NUM_THREADS": str(threads)})}
    waiting = dict(enumerate(stages, start=1))
    running: dict[int, tuple[subprocess.Popen[bytes], float]] = {}

    def say(number: int, text: str) -> None:
        print(f"[{number}/{len(stages)}] {stages[number - 1].name}: {text}", flush=True)

    def log(number: int) -> Path:
        name = re.sub(r"[^\w.-]+", "_", stages[number - 1].name)
        return folder / "logs" / f"{number}_{name}.log"

    with _results_folder(folder, started_with, fresh):
        (folder / "logs").mkdir(exist_ok=True)
        # a terminated list must stop its running stages, as Ctrl-C does
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            while waiting or running:
                unmade = {stages[number - 1].done for number in (*waiting, *running)}
                ready = [number for number, stage in waiting.items() if not unmade & set(stage.needs)]
                if not ready and not running:
                    names = ", ".join(repr(stage.name) for stage in waiting.values())
                    raise ValueError(f"the stages {names} wait for each other's files")
                for number in ready:
                    stage = waiting[number]
                    if absent := [file for file in stage.needs if not (root / file).exists()]:
                        raise ValueError(f"stage {stage.name!r} needs {absent[0]}, which no stage makes")
                    if stage.has_ended(root, folder):
                        say(number, "done before")
                    elif len(running) < jobs:
                        # a config file may have changed since
                        _check(folder, started_with[stage.name], _facts(stage, root, folder))
                        say(number, "python " + shlex.join(stage.command))
                        running[number] = _start(stage, root, log(number), environment), time.monotonic()
                    else:
                        continue
                    del waiting[number]
                for number, (process, started) in list(running.items()):
                    if process.poll() is not None:
                        del running[number]
                        _check_end(stages[number - 1], root, log(number), process.returncode)
                        stages[number - 1].note_end(root, folder)
                        say(number, f"done in {time.monotonic() - started:.0f} s")
                if running:
                    time.sleep(POLL_SECONDS)
        finally:
            for process, _ in running.values():
                process.terminate()
                process.wait()
            signal.signal(signal.SIGTERM, before)


def words(template: str, **values: object) -> list[str]:
    """A command as words, split before the values are filled in, since names of folders may hold spaces."""
    return [word.format(**values) for word in template.split()]


def below(root: Path, folder: Path) -> Path:
    """``folder`` as a name relative to ``root`` where it lies below it, since commands are recorded in result files."""
    return folder.relative_to(root) if folder.is_relative_to(root) else folder


def _start(stage: Stage, root: Path, log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    die = partial(_die_with, os.getpid(), ctypes.CDLL(None)) if sys.platform == "linux" else None
    command, both = [sys.executable, *stage.command], subprocess.STDOUT
    with log.open("w") as out:
        return subprocess.Popen(command, stdout=out, stderr=both, cwd=root, env=environment, preexec_fn=die)


def _die_with(parent: int, library: Any) -> None:
    library.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG outlives exec
    if os.getppid() != parent:  # killed before the call
        os._exit(1)


def _check_end(stage: Stage, root: Path, log: Path, code: int) -> None:
    if code != 0 or not (root / stage.done).exists():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise ValueError(f"stage '{stage.name}' failed with exit code {code}; end of {log}:\n{tail}")


def _facts(stage: Stage, root: Path, folder: Path) -> dict[str, Any]:
    """What the results of a stage depend on; YAML and JSON files outside of ``folder`` are its config files."""
    program, *options = " ".join(stage.command).split(" --")
    named = {f"--{name}": value for name, _, value in (option.partition(" ") for option in options)}
    paths = [(root / word).resolve() for word in stage.command if word.endswith(CONFIG_SUFFIXES)]
    files = [path for path in paths if path.is_file() and not path.is_relative_to(folder.resolve())]
    digests = {path.name: digest(path.read_bytes()) for path in files}
    return {"options": {"program": program, **named}, "config files": digests, "version": __version__}


@contextmanager
def _results_folder(folder: Path, facts: dict[str, Any], fresh: bool) -> Iterator[None]:
    """Make or resume ``folder``, and keep other runs out of it."""
    record = folder / RECORD
    folder.mkdir(parents=True, exist_ok=True)
    own = (LOCK, f".{RECORD}.")  # all that a first start leaves that was killed before its record
    if not record.exists() and any(not entry.name.startswith(own) for entry in folder.iterdir()):
        raise ValueError(f"{folder} holds files but no {RECORD}, so they are not changed: take another --output-dir")
    with (folder / LOCK).open("w") as lock:
        _acquire(lock, folder)
        before = json.loads(record.read_text()) if record.exists() else facts
        if fresh or before == EMPTYING:
            write_json(record, EMPTYING)  # killed from here on, the next run continues to empty it
            for entry in folder.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name not in (LOCK, RECORD):
                    entry.unlink()
        else:
            _check(folder, before, facts)
        write_json(record, facts)
        yield


def _check(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    changes = [text or name for name, text in differences(before, now).items()]
    if changes:
        raise ValueError(f"{folder} was started with other settings ({'; '.join(changes)}): run it again with FRESH=1")


def _acquire(lock: Any, folder: Path) -> None:
    for _ in range(int(LOCK_SECONDS / POLL_SECONDS)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it however the process ends
            return
        except BlockingIOError:
            time.sleep(POLL_SECONDS)
    raise ValueError(f"another process is using {folder}: wait for it, or take another --output-dir")
