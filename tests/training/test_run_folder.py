"""The folder of a run: what it may be resumed with, and checkpoints."""

from __future__ import annotations

import multiprocessing
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rlkv.training import run_folder
from rlkv.training.config import RLKVSettings
from rlkv.training.run_folder import (
    FORMAT,
    PARTIAL,
    RunFolder,
    last_checkpoint,
    link,
    new_checkpoint,
)
from rlkv.utils.store import StoreInUseError

ONE = {"seed": 1}


def folder_of(path: Path, config: dict[str, Any] | None = None) -> RunFolder:
    return RunFolder(path, RLKVSettings(), config or ONE)


# --- which folders are refused


def test_a_folder_that_machines_do_not_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "SHARED_SECONDS", 1)
    own = folder_of(tmp_path / "run")
    with pytest.raises(ValueError, match="disk that all of them share"):
        own.check_shared()
    folder_of(tmp_path / "run", {"seed": 2}).write_config()  # of an earlier run on this machine
    with pytest.raises(ValueError, match="disk that all of them share"):
        own.check_shared()
    own.write_config()
    own.check_shared()


def test_results_of_other_settings_are_not_overwritten(tmp_path: Path) -> None:
    folder_of(tmp_path).write_config()
    (tmp_path / "log.jsonl").touch()
    folder_of(tmp_path, {"seed": 2})  # nothing has been made yet
    (tmp_path / "log.jsonl").write_text("{}\n")
    assert folder_of(tmp_path).checkpoint is None
    for _ in range(2):
        with pytest.raises(ValueError, match=r"other settings .seed 1 -> 2"):
            folder_of(tmp_path, {"seed": 2})
        (tmp_path / "log.jsonl").unlink(missing_ok=True)
        (tmp_path / "gates.pt").touch()
    settings = RLKVSettings(model="organisation/model")
    with pytest.raises(ValueError, match=r"other settings \(model_files "):
        RunFolder(tmp_path, settings, ONE)
    with pytest.raises(ValueError, match="continue it with --resume"):
        RunFolder(tmp_path, RLKVSettings(resume=False), ONE)


@pytest.mark.parametrize(
    ("kind", "warmup", "follow"),
    [
        ("constant", 0, False),
        ("constant_with_warmup", 5, False),
        ("constant_with_warmup", 0.1, True),
        ("linear", 0, True),
    ],
)
def test_rates_that_follow_from_the_number_of_steps_keep_it(
    tmp_path: Path, kind: str, warmup: float, follow: bool
) -> None:
    config = ONE | {"lr_scheduler_type": kind, "trl": {"warmup_steps": warmup}}
    folder_of(tmp_path, config | {"max_steps": 100}).write_config()
    (tmp_path / "log.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="max_steps 100 -> 200") if follow else nullcontext():
        folder_of(tmp_path, config | {"max_steps": 200})


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("gates.pt", "mine", "holds gates.pt, but no run_config"),
        ("adapter", "mine", "holds adapter, but no run_config"),
        ("run_config.json", "[]", "another command"),
        ("run_config.json", "[" * 99999, "is not JSON"),
        ("run_config.json", '{"data": 1, "loss": 2, "seed": 1}', "another command"),
        (
            "run_config.json",
            '{"seed": 1, "model_files": 0}',
            "another version of rlkv.*--output-dir",
        ),
        ("run_config.json", f'{{"seed": 1, "format": {FORMAT + 1}}}', "another version"),
    ],
)
def test_files_of_others_are_refused(tmp_path: Path, name: str, content: str, named: str) -> None:
    (tmp_path / name).write_text(content)
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(ValueError, match=named):
        folder_of(tmp_path)
    assert (tmp_path / name).read_text() == content


def _train(folder: Path, ready: Any, end: Any) -> None:
    folder_of(folder).write_config()
    ready.set()
    end.wait(60)


@pytest.mark.slow
def test_two_commands_in_one_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, end = context.Event(), context.Event()
    other = context.Process(target=_train, args=(tmp_path, ready, end))
    late = folder_of(tmp_path)  # both have looked before one of them writes
    other.start()
    assert ready.wait(120)
    for start in (lambda: folder_of(tmp_path), late.write_config):
        with pytest.raises(StoreInUseError, match="another process"):
            start()
    end.set()
    other.join()
    (tmp_path / "log.jsonl").write_text("{}\n")
    late.write_config()


def test_the_link_to_the_gates_replaces_links_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "gates.pt").write_text(run)
        link(Path("new/gates.pt"), tmp_path / run / "gates.pt")
        assert Path("new/gates.pt").read_text() == run
    Path("mine.pt").write_text("mine")
    link(Path("mine.pt"), tmp_path / "two" / "gates.pt")
    assert Path("mine.pt").read_text() == "mine"
    assert "mine.pt is a file of its own" in capsys.readouterr().out


# --- checkpoints


def test_a_checkpoint_appears_when_it_is_complete(tmp_path: Path) -> None:
    def write(step: int, keep: int | None, error: type[BaseException] | None = None) -> list[str]:
        with new_checkpoint(tmp_path, step, keep) as folder:
            folder.mkdir(parents=True)
            (folder / "weights").write_text("x")
            if error is not None:
                raise error
        return sorted(path.name for path in tmp_path.iterdir())

    assert last_checkpoint(tmp_path / "absent") is None
    assert write(9, None) == ["checkpoint-9"]
    with pytest.raises(KeyboardInterrupt):
        write(10, None, KeyboardInterrupt)
    assert (tmp_path / PARTIAL).exists()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-9"
    write(10, None)
    assert write(11, 2) == ["checkpoint-10", "checkpoint-11"]
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-11"
    assert (tmp_path / "checkpoint-11" / "weights").exists()
