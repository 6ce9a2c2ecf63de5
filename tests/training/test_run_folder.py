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
