"""Gates on the hub: the card is filled in, and what was pushed comes back the same.

Against a hub on this machine.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from rlkv.gates.head_gates import HeadGates
from rlkv.gates.publish import model_card, push_gates, without_path
from tests.helpers.fake_hub import COMMIT, REPO, FakeHub, run_with_hub, serve
from tests.helpers.gates import make_gates

COMMANDS = """
import sys
from rlkv.cli.gates import main
gates, address, out = sys.argv[1:]
sys.stderr = sys.stdout
for command in (["push", gates, address, "--private"], ["pull", address, out], ["push", gates, "hf://owner/other"]):
    sys.argv[1:] = command
    try:
        main()
    except SystemExit as ended:
        print("exit code", ended.code)
"""
ROW = {
    "task": "math500",
    "accuracy": 0.8,
    "ci_low": 0.7,
    "ci_high": 0.9,
    "n": 500,
    "kv_bytes": 60,
    "kv_bytes_full": 99,
}


def test_the_card_states_model_sizes_heads_and_training() -> None:
    card = model_card(
        make_gates(training={"method": "rlkv", "steps": 60, "note": "a | b\nc"}), "me/mine"
    )
    _, metadata, text = card.split("---\n", 2)
    facts = yaml.safe_load(metadata)
    assert facts["base_model"] == "owner/model"
    assert facts["library_name"] == "peft"
    assert "4 layers x 6 KV heads of owner/model, found by `rlkv`" in text
    for line in (
        "| training | 4 | 16 |",
        "| serving (recommended) | 2 | 8 and the whole prompt |",
        "| 0.5 | 12 | 12 |",
    ):
        assert line in text
    assert "| steps | 60 |" in text
    assert "| note | a \\| b c |" in text
    assert "These gates have not been evaluated." in text
    assert "hf://me/mine" in text


def test_the_card_has_accuracies_where_they_were_measured(tmp_path: Path) -> None:
    gates = make_gates(
        training={"held_out": 64, "held_out_figures": {"accuracy_at_0.5": 0.875}}, model=None
    )
    results = tmp_path / "results.json"
    results.write_text(
        json.dumps({"results": [{**ROW, "method": "full"}, {**ROW, "method": "gates@0.5"}]})
    )
    card = model_card(gates, "me/mine", results)
    assert "| math500 | gates@0.5 | 80.0% (70.0% to 90.0%) | 500 | 60.6% |" in card
    assert "| accuracy_at_0.5 | 0.875 |" in card
    assert "not been evaluated" not in card
    assert "base_model" not in card  # the gates name none
    results.write_text(json.dumps({"results": [{"task": "math500"}]}))
    with pytest.raises(ValueError, match=r"not the results\.json"):
        model_card(gates, "me/mine", results)


def test_what_was_pushed_comes_back(tmp_path: Path) -> None:
    gates, folder = make_gates(), tmp_path / "repository"
    gates.save(tmp_path / "gates.pt")
    folder.mkdir()
    with serve(FakeHub(folder)) as hub:
        arguments = [
            str(tmp_path / "gates.pt"),
            f"hf://{REPO}",
            str(tmp_path / "pulled.safetensors"),
        ]
        lines = run_with_hub(COMMANDS, hub.url, tmp_path / "home", *arguments)
        assert lines[:2] == [f"{hub.url}/{REPO}/commit/{COMMIT}", "exit code 0"]
        assert lines[-3] == "exit code 0"
        assert lines[-2].startswith("error: hf://owner/other: the gates could not be pushed (")
        assert lines[-2].endswith("check the network")
        assert lines[-1] == "exit code 2"
    files = {"README.md", "adapter_config.json", "adapter_model.safetensors", "heat_map.png"}
    assert {file.name for file in folder.iterdir()} == files
    assert (folder / "README.md").read_text() == model_card(gates, REPO)
    for path in (folder, tmp_path / "pulled.safetensors"):
        found = HeadGates.load(path)
        assert torch.equal(found.alpha, gates.alpha)
        assert found == gates


def test_the_folder_of_a_model_is_not_published(tmp_path: Path) -> None:
    gates = make_gates()
    assert gates.model is not None
    (tmp_path / "my-llama").mkdir()
    named = replace(gates, model=replace(gates.model, model_id=str(tmp_path / "my-llama")))
    found = without_path(named)
    assert found.model is not None
    assert found.model.model_id == "my-llama"
    assert "base_model" not in model_card(found, REPO).split("---")[1]
    assert without_path(gates) == gates


@pytest.mark.parametrize("address", ["hf://owner", "hf://owner/name@other", "owner name"])
def test_wrong_addresses(address: str) -> None:
    with pytest.raises(ValueError, match=r"not a hub address|leave @other out"):
        push_gates(make_gates(), address)
