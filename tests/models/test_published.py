"""What is known of the paper's models without the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkv.models.shape import PUBLISHED, same_model, short_name
from rlkv.rollout.footprint import Footprint
from rlkv.cli.app import CONFIGS

# billions of parameters, layers, KV heads: the models' cards, and the paper
FACTS = {"llama8b": (8.03, 32, 8), "qwen7b": (7.62, 28, 4), "qwen3_4b": (4.02, 36, 8)}


@pytest.mark.parametrize("model", PUBLISHED)
def test_shapes_give_the_published_sizes(model: str) -> None:
    billions, layers, heads = FACTS[short_name(model)]
    footprint = Footprint.of(model, "bfloat16")
    assert footprint is not None
    assert footprint.parameters / 1e9 == pytest.approx(billions, abs=0.005)
    assert footprint.weights == 2 * footprint.parameters
    assert (footprint.shape.num_layers, footprint.shape.num_kv_heads) == (layers, heads)
    assert footprint.kv_per_token == layers * heads * 128 * 2 * 2
    assert model in (CONFIGS / f"{short_name(model)}.yaml").read_text()


def test_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("mine", "a/Model", "b/Model"):
        Path(folder).mkdir(parents=True)
    assert [short_name(name) for name in ("tiny", "./mine/", "owner/Model")] == [
        "tiny",
        "mine",
        "Model",
    ]
    assert same_model("mine", str(tmp_path / "mine"))
    assert same_model("owner/Model", "a/Model")
    assert not same_model("a/Model", "b/Model")
    assert not same_model("owner/Model", "other/Model")
    assert not same_model("tiny", "smol")
