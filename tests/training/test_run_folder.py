"""Checkpoints: only complete ones count, and none is deleted before the next is complete."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.trainer_utils import get_last_checkpoint

from rlkv.training.run_folder import PARTIAL, new_checkpoint


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
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-9")
    write(tmp_path, 10)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-9"]
    assert (tmp_path / "checkpoint-10" / "weights").exists()


def test_older_ones_are_deleted_when_the_next_is_complete(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, keep=2)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    write(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["checkpoint-4"]
    write(tmp_path, 5, keep=None)
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-5"]
