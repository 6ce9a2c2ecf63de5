"""Checkpoints: only whole ones count, and none is deleted before the next is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkv.training import checkpoint
from rlkv.training.checkpoint import begin_checkpoint, checkpoint_folder, finish_checkpoint, last_checkpoint


def write(root: Path, step: int, keep: int | None = None) -> Path:
    folder = checkpoint_folder(root, step)
    folder.mkdir(parents=True)
    (folder / "weights").write_text("x")
    finish_checkpoint(folder, step, keep)
    return folder


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    write(tmp_path, 9)
    newest = write(tmp_path, 10)
    checkpoint_folder(tmp_path, 11).mkdir()  # killed while writing
    (tmp_path / "checkpoint-final").mkdir()
    assert last_checkpoint(tmp_path) == newest
    begin_checkpoint(newest)
    assert last_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 9)


def test_older_ones_go_when_the_next_is_whole(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, keep=2)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    write(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["checkpoint-4"]
    write(tmp_path, 5, keep=None)
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-5"]


def test_broken_older_ones_are_deleted(tmp_path: Path) -> None:
    checkpoint_folder(tmp_path, 1).mkdir()
    write(tmp_path, 2, keep=5)
    assert names(tmp_path) == ["checkpoint-2"]


def test_an_interrupted_deletion_leaves_nothing_to_resume_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 2, keep=1)
    assert last_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 2)
    assert not (checkpoint_folder(tmp_path, 1) / checkpoint.MARKER).exists()
