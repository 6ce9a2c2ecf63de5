"""What a launcher asks for, before anything is sharded.

The sharding itself is in test_distributed.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.integrations import deepspeed

from rlkv.training.sharding import load_as, not_loading
from tests.helpers import random_run


def test_fsdp_of_the_first_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ValueError, match="fsdp_version: 2"):
        random_run.run(tmp_path / "run")


def test_zero3_is_told_the_dtype_and_does_not_see_models_that_are_looked_at() -> None:
    pytest.importorskip("deepspeed")
    config = deepspeed.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    load_as("bfloat16")
    assert (config.config["bf16"], config.config["fp16"]) == ({"enabled": True}, {"enabled": False})
    with not_loading():
        assert not deepspeed.is_deepspeed_zero3_enabled()
    assert deepspeed.is_deepspeed_zero3_enabled()
