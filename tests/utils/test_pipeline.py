"""Stages as real processes: order, several at once, failures, and what a killed pipeline leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from rlkv.utils.pipeline import Pipeline, Stage, count_lines, results_folder, words
from tests.helpers.paths import ROOT

# a pipeline of one stage that never ends, in a process that can be killed: FOLDER
DRIVER = """
import sys
from pathlib import Path
from rich.console import Console
from rlkv.utils.pipeline import Pipeline, Stage, results_folder
from tests.helpers.paths import ROOT
folder = Path(sys.argv[1])
code = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(600)"
stage = Stage("endless", ["-c", code], Path("never"), lambda: 0.0, 1)
with results_folder(folder, "test", {}, False):
    Pipeline([stage], folder, folder, Console(file=sys.stderr)).run()
"""


def make_stage(name: str, code: str, needs: tuple[str, ...] = (), threads: int | None = None) -> Stage:
    """A stage that runs ``code`` in the root folder and then leaves a file of its name."""
    code = f"import os, pathlib, sys, time\n{code}\npathlib.Path({name!r}).touch()"
    return Stage(name, ["-c", code], Path(name), lambda: 0.5, 1, tuple(map(Path, needs)), threads)


def run(stages: list[Stage], folder: Path, jobs: int = 1) -> str:
    """The lines that the pipeline prints, without the commands."""
    with (folder / "output.txt").open("w") as out:
        Pipeline(stages, folder, folder, Console(file=out, width=100), jobs).run()
    text = (folder / "output.txt").read_text()
    return "\n".join(line for line in text.splitlines() if line.startswith("["))


def wait_until(condition: Callable[[], bool]) -> bool:
    """Whether it comes true within ten seconds, of which a fraction of one is needed."""
    for _ in range(200):
        if condition():
            return True
        time.sleep(0.05)
    return False


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_stages_run_once_and_in_the_order_of_their_needs(tmp_path: Path) -> None:
    note = "open('order', 'a').write(sys.argv[0] and {0!r})"
    stages = [
        make_stage("last", note.format("l"), ("first", "middle")),
        make_stage("first", note.format("f")),
        make_stage("middle", note.format("m"), ("first",)),
    ]
    shown = run(stages, tmp_path)
    assert (tmp_path / "order").read_text() == "fml"
    assert [line.split(":")[0] for line in shown.splitlines()] == ["[2/3] first", "[3/3] middle", "[1/3] last"]
    shown = run(stages, tmp_path)
    assert shown.splitlines() == [
        f"[{n}/3] {name}: done before" for n, name in ((2, "first"), (3, "middle"), (1, "last"))
    ]
    (tmp_path / "middle").unlink()
    shown = run(stages, tmp_path)
    assert (tmp_path / "order").read_text() == "fmlml"
    assert shown.splitlines()[0] == "[2/3] first: done before"
    assert [line.split(":")[0] for line in shown.splitlines()[1:]] == ["[3/3] middle", "[1/3] last"]


def test_a_stage_older_than_what_it_needs_runs_again_once(tmp_path: Path) -> None:
    count = "open('count', 'a').write('x')"
    # like a training that has ended: it leaves its file as it is
    lazy = Stage(
        "lazy",
        ["-c", f"import pathlib\n{count}\nif not pathlib.Path('lazy').exists(): pathlib.Path('lazy').touch()"],
        Path("lazy"),
        lambda: 0.0,
        1,
        (Path("first"),),
    )
    stages = [make_stage("first", ""), lazy]
    run(stages, tmp_path)
    later = (tmp_path / "lazy").stat().st_mtime_ns + 1
    os.utime(tmp_path / "first", ns=(later, later))
    run(stages, tmp_path)
    assert (tmp_path / "count").read_text() == "xx"
    assert "[2/2] lazy: done before" in run(stages, tmp_path)


def test_several_at_once_and_no_more(tmp_path: Path) -> None:
    # each of two waits for the other one; a third that starts beside them finds that neither has ended
    meet = "pathlib.Path('at_{0}').touch()\nwhile not pathlib.Path('at_{1}').exists(): time.sleep(0.01)"
    alone = "assert pathlib.Path('a').exists() or pathlib.Path('b').exists()"
    stages = [make_stage("a", meet.format("a", "b")), make_stage("b", meet.format("b", "a")), make_stage("c", alone)]
    run(stages, tmp_path, jobs=2)
    assert (tmp_path / "c").exists()


def test_threads_and_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    show = "print('threads', os.environ['OMP_NUM_THREADS'])"
    run([make_stage("one thread", show, threads=1), make_stage("as given", show)], tmp_path)
    assert (tmp_path / "logs" / "1_one_thread.log").read_text() == "threads 1\n"
    assert (tmp_path / "logs" / "2_as_given.log").read_text() == "threads 7\n"


def test_a_failure_names_the_stage_and_stops_the_others(tmp_path: Path) -> None:
    wait = "while not pathlib.Path('pid').exists(): time.sleep(0.01)\nprint('what went wrong')\nsys.exit(3)"
    endless = make_stage("endless", "pathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)")
    with pytest.raises(ValueError, match=r"stage 'broken' failed with exit code 3.*\n.*what went wrong"):
        run([endless, make_stage("broken", wait), make_stage("later", "", ("endless",))], tmp_path, jobs=2)
    assert not is_alive(int((tmp_path / "pid").read_text()))
    assert not (tmp_path / "later").exists()


def test_a_stage_that_leaves_no_file_has_failed(tmp_path: Path) -> None:
    stage = Stage("silent", ["-c", "pass"], Path("absent"), lambda: 0.0, 1)
    with pytest.raises(ValueError, match="stage 'silent' failed with exit code 0"):
        run([stage], tmp_path)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_pipeline_takes_its_stage_with_it(
    tmp_path: Path, ending: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ending == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux tells a process that its parent was killed")
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL)
    pid = tmp_path / "pid"
    assert wait_until(lambda: pid.exists() and pid.read_text() != "")
    stage = int(pid.read_text())
    assert is_alive(stage)
    monkeypatch.setattr("rlkv.utils.pipeline.LOCK_SECONDS", 0.5)
    refused = pytest.raises(ValueError, match="another process works in")
    with refused, results_folder(tmp_path, "test", {}, False):
        pass
    os.kill(driver.pid, ending)
    driver.wait()
    assert wait_until(lambda: not is_alive(stage))
    monkeypatch.undo()
    with results_folder(tmp_path, "test", {}, False):  # free again, once all of them have ended
        pass


def test_a_folder_is_of_one_size(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "results"
    for _ in range(2):
        with results_folder(folder, "demo", {"quick": True}, False):
            (folder / "file").touch()
    size = {"quick": False}
    another = pytest.raises(ValueError, match=r"holds a demo of another size: run it again with FRESH=1")
    with another, results_folder(folder, "demo", size, False):
        pass
    (folder / "sub").mkdir()
    with results_folder(folder, "demo", size, True):
        assert {entry.name for entry in folder.iterdir()} == {"demo.json", "lock"}


def test_a_folder_that_was_being_emptied_is_emptied_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with results_folder(tmp_path, "demo", {"quick": True}, False):
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "done").touch()

    def die(*_: object) -> None:
        raise KeyboardInterrupt  # at this place a kill -9 leaves the same files

    monkeypatch.setattr("rlkv.utils.pipeline.shutil.rmtree", die)
    with pytest.raises(KeyboardInterrupt), results_folder(tmp_path, "demo", {"quick": True}, True):
        pass
    monkeypatch.undo()
    assert (tmp_path / "sub" / "done").exists()
    with results_folder(tmp_path, "demo", {"quick": True}, False):
        assert {entry.name for entry in tmp_path.iterdir()} == {"demo.json", "lock"}


def test_a_first_start_killed_at_once_can_start_fresh(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    (tmp_path / ".demo.json.123.partial").touch()
    with results_folder(tmp_path, "demo", {}, True):
        assert {entry.name for entry in tmp_path.iterdir()} == {"demo.json", "lock"}


def test_a_folder_of_something_else_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    refused = pytest.raises(ValueError, match="holds no demo, so it is not removed")
    with refused, results_folder(tmp_path, "demo", {}, True):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_words_and_lines(tmp_path: Path) -> None:
    assert words("program --out {out}\n   --n {n}", out="a folder", n=3) == ["program", "--out", "a folder", "--n", "3"]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.jsonl").write_text("1\n2\n3")
    (tmp_path / "b.jsonl").write_text("1\n")
    assert count_lines(tmp_path, "**/*.jsonl") == 3
    assert count_lines(tmp_path / "absent", "*.jsonl") == 0
