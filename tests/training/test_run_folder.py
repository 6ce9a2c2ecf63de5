"""The folder of a run: what it may be resumed with, and the link to its gates."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkv.training.config import RLKVSettings
from rlkv.training.run_folder import RunFolder


def test_a_folder_that_machines_do_not_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkv.training.run_folder.SHARED_SECONDS", 1)
    own = RunFolder(tmp_path / "run", RLKVSettings(), {"seed": 1})
    with pytest.raises(ValueError, match="disk that all of them share"):
        own.check_shared()
    RunFolder(tmp_path / "run", RLKVSettings(), {"seed": 2}).write_config()  # of an earlier run on this machine
    with pytest.raises(ValueError, match="disk that all of them share"):
        own.check_shared()
    own.write_config()
    own.check_shared()


def test_results_of_other_settings_are_not_overwritten_where_there_is_no_checkpoint(tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match="unknown origin"):
        RunFolder(tmp_path, RLKVSettings(), {"seed": 1})
