"""A rollout server that is really killed while it samples."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.helpers.kill_server import check_killed_server


@pytest.mark.slow
def test_training_outlives_its_rollout_server(tmp_path: Path) -> None:
    engine = "vllm" if importlib.util.find_spec("vllm") else "hf"
    check_killed_server(tmp_path, kills=1, steps=2, engine=engine)
