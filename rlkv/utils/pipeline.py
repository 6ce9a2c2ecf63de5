"""Several commands one after another, or some at a time: each runs once, and a killed pipeline goes on where it was.

A stage has ended when its file ``done`` exists and is not older than those that it needs; commands write it last and go
on by themselves where they were stopped.  What a stage was begun with is kept (:mod:`rlkv.utils.stage_records`).
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from rlkv.utils.atomic import atomic_path
from rlkv.utils.stage_records import StageRecords

# glibc gives each large buffer back to the system and faults it in again at the next step: 3.3 of 15.8 s in a short
# training run, 0.5 of 13.1 s with these settings
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
LOCK = "lock"
EMPTYING = None  # in place of the size, while an earlier run's results are removed
LOCK_SECONDS = 5.0  # stages of a pipeline that was just killed are still ending
POLL_SECONDS = 0.25
# PR_SET_PDEATHSIG (1) outlives exec: the stage dies with the pipeline, however that dies; a second start would
# otherwise write into the same folder beside it
_DIE_WITH_PARENT = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); "
    "os.getppid() == int(sys.argv[1]) and os.execv(sys.argv[2], sys.argv[2:])"
)


@dataclass(frozen=True)
class Stage:
    """A command of Python, the file that it leaves when it has ended, and a measure of how far it is (0 to 1).

    Attributes:
        command: a program and its arguments.
        expected_seconds: weighs the estimate of the time left, nothing else.
        needs: ``done`` files of other stages, which have to end first; if one is newer than ``done``, this stage runs
            again.
        threads: of OpenMP and torch; None leaves them to the environment.
    """

    name: str
    command: list[str]
    done: Path
    progress: Callable[[], float]
    expected_seconds: float
    needs: tuple[Path, ...] = ()
    threads: int | None = None


def words(template: str, **values: object) -> list[str]:
    """A command as words, split before the values are put in: the names of folders may hold spaces."""
    return [word.format(**values) for word in template.split()]


def count_lines(folder: Path, pattern: str) -> int:
    """Lines of all files below ``folder`` whose names fit."""
    return sum(file.read_bytes().count(b"\n") for file in folder.glob(pattern))


def clock(seconds: float) -> str:
    """``seconds`` as m:ss."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


@contextmanager
def results_folder(folder: Path, kind: str, size: dict[str, Any], fresh: bool) -> Iterator[None]:
    """Make ``folder``, or go on with it, and keep other runs out of it.

    Args:
        kind: what the folder holds, such as ``demo``; ``KIND.json`` in it keeps ``size``.
        size: settings that stages of one folder must share.
        fresh: drop what an earlier run left.

    Raises:
        ValueError: if a run of another size lies there, another process works there, or ``fresh`` would remove a
            folder that this pipeline did not make.
    """
    marker = folder / f"{kind}.json"
    if fresh and folder.exists() and not marker.exists():
        own = (LOCK, f".{marker.name}.")  # all that a first start killed before its marker leaves
        if any(not entry.name.startswith(own) for entry in folder.iterdir()):
            raise ValueError(f"{folder} holds no {kind}, so it is not removed: take another --output-dir")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        _acquire(lock, folder)
        before = json.loads(marker.read_text()) if marker.exists() else size
        if fresh or before == EMPTYING:
            _write(marker, EMPTYING)  # killed from here on, the next run goes on emptying
            for entry in folder.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name not in (LOCK, marker.name):
                    entry.unlink()
        elif before != size:
            raise ValueError(f"{folder} holds a {kind} of another size: run it again with FRESH=1 (--fresh)")
        _write(marker, size)
        yield


def _write(marker: Path, content: Any) -> None:
    with atomic_path(marker) as partial:
        partial.write_text(json.dumps(content) + "\n")


