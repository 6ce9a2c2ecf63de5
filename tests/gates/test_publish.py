"""Plots of gates, the model card, and gates that come back from a hub on this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
import yaml

from rlkv.gates.head_gates import HeadGates
from rlkv.gates.publish import check_evaluation, model_card, plot_gates, push_gates, without_path
from tests.helpers.fake_hub import COMMIT, REPO, FakeHub, run_with_hub, serve
from tests.helpers.gates import make_gates


def test_a_heat_map_shows_every_gate_in_its_colour(tmp_path: Path) -> None:
    one = torch.zeros(36, 8)
    one[0, 1] = 1
    plots = []
    for alpha in (torch.zeros(36, 8), torch.ones(36, 8), one):
        plot_gates(HeadGates(alpha), tmp_path / "gates.png")
        plots.append(matplotlib.image.imread(tmp_path / "gates.png")[..., :3])
    height, width = plots[0].shape[:2]
    for plot, end in zip(plots[:2], (0.0, 1.0), strict=True):
        color = np.array(matplotlib.colormaps["viridis"](end)[:3])
        # the map fills the plot, at the colours of 0 and 1 however uniform the gates are
        assert (np.abs(plot - color).max(-1) < 0.02).mean() > 0.25
    rows, columns = np.nonzero(np.abs(plots[2] - plots[0]).max(-1) > 0.3)
    assert columns.mean() < width / 4  # layer 0 is at the left
    assert rows.mean() < height / 2  # head 1 is near the top


def test_the_card_states_model_sizes_heads_and_training() -> None:
    training = {"method": "rlkv", "steps": 60, "note": "a | b\nc"}
    card = model_card(make_gates(training=training), "me/mine")
    _, metadata, text = card.split("---\n", 2)
    facts = yaml.safe_load(metadata)
    assert facts["base_model"] == "owner/model"
    assert facts["library_name"] == "peft"
    for line in (
        "4 layers x 6 KV heads of owner/model, found by `rlkv`",
        "| training | 4 | 16 |",
        "| serving (recommended) | 2 | 8 and the whole prompt |",
        "| 0.5 | 12 | 12 |",
        "These gates have not been evaluated.",
        "hf://me/mine",
    ):
        assert line in text
    assert json.loads(text.partition("```json\n")[2].partition("```")[0]) == training


def test_the_card_has_accuracies_where_they_were_measured(tmp_path: Path) -> None:
    training = {"held_out": 64, "held_out_figures": {"accuracy_at_0.5": 0.875}}
    gates = make_gates(training=training, model=None)
    row = {"task": "math500", "method": "gates@0.5", "accuracy": 0.8, "ci_low": 0.7, "ci_high": 0.9}
    row |= {"n": 500, "kv_bytes": 60, "kv_bytes_full": 99}
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"results": [row]}))
    card = model_card(gates, "me/mine", results)
    assert "| math500 | gates@0.5 | 80.0% (70.0% to 90.0%) | 500 | 60.6% |" in card
    assert "layers with gates" not in card
    hybrid = {**row, "kv_bytes_unchanged": 49}
    results.write_text(json.dumps({"results": [hybrid]}))
    both = model_card(gates, "me/mine", results)
    assert "full cache for the same tokens; then of the layers with gates alone.\n" in both
    assert "| 500 | 60.6%; 22.0% |" in both
    assert "| accuracy_at_0.5 | 0.875 |" in card
    assert "not been evaluated" not in card
    assert "base_model" not in card  # the gates name none
    assert "rlkv-infer --model MODEL --gates hf://me/mine" in card
    results.write_text(json.dumps({"config": {"model": "other"}, "results": [row]}))
    with pytest.raises(ValueError, match="is an evaluation of other, but these gates are of"):
        push_gates(make_gates(), "hf://me/mine", results)
    assert gates.model is None
    for config in (
        {"model": "gone/" + make_gates().model.model_id.split("/")[-1]},
        None,
        {"model": 5},
    ):
        results.write_text(json.dumps({"config": config, "results": [row]}))
        check_evaluation(results, make_gates())
    results.write_text(json.dumps({"results": [{"task": "math500"}]}))
    with pytest.raises(ValueError, match=r"not the results\.json"):
        model_card(gates, "me/mine", results)


COMMANDS = """
import sys
from rlkv.cli.gates import main
gates, address, out = sys.argv[1:]
sys.stderr = sys.stdout
for command in (["push", gates, address], ["pull", address, out], ["push", gates, "hf://owner/other"]):
    sys.argv[1:] = command
    try:
        main()
    except SystemExit as ended:
        print("exit code", ended.code)
"""


def test_what_was_pushed_comes_back(tmp_path: Path) -> None:
    gates, folder, pulled = make_gates(), tmp_path / "hub", tmp_path / "pulled.safetensors"
    gates.save(tmp_path / "gates.pt")
    folder.mkdir()
    with serve(FakeHub(folder)) as hub:
        arguments = [str(tmp_path / "gates.pt"), f"hf://{REPO}", str(pulled)]
        lines = run_with_hub(COMMANDS, hub.url, tmp_path / "home", *arguments)
        assert lines[:2] == [f"{hub.url}/{REPO}/commit/{COMMIT}", "exit code 0"]
        assert lines[-3] == "exit code 0"
        assert lines[-2].startswith("error: hf://owner/other: the gates could not be pushed (")
        assert lines[-1] == "exit code 2"
    files = {"README.md", "adapter_config.json", "adapter_model.safetensors", "heat_map.png"}
    assert {file.name for file in folder.iterdir()} == files
    assert (folder / "README.md").read_text() == model_card(gates, REPO)
    assert HeadGates.load(folder) == HeadGates.load(pulled) == gates


def test_the_folder_of_a_model_is_not_published(tmp_path: Path) -> None:
    gates = make_gates()
    (tmp_path / "my-llama").mkdir()
    named = replace(gates, model=replace(gates.model, model_id=str(tmp_path / "my-llama")))
    found = without_path(named)
    assert found.model.model_id == "my-llama"
    assert "base_model" not in model_card(found, REPO).split("---")[1]
    assert without_path(gates) == gates


@pytest.mark.parametrize("address", ["hf://owner", "hf://owner/name@other", "owner name"])
def test_wrong_addresses(address: str) -> None:
    with pytest.raises(ValueError, match=r"not a hub address|leave @other out"):
        push_gates(make_gates(), address)
