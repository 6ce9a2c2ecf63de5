"""Stages as real processes: order, several at once, failures, settings, and what a killed list leaves behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlkv.utils import stages as module
from rlkv.utils.stages import Stage, below, run_stages, words
from tests.helpers.paths import ROOT

# a list of one stage that never ends, in a process that can be killed: FOLDER
DRIVER = """
import sys
from pathlib import Path
from rlkv.utils.stages import Stage, run_stages
folder = Path(sys.argv[1])
code = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(600)"
run_stages([Stage("endless", ["-c", code], Path("never"))], folder, folder / "results")
"""


def make_stage(name: str, code: str = "", needs: tuple[str, ...] = (), options: tuple[str, ...] = ()) -> Stage:
    """A stage that runs ``code`` in the root folder and then leaves a file of its name."""
    code = f"import os, pathlib, sys, time\n{code}\npathlib.Path({name!r}).touch()"
    return Stage(name, ["-c", code, *options], Path(name), tuple(map(Path, needs)))


def run(stages: list[Stage], root: Path, jobs: int = 1, threads: int | None = None, fresh: bool = False) -> None:
    run_stages(stages, root, root / "results", jobs, threads, fresh)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What was printed, without commands and seconds."""
    printed = capsys.readouterr().out.splitlines()
    return [line.split(" in ")[0] for line in printed if line.startswith("[") and "python -c" not in line]


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


def test_stages_run_once_and_in_the_order_of_their_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = "open('order', 'a').write({0!r})"
    stages = [
        make_stage("last", note.format("l"), ("first", "middle")),
        make_stage("first", note.format("f")),
        make_stage("middle", note.format("m"), ("first",)),
    ]
    run(stages, tmp_path)
    assert (tmp_path / "order").read_text() == "fml"
    assert lines(capsys) == ["[2/3] first: done", "[3/3] middle: done", "[1/3] last: done"]
    run(stages, tmp_path)
    assert lines(capsys) == ["[2/3] first: done before", "[3/3] middle: done before", "[1/3] last: done before"]
    (tmp_path / "middle").unlink()
    run(stages, tmp_path)
    assert (tmp_path / "order").read_text() == "fmlm"
    # it has made the same again
    assert lines(capsys) == ["[2/3] first: done before", "[3/3] middle: done", "[1/3] last: done before"]


def test_a_stage_runs_again_once_when_what_it_needs_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # like a training that has ended: it leaves its file as it is
    code = "import pathlib\nopen('count', 'a').write('x')\nif not pathlib.Path('lazy').exists(): open('lazy', 'w')"
    stages = [make_stage("first"), Stage("lazy", ["-c", code], Path("lazy"), (Path("first"),))]
    run(stages, tmp_path)
    (tmp_path / "first").touch()
    run(stages, tmp_path)
    assert (tmp_path / "count").read_text() == "x"
    (tmp_path / "first").write_text("other")
    run(stages, tmp_path)
    assert (tmp_path / "count").read_text() == "xx"
    capsys.readouterr()
    run(stages, tmp_path)
    assert "[2/2] lazy: done before" in lines(capsys)