def _acquire(lock: Any, folder: Path) -> None:
    for _ in range(int(LOCK_SECONDS / POLL_SECONDS)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it however the process ends
            return
        except BlockingIOError:
            time.sleep(POLL_SECONDS)
    raise ValueError(f"another process works in {folder}: wait for it, or take another --output-dir")


class _Running:
    """A stage that was started."""

    def __init__(self, stage: Stage, root: Path, log: Path, task: TaskID) -> None:
        self.stage, self.log, self.task = stage, log, task
        self.started = time.monotonic()
        self.at_start = self.share = min(1.0, stage.progress())
        threads = {} if stage.threads is None else {"OMP_NUM_THREADS": str(stage.threads)}
        command = [sys.executable, *stage.command]
        if sys.platform == "linux":
            command = [sys.executable, "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=root,
                env={**KEEP_MEMORY, **os.environ, **threads},
            )

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def seconds_left(self) -> float:
        self.share = min(1.0, self.stage.progress())
        pace = (self.share - self.at_start) / self.elapsed if self.elapsed > 0 else 0
        return (1 - self.share) / pace if pace > 0 else max(0.0, self.stage.expected_seconds - self.elapsed)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


class Pipeline:
    """Stages that run below one folder.

    They end with it when it is interrupted or terminated; on Linux also when it is killed.

    Args:
        root: where the commands run; paths of the stages are relative to it.
        folder: of the results; the output of the commands goes to ``logs`` in it.
        jobs: stages that may run at once.
    """

    def __init__(self, stages: Sequence[Stage], root: Path, folder: Path, console: Console, jobs: int = 1) -> None:
        self.stages, self.root, self.folder, self.console, self.jobs = stages, root, folder, console, jobs
        self.logs = folder / "logs"
        self._records = StageRecords(folder, root)
        self._running: list[_Running] = []

    def run(self) -> None:
        """Run what has not ended yet, or ended before something that it needs.

        Raises:
            ValueError: if a stage fails; the others are stopped.  If the folder holds a stage that was begun with
                other settings; nothing is started.
        """
        for stage in self.stages:
            self._records.check(stage.name, stage.command, self._exists(stage.done) or self._log(stage).exists())
        # a terminated pipeline must take its running stages with it, as Ctrl-C does
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            self._loop(list(self.stages))
        finally:
            for running in self._running:
                running.stop()
            signal.signal(signal.SIGTERM, before)

    def _loop(self, waiting: list[Stage]) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console) as bar:
            while waiting or self._running:
                self._start_ready(waiting, bar)
                for running in [r for r in self._running if r.process.poll() is not None]:
                    self._running.remove(running)
                    bar.remove_task(running.task)
                    self._end(running)
                    self._say(f"{self._title(running.stage)}: done in {clock(running.elapsed)}")
                self._show(waiting, bar)
                time.sleep(POLL_SECONDS)

    def _start_ready(self, waiting: list[Stage], bar: Progress) -> None:
        while ready := self._ready(waiting):
            stage = ready[0]
            if self._ended(stage):
                self._say(f"{self._title(stage)}: done before")
            elif len(self._running) < self.jobs:
                self._say("$ python " + shlex.join(stage.command))
                self._records.begin(stage.name, stage.command)
                self._running.append(_Running(stage, self.root, self._log(stage), bar.add_task("", total=1.0)))
            else:
                return
            waiting.remove(stage)
        assert self._running or not waiting, "stages need files that no stage makes"

    def _ready(self, waiting: list[Stage]) -> list[Stage]:
        """Stages of ``waiting`` whose needs exist and will not be made again, those that ended before first."""
        open_files = {stage.done for stage in [*waiting, *(running.stage for running in self._running)]}
        ready = [s for s in waiting if all(n not in open_files and self._exists(n) for n in s.needs)]
        return sorted(ready, key=lambda stage: not self._ended(stage))

    def _log(self, stage: Stage) -> Path:
        name = re.sub(r"[^\w.-]+", "_", stage.name)
        return self.logs / f"{self.stages.index(stage) + 1}_{name}.log"

    def _show(self, waiting: list[Stage], bar: Progress) -> None:
        later = sum(stage.expected_seconds for stage in waiting)
        left = (later + sum(running.seconds_left() for running in self._running)) / self.jobs
        for running in self._running:
            text = f"{self._title(running.stage):<34} about {clock(left)} left in all"
            bar.update(running.task, completed=running.share, description=text)

    def _end(self, running: _Running) -> None:
        stage, code, log = running.stage, running.process.returncode, running.log
        if code != 0 or not self._exists(stage.done):
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise ValueError(f"stage '{stage.name}' failed with exit code {code}; end of {log}:\n{tail}")
        if not self._ended(stage):  # it found nothing to do for what it needs now
            (self.root / stage.done).touch()

    def _exists(self, done: Path) -> bool:
        return (self.root / done).exists()

    def _ended(self, stage: Stage) -> bool:
        """Whether ``done`` exists and is not older than what the stage needs."""
        if not self._exists(stage.done):
            return False
        ended = (self.root / stage.done).stat().st_mtime_ns
        return all((self.root / need).stat().st_mtime_ns <= ended for need in stage.needs)

    def _title(self, stage: Stage) -> str:
        return f"[{self.stages.index(stage) + 1}/{len(self.stages)}] {stage.name}"

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
