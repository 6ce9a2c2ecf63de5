"""A rollout server that is really killed while it samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.kill_server import check_killed_server


@pytest.mark.slow
def test_training_outlives_its_rollout_server(tmp_path: Path) -> None:
    # the training it is compared with samples by itself, and vLLM draws other tokens
    check_killed_server(tmp_path, kills=1, steps=5, engine="hf")
