"""How many tokens an engine reads of models whose rotary frequencies are scaled."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlkv.rollout.base import Rows, SamplingParams

pytest.importorskip("vllm")

from rlkv.vllm.engine import VLLMEngine, _length_options
from tests.helpers.vllm_models import (
    OPTIONS,
    TOLERANCE,
    load_reference,
    make_folder,
    worst_difference,
)


def make_scaled_folder(kind: str, folder: Path) -> Path:
    """A model of 128 positions, which rotary scaling of this kind takes to 512."""
    scaling: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = 128
    return make_folder("llama", folder, max_position_embeddings=128, rope_parameters=scaling)


@pytest.mark.parametrize(
    ("kind", "asked", "options"),
    [
        ("yarn", 100, {"max_model_len": 100}),
        (
            "yarn",
            None,
            {"max_model_len": 512, "hf_overrides": {"max_position_embeddings": 512}},
        ),
        ("linear", 600, {"max_model_len": 512}),
        ("linear", None, {}),
        ("dynamic", 600, {"max_model_len": 128}),  # the engine has no table for more
    ],
)
def test_lengths_that_an_engine_is_asked_for(
    kind: str, asked: int | None, options: dict[str, Any], tmp_path: Path
) -> None:
    assert _length_options(str(make_scaled_folder(kind, tmp_path)), asked) == options


@pytest.mark.parametrize("kind", ["yarn", "linear"])
@pytest.mark.usefixtures("alone")
def test_positions_that_rotary_scaling_adds(kind: str, tmp_path: Path) -> None:
    """The config of a YaRN model may name the length that it was trained with."""
    folder = make_scaled_folder(kind, tmp_path)
    rows = Rows([list(range(3, 103)) * 2], [0], 0)
    with closing(VLLMEngine(str(folder), max_positions=600, **OPTIONS)) as engine:
        assert engine.max_positions == 512
        samples = dict(engine.sample(rows, SamplingParams(40, temperature=1.0, seed=5)))
    assert worst_difference(load_reference(folder, gated=False), rows, samples) < TOLERANCE
