"""Gates that were not saved here: adapter folders of PEFT, the hub, the published files."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from tests.helpers.gates import make_gates
from tests.helpers.paths import PUBLISHED_GATES

# PEFT folders


def peft_folder(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    content = {"base_model_name_or_path": "owner/base", "sink": 4, "window": 16, **config}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


def test_a_folder_written_by_peft_alone(tmp_path: Path) -> None:
    keys = [f"base_model.model.model.layers.{i}.self_attn.rlkv_gate.alpha" for i in range(12)]
    folder = peft_folder(
        tmp_path / "a", {key: torch.full((3,), i / 16) for i, key in enumerate(keys)}
    )
    loaded = HeadGates.load(folder)
    assert loaded.alpha.tolist() == [
        [i / 16] * 3 for i in range(12)
    ]  # by layer number, not by name
    assert loaded.model == ModelShape("owner/base", "", 12, 3, 0, 0)
    assert (loaded.sink, loaded.window) == (4, 16)


@pytest.mark.parametrize(
    "key", ["self_attn.rlkv_gate.alpha.default", "self_attn.rlkv_gate", "attn.rlkv_gate"]
)
def test_key_variants(tmp_path: Path, key: str) -> None:
    folder = peft_folder(
        tmp_path / "a", {f"base_model.model.model.layers.0.{key}": torch.tensor([0.25, 0.5])}
    )
    assert HeadGates.load(folder).alpha.tolist() == [[0.25, 0.5]]


def test_other_adapters_are_refused(tmp_path: Path) -> None:
    gate = "base_model.model.model.layers.{}.self_attn.rlkv_gate"
    cases = [
        (
            {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(2)},
            "no adapter of KV head",
        ),
        ({gate.format(1): torch.ones(2)}, "{1: 2}"),
        ({gate.format(0): torch.ones(2), gate.format(1): torch.ones(3)}, "{0: 2, 1: 3}"),
        ({gate.format(0): torch.ones(2), gate.format(0) + ".b": torch.ones(2)}, "layer 0"),
    ]
    for tensors, message in cases:
        with pytest.raises(ValueError, match=message):
            HeadGates.load(peft_folder(tmp_path / "a", tensors))
    folder = peft_folder(tmp_path / "b", {gate.format(0): torch.ones(2)})
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors.*PEFT"):
        HeadGates.load(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected adapter_model\.safetensors"):
        HeadGates.load(folder)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ValueError, match=r"adapter_config\.json.*sink"):
        HeadGates.load(folder)


def test_saved_folders_hold_one_tensor_per_layer(tmp_path: Path) -> None:
    gates = make_gates()
    gates.save(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    key = "base_model.model.model.layers.{}.self_attn.rlkv_gate.alpha"
    assert set(tensors) == {key.format(i) for i in range(4)}
    assert torch.equal(tensors[key.format(2)], gates.alpha[2])


# The hub


def test_hub_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    make_gates().save(tmp_path / "snapshot" / "gates.safetensors")
    asked = []

    def download(repo_id: str, revision: str | None = None, allow_patterns: object = None) -> str:
        asked.append((repo_id, revision))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    for address in (
        "hf://owner/name",
        "owner/name",
        "hf://owner/name@v1.0",
        "owner/name@refs/pr/1",
    ):
        assert HeadGates.load(address) == make_gates()
    assert asked == [("owner/name", r) for r in (None, None, "v1.0", "refs/pr/1")]
    make_gates(sink=5).save("owner/local/")
    assert HeadGates.load("owner/local").sink == 5  # a local path wins
    assert len(asked) == 4
    with pytest.raises(ValueError, match="hf://name:"):
        HeadGates.load("hf://name")


def test_an_unreachable_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("cannot connect\nlong explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ValueError, match=r"^hf://owner/name: .*\(cannot connect\)"):
        HeadGates.load("hf://owner/name")
    with pytest.raises(ValueError, match=r"^owner/name: .*\(cannot connect\)"):
        HeadGates.load("owner/name")


# Published files


@pytest.mark.parametrize("method", ["rlkv", "duo_attn"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [("Llama-3.1-8B-R1", (32, 8)), ("Qwen-2.5-7B-R1", (28, 4)), ("Qwen-3-4B-Thinking", (36, 8))],
)
def test_published_gates_load_without_a_warning(
    method: str, name: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    folder = PUBLISHED_GATES / method / name
    (table,) = folder.glob("*.tsv")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gates = HeadGates.load(folder)
        assert gates == HeadGates.load(table)
    assert gates.alpha.shape == shape
    assert gates.alpha.min() >= 0
    assert gates.alpha.max() <= 1
    assert (gates.sink, gates.window) == (128, 256)
    assert (gates.model is not None) == (folder / "config.json").exists()
    gates.save(tmp_path / "gates.tsv")
    if (
        method == "duo_attn" and name == "Qwen-2.5-7B-R1"
    ):  # no value to clip: the layout is the published one
        assert (tmp_path / "gates.tsv").read_bytes() == table.read_bytes()
    assert torch.equal(HeadGates.load(tmp_path / "gates.tsv").alpha, gates.alpha)
