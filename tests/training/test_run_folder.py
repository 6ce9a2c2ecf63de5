"""The folder of a run: what it may be resumed with, and the link to its gates."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkv.training.run_folder import RUN_CONFIG, check_output_dir


def test_checkpoints_of_an_earlier_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "complete.json").touch()
    (tmp_path / RUN_CONFIG).write_text("{}")
    with pytest.raises(ValueError, match="--output_dir"):
        check_output_dir(tmp_path, {}, resume=True)
