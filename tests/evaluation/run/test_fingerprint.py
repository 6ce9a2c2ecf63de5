"""What a resumed measurement compares: any other model is seen, and versions."""

from __future__ import annotations

import pytest
import torch

from rlkv.cache import CacheSettings
from rlkv.evaluation.runner import RunSettings, library_facts, model_facts
from rlkv.rollout.base import SamplingParams
from tests.helpers.models import make_tiny_model


def test_versions_of_the_libraries() -> None:
    assert library_facts().keys() >= {"rlkv", "torch", "transformers"}


@pytest.mark.parametrize("place", [0, -1])
def test_another_state_of_the_model_is_seen(family: str, place: int) -> None:
    model = make_tiny_model(family)
    before = model_facts(model)
    assert model_facts(make_tiny_model(family)) == before
    for name, parameter in list(model.named_parameters())[::5]:
        with torch.no_grad():
            old = parameter.view(-1)[place].item()
            parameter.view(-1)[place] += 1
            after = model_facts(model)
            parameter.view(-1)[place] = old
        assert after | {"weights": ""} == before | {"weights": ""}
        assert after["weights"] != before["weights"], name
    assert model_facts(model) == before
    model.config.rope_theta = 5e4
    assert model_facts(model)["config"] != before["config"]


def test_rows_from_before_the_protected_prompt_stay_valid() -> None:
    plain, protecting = (
        RunSettings(CacheSettings(protect_prompt=on), SamplingParams(4)) for on in (False, True)
    )
    assert "protect_prompt" not in plain.fingerprint()["cache"]
    assert protecting.fingerprint()["cache"] == {
        **plain.fingerprint()["cache"],
        "protect_prompt": True,
    }


def test_number_types_and_names() -> None:
    model = make_tiny_model("llama")
    before = model_facts(model)
    model.config._name_or_path = "another/folder"
    assert model_facts(model) == before, "a folder may move"
    half = model_facts(model.to(torch.bfloat16))
    assert half["dtype"] == "torch.bfloat16"
    assert half["weights"] != before["weights"]


def test_a_large_parameter_is_sampled_to_its_end() -> None:
    model = make_tiny_model("llama", vocab_size=4001, hidden_size=64)
    before = model_facts(model)["weights"]
    with torch.no_grad():
        model.lm_head.weight[-1, -1] += 1
    assert model_facts(model)["weights"] != before
