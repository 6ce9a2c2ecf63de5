"""Checkpoints: only complete ones count, and none is deleted before the next is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkv.training import run_folder
from rlkv.training.run_folder import PARTIAL, RUN_CONFIG, check_output_dir, last_checkpoint, new_checkpoint


def write(root: Path, step: int, keep: int | None = None) -> None:
    with new_checkpoint(root, step, keep) as folder:
        folder.mkdir(parents=True)
        (folder / "weights").write_text("x")


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_appears_when_it_is_complete(tmp_path: Path) -> None:
    write(tmp_path, 9)
    with pytest.raises(KeyboardInterrupt), new_checkpoint(tmp_path, 10, None) as folder:  # noqa: PT012
        folder.mkdir(parents=True)
        raise KeyboardInterrupt
    assert names(tmp_path) == [PARTIAL, "checkpoint-9"]
    (tmp_path / "checkpoint-final").mkdir()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-9"
    write(tmp_path, 10)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-9", "checkpoint-final"]
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert (tmp_path / "checkpoint-10" / "weights").exists()


def test_older_ones_are_deleted_when_the_next_is_complete(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1-best").mkdir()  # a copy that the user made
    for step in (1, 2, 3):
        write(tmp_path, step, keep=2)
    assert names(tmp_path) == ["checkpoint-1-best", "checkpoint-2", "checkpoint-3"]
    write(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["checkpoint-1-best", "checkpoint-4"]
    write(tmp_path, 5, keep=None)
    assert names(tmp_path) == ["checkpoint-1-best", "checkpoint-4", "checkpoint-5"]


def test_an_interrupted_deletion_leaves_nothing_to_resume_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(run_folder.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 2, keep=1)
    monkeypatch.undo()
    assert names(tmp_path) == [PARTIAL, "checkpoint-2"]
    write(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["checkpoint-3"]


def test_checkpoints_of_an_earlier_version_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "checkpoint-1" / "complete.json").touch()
    (tmp_path / RUN_CONFIG).write_text("{}")
    with pytest.raises(ValueError, match="--output_dir"):
        check_output_dir(tmp_path, {}, resume=True)