def test_a_copy_resumes_whatever_the_times_of_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    stages = [make_stage("first"), make_stage("second", needs=("first",))]
    run(stages, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for number, name in enumerate(("second", "first")):
        os.utime(tmp_path / "b" / name, ns=(number, number))
    capsys.readouterr()
    run(stages, tmp_path / "b")
    assert lines(capsys) == ["[1/2] first: done before", "[2/2] second: done before"]


def test_several_at_once_and_no_more(tmp_path: Path) -> None:
    # each of two waits for the other one; a third that starts next to them finds that neither has ended
    meet = "pathlib.Path('at_{0}').touch()\nwhile not pathlib.Path('at_{1}').exists(): time.sleep(0.01)"
    alone = "assert pathlib.Path('a').exists() or pathlib.Path('b').exists()"
    stages = [make_stage("a", meet.format("a", "b")), make_stage("b", meet.format("b", "a")), make_stage("c", alone)]
    run(stages, tmp_path, jobs=2)
    assert (tmp_path / "c").exists()


@pytest.mark.parametrize(("threads", "shown"), [(1, "threads 1\n"), (None, "threads 7\n")])
def test_threads_and_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int | None, shown: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    run([make_stage("a name", "print('threads', os.environ['OMP_NUM_THREADS'])")], tmp_path, threads=threads)
    assert (tmp_path / "results" / "logs" / "1_a_name.log").read_text() == shown


def test_a_failure_names_the_stage_and_stops_the_others(tmp_path: Path) -> None:
    wait = "while not pathlib.Path('pid').exists(): time.sleep(0.01)\nprint('what went wrong')\nsys.exit(3)"
    endless = make_stage("endless", "pathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)")
    with pytest.raises(ValueError, match=r"'broken'.* 3.*\n.*what went wrong"):
        run([endless, make_stage("broken", wait), make_stage("later", "", ("endless",))], tmp_path, jobs=2)
    assert not is_alive(int((tmp_path / "pid").read_text()))
    assert not (tmp_path / "later").exists()


def test_a_failed_stage_goes_on(tmp_path: Path) -> None:
    flaky = make_stage("flaky", "assert pathlib.Path('now').exists()")
    with pytest.raises(ValueError, match="'flaky' failed"):
        run([flaky], tmp_path)
    (tmp_path / "now").touch()
    run([flaky], tmp_path)
    assert (tmp_path / "flaky").exists()


def test_a_stage_that_leaves_no_file_has_failed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'silent'.* 0"):
        run([Stage("silent", ["-c", "pass"], Path("absent"))], tmp_path)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_list_takes_its_stage_with_it(
    tmp_path: Path, ending: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ending == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux tells a process that its parent was killed")
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    pid = tmp_path / "pid"
    assert wait_until(lambda: pid.exists() and pid.read_text() != "")
    stage = int(pid.read_text())
    assert is_alive(stage)
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.5)
    with pytest.raises(ValueError, match="--output-dir"):
        run([], tmp_path)
    os.kill(driver.pid, ending)
    driver.wait()
    assert wait_until(lambda: not is_alive(stage))
    monkeypatch.undo()
    run([], tmp_path, fresh=True)  # free again, once all of them have ended


def test_other_settings_are_refused_and_nothing_starts(tmp_path: Path) -> None:
    run([make_stage("train", options=("--steps", "50"))], tmp_path)
    record = tmp_path / "results" / "stages.json"
    before = record.read_bytes()
    refused = r'\(train\.options\.--steps.*"50".*"60"\).*FRESH=1'
    with pytest.raises(ValueError, match=refused):
        run([make_stage("train", options=("--steps", "60"))], tmp_path)
    with pytest.raises(ValueError, match=r"\(filter\)"):
        run([make_stage("filter"), make_stage("train", options=("--steps", "50"))], tmp_path)
    assert not (tmp_path / "filter").exists()
    assert record.read_bytes() == before
    run([make_stage("train", options=("--steps", "50"))], tmp_path)
    (tmp_path / "results" / "sub").mkdir()
    run([make_stage("train", options=("--steps", "60"))], tmp_path, fresh=True)
    assert {entry.name for entry in (tmp_path / "results").iterdir()} == {"ended.json", "lock", "logs", "stages.json"}


def test_another_content_of_a_config_file_is_refused_and_results_are_not_configs(tmp_path: Path) -> None:
    stages = [make_stage("train", options=("a.yaml", "results/facts.json"))]
    for text in ("1", "2"):
        (tmp_path / "a.yaml").write_text("beta: 1")
        run(stages, tmp_path)
        (tmp_path / "results" / "facts.json").write_text(text)
    (tmp_path / "a.yaml").write_text("beta: 2")
    with pytest.raises(ValueError, match=r"\(train\.config files\.a\.yaml"):
        run(stages, tmp_path)


def test_a_config_file_changed_while_the_list_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("beta: 1")
    change = make_stage("first", "pathlib.Path('a.yaml').write_text('beta: 2')")
    with pytest.raises(ValueError, match=r"a\.yaml"):
        run([change, make_stage("train", needs=("first",), options=("a.yaml",))], tmp_path)
    assert not (tmp_path / "train").exists()


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run([make_stage("train")], tmp_path)
    monkeypatch.setattr(module, "__version__", "99")
    with pytest.raises(ValueError, match=r'version.*"99"'):
        run([make_stage("train")], tmp_path)


def test_the_record_is_there_before_a_stage_starts(tmp_path: Path) -> None:
    run([make_stage("first", "assert '\"first\"' in pathlib.Path('results/stages.json').read_text()")], tmp_path)


@pytest.mark.parametrize("fresh", [False, True])
def test_files_of_something_else_are_left_alone(tmp_path: Path, fresh: bool) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"stages\.json"):
        run([make_stage("train")], tmp_path, fresh=fresh)
    assert [entry.name for entry in (tmp_path / "results").iterdir()] == ["thesis.tex"]


def test_a_folder_that_was_being_emptied_is_emptied_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run([], tmp_path)
    (tmp_path / "results" / "sub").mkdir()
    (tmp_path / "results" / "sub" / "done").touch()

    def die(*_: object) -> None:
        raise KeyboardInterrupt  # at this place a kill -9 leaves the same files

    monkeypatch.setattr(module.shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        run([], tmp_path, fresh=True)
    monkeypatch.undo()
    assert (tmp_path / "results" / "sub" / "done").exists()
    run([], tmp_path)
    assert not (tmp_path / "results" / "sub").exists()


def test_a_first_start_killed_at_once_can_start_again(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "lock").touch()
    (tmp_path / "results" / ".stages.json.123.partial").touch()
    run([make_stage("first")], tmp_path)
    assert (tmp_path / "first").exists()


def test_words_keep_the_spaces_of_values() -> None:
    assert words("program --out {out}\n   --n {n}", out="a folder", n=3) == ["program", "--out", "a folder", "--n", "3"]


def test_names_are_relative_where_they_can_be() -> None:
    assert below(Path("/a/b"), Path("/a/b/c/d")) == Path("c/d")
    assert below(Path("/a/b"), Path("/a/c")) == Path("/a/c")


def test_a_file_that_no_stage_makes_is_named(tmp_path: Path) -> None:
    stage = make_stage("one", needs=("absent.txt",))
    with pytest.raises(ValueError, match=r"'one'.*absent\.txt"):
        run([stage], tmp_path)
    (tmp_path / "one").touch()  # nor is it taken for done before
    with pytest.raises(ValueError, match=r"'one'.*absent\.txt"):
        run([stage], tmp_path)


def test_stages_that_wait_for_each_other_are_named(tmp_path: Path) -> None:
    stages = [make_stage("first"), make_stage("a", needs=("first", "b")), make_stage("b", needs=("a",))]
    with pytest.raises(ValueError, match="'a', 'b'"):
        run(stages, tmp_path)
    assert (tmp_path / "first").exists()
