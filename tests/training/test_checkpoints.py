"""Checkpoints: only complete and undamaged ones count, and none is deleted before the next is
complete.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from rlkv.training import run_folder as checkpoints
from rlkv.training.run_folder import CHECKSUMS, PARTIAL, last_checkpoint, new_checkpoint
from tests.helpers import random_run


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


def test_an_interrupted_deletion_leaves_nothing_to_resume_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 2, keep=1)
    monkeypatch.undo()
    assert names(tmp_path) == [PARTIAL, "checkpoint-2"]
    write(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["checkpoint-3"]


def damage(checkpoint: Path, how: str) -> None:
    weights = checkpoint / "weights"
    if how == "missing":
        weights.unlink()
    elif how == "cut":
        weights.write_text("")
    elif how == "flipped":
        weights.write_text("y")
    else:
        (checkpoint / CHECKSUMS).write_text("{")


@pytest.mark.parametrize("how", ["missing", "cut", "flipped", "checksums"])
def test_a_damaged_checkpoint_is_passed_over_and_replaced(tmp_path: Path, how: str) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, keep=3)
    damage(tmp_path / "checkpoint-3", how)
    with pytest.warns(UserWarning, match=r"checkpoint-3 is damaged \((weights|checksums.json) "):
        assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    write(tmp_path, 3, keep=2)  # the run that resumed from 2 comes to 3 again
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-3"
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]


def test_a_run_without_any_undamaged_checkpoint_does_not_start_over_silently(
    tmp_path: Path,
) -> None:
    write(tmp_path, 1)
    damage(tmp_path / "checkpoint-1", "cut")
    with (
        pytest.warns(UserWarning, match="weights has changed"),
        pytest.raises(ValueError, match="remove them to start"),
    ):
        last_checkpoint(tmp_path)


def test_checkpoints_of_trainers_that_write_no_checksums_are_used(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "checkpoint-1" / CHECKSUMS).unlink()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-1"


def test_a_full_disk_or_a_damaged_file_costs_a_checkpoint_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = random_run.run(tmp_path / "whole")
    save, calls = torch.save, 0

    def full(*args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        random_run.run(tmp_path / "run")
    monkeypatch.undo()
    newest = last_checkpoint(tmp_path / "run")
    assert newest is not None
    assert not (tmp_path / "run" / "gates.pt").exists()
    random_run.run(tmp_path / "run", ["--max_steps", "4"])
    (tmp_path / "run" / "checkpoint-4" / "optimizer.pt").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"checkpoint-4 is damaged \(optimizer.pt has changed"):
        found = random_run.run(tmp_path / "run")
    assert torch.equal(found.alpha, expected.alpha)
    assert found.mean_alpha is not None
    assert expected.mean_alpha is not None
    assert torch.equal(found.mean_alpha, expected.mean_alpha)
