"""The folder of a run: what it may be resumed with, and the link to its gates."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from rlkv.training.config import RLKVSettings
from rlkv.training.run_folder import RunFolder
from rlkv.utils.store import StoreInUseError


def test_a_folder_that_machines_do_not_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlkv.training.run_folder.SHARED_SECONDS", 1)
    own = RunFolder(tmp_path / "run", RLKVSettings(), {"seed": 1})
    with pytest.raises(ValueError, match="disk that all of them share"):
        own.check_shared()
    RunFolder(
        tmp_path / "run", RLKVSettings(), {"seed": 2}
    ).write_config()  # of an earlier run on this machine
    with pytest.raises(ValueError, match="disk that all of them share"):
        own.check_shared()
    own.write_config()
    own.check_shared()


def test_results_of_other_settings_are_not_overwritten_where_there_is_no_checkpoint(
    tmp_path: Path,
) -> None:
    RunFolder(tmp_path, RLKVSettings(), {"seed": 1}).write_config()
    RunFolder(tmp_path, RLKVSettings(), {"seed": 2})  # nothing has been made yet
    (tmp_path / "log.jsonl").touch()
    RunFolder(tmp_path, RLKVSettings(), {"seed": 2})
    (tmp_path / "log.jsonl").write_text("{}\n")
    assert RunFolder(tmp_path, RLKVSettings(), {"seed": 1}).checkpoint is None
    for _ in range(2):
        with pytest.raises(ValueError, match=r"other settings .seed 1 -> 2"):
            RunFolder(tmp_path, RLKVSettings(), {"seed": 2})
        (tmp_path / "log.jsonl").unlink(missing_ok=True)
        (tmp_path / "gates.pt").touch()
    (tmp_path / "run_config.json").unlink()
    with pytest.raises(ValueError, match=r"holds gates\.pt, but no run_config"):
        RunFolder(tmp_path, RLKVSettings(), {"seed": 1})


@pytest.mark.parametrize(
    "name", ["summary.json", "samples.jsonl", "heat_map.png", "adapter", "gates.safetensors"]
)
def test_files_of_somebody_else_are_not_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=f"holds {name}, but no run_config"):
        RunFolder(tmp_path, RLKVSettings(), {"seed": 1})
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "config", ["[]", "[" * 99999, "é".encode("latin-1"), '{"data": 1, "loss": 2, "seed": 1}']
)
def test_a_run_of_another_command_is_not_resumed(tmp_path: Path, config: str | bytes) -> None:
    (tmp_path / "run_config.json").write_bytes(
        config if isinstance(config, bytes) else config.encode()
    )
    with pytest.raises(ValueError, match=r"another command|is not JSON"):
        RunFolder(tmp_path, RLKVSettings(), {"seed": 1})


def _train(folder: Path, ready: Any, end: Any) -> None:
    RunFolder(folder, RLKVSettings(), {"seed": 1}).write_config()
    ready.set()
    end.wait(60)


def test_two_commands_in_one_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, end = context.Event(), context.Event()
    other = context.Process(target=_train, args=(tmp_path, ready, end))
    late = RunFolder(
        tmp_path, RLKVSettings(), {"seed": 1}
    )  # both have looked before one of them writes
    other.start()
    assert ready.wait(120)
    for start in (lambda: RunFolder(tmp_path, RLKVSettings(), {"seed": 1}), late.write_config):
        with pytest.raises(StoreInUseError, match="another process"):
            start()
    end.set()
    other.join()
    (tmp_path / "log.jsonl").write_text("{}\n")
    late.write_config()
