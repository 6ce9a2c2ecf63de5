"""Checkpoints that are whole or not there: a marker is written last, and only marked ones are resumed from."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from rlkv.utils.atomic import atomic_path

MARKER = "complete.json"
_FOLDER = re.compile(r"checkpoint-(\d+)")


def checkpoint_folder(output_dir: str | Path, step: int) -> Path:
    return Path(output_dir) / f"checkpoint-{step}"


def _folders(output_dir: str | Path) -> list[tuple[int, Path]]:
    """``(step, folder)`` of all checkpoints, whole or not, oldest first."""
    found = [(int(m[1]), path) for path in Path(output_dir).glob("checkpoint-*") if (m := _FOLDER.fullmatch(path.name))]
    return sorted(found)


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest whole checkpoint, None if there is none."""
    whole = [path for _, path in _folders(output_dir) if (path / MARKER).exists()]
    return whole[-1] if whole else None


def begin_checkpoint(folder: Path) -> None:
    """Take the mark off, in case an earlier run left a checkpoint of the same step."""
    (folder / MARKER).unlink(missing_ok=True)


def finish_checkpoint(folder: Path, step: int, keep: int | None) -> None:
    """Mark ``folder`` as whole, then delete all but the ``keep`` newest ones (None: all stay) and broken ones."""
    with atomic_path(folder / MARKER) as partial:
        partial.write_text(json.dumps({"step": step}) + "\n")
    older = [path for other, path in _folders(folder.parent) if other < step]
    broken = [path for path in older if not (path / MARKER).exists()]
    whole = [path for path in older if path not in broken]
    spare = whole[: max(0, len(whole) - (keep - 1))] if keep is not None else []
    for path in [*broken, *spare]:
        begin_checkpoint(path)  # a deletion that is interrupted leaves a folder that nobody resumes from
        shutil.rmtree(path)


def save_tensors(path: Path, content: dict[str, Any]) -> None:
    with atomic_path(path) as partial:
        torch.save(content, partial)


def load_tensors(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)
