"""Fine-tuning of the built-in language model, on a small random one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from trl import SFTTrainer

from rlkv.models.loading import load_tokenizer
from rlkv.utils.files import read_log
from rlkv.utils.progress import progress_bar
from tests.helpers.models import make_tiny_model
from tests.helpers.programs import load_program

PROGRAM = load_program("train/finetune_smol.py")
FinetuneConfig = PROGRAM.FinetuneConfig
SHORT = {"steps": 4, "batch_size": 2, "rank": 2, "save_steps": 2, "held_out": 2, "device": "cpu"}


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer("tiny")

    def load(name: str, dtype: str, device: str) -> Any:
        model = make_tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=1024)
        return model.to(getattr(torch, dtype)), tokenizer

    monkeypatch.setattr(PROGRAM, "load_model", load)
    monkeypatch.setattr(PROGRAM, "MAX_NEW_TOKENS", 8)


def make_trainer(**options: Any) -> Any:
    config = FinetuneConfig(**{**SHORT, **options})
    with progress_bar("", "steps", config.steps) as bar:
        return PROGRAM.make_trainer(config, bar)


def test_the_loss_is_the_mean_over_the_tokens_of_solutions(tmp_path: Path) -> None:
    trainer = make_trainer(output_dir=tmp_path, batch_size=3)
    batches = trainer.get_train_dataloader()
    inputs = next(batch for batch in batches if not batch["attention_mask"].all())
    assert (inputs["labels"] == -100).any()
    model = trainer.model.float()
    trainer.accelerator.native_amp = False
    names = ("input_ids", "attention_mask", "labels")
    with torch.no_grad():
        found = trainer.compute_loss(model, inputs)
        want = model(**{name: inputs[name] for name in names})
    torch.testing.assert_close(found, want.loss, rtol=1e-3, atol=0)


def test_rows_are_the_same_each_time_and_chains_grow() -> None:
    config = FinetuneConfig(steps=40, batch_size=2)
    rows = PROGRAM.training_rows(config)
    assert rows == PROGRAM.training_rows(config)
    lengths = [len(row["completion"][0]["content"]) for row in rows]
    assert max(lengths[:10]) < max(lengths[-20:])
    assert len(rows) == 80
    rows = PROGRAM.training_rows(FinetuneConfig(steps=40, batch_size=1, min_steps=6))
    steps = [row["completion"][0]["content"].count(" depends on ") for row in rows]
    assert (min(steps), max(steps)) == (6, 12)
    with pytest.raises(ValueError, match="min_steps"):
        PROGRAM.training_rows(FinetuneConfig(min_steps=13))


def test_an_adapter_is_trained_further(tmp_path: Path) -> None:
    first, further = tmp_path / "first", tmp_path / "further"
    PROGRAM.finetune(FinetuneConfig(output_dir=first, **SHORT))
    options = {**SHORT, "seed": 1, "steps": 2, "start_from": str(first / "adapter")}
    old = load_file(first / "adapter" / "adapter_model.safetensors")
    before = {}
    for name, parameter in make_trainer(output_dir=further, **options).model.named_parameters():
        if parameter.requires_grad:
            before[name.replace(".default", "")] = parameter.detach().cpu().bfloat16()
    assert before.keys() == old.keys()
    assert all(torch.equal(before[name], old[name]) for name in old)
    PROGRAM.finetune(FinetuneConfig(output_dir=further, **options))
    new = load_file(further / "adapter" / "adapter_model.safetensors")
    assert new.keys() == old.keys()
    assert any(not torch.equal(new[name], old[name]) for name in old)
    with pytest.raises(ValueError, match="rank 2 -> 4"):
        PROGRAM.finetune(FinetuneConfig(output_dir=first, **{**SHORT, "rank": 4}))


def test_an_adapter_to_start_from_must_be_there_and_of_that_rank(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"start_from={tmp_path}"):
        make_trainer(start_from=str(tmp_path))
    LoraConfig(r=4).save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match="rank 4"):
        make_trainer(start_from=str(tmp_path))


def test_a_run_that_was_stopped_gives_the_same_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    summary = PROGRAM.finetune(FinetuneConfig(output_dir=whole, **SHORT))
    assert {"config", "tokens", "held_out", "commit"} <= summary.keys()
    names = ["adapter_config.json", "adapter_model.safetensors", "finetuning.json"]
    assert sorted(path.name for path in (whole / "adapter").iterdir()) == names
    config = json.loads((whole / "adapter" / names[0]).read_text())
    assert config["base_model_name_or_path"] == "smollm2"
    assert read_log(whole / "log.jsonl")
    original, steps = SFTTrainer.training_step, []

    def step(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        steps.append(self.state.global_step)
        if len(steps) > 3:
            raise KeyboardInterrupt
        return original(self, *inputs, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(SFTTrainer, "training_step", step)
        with pytest.raises(KeyboardInterrupt):
            PROGRAM.finetune(FinetuneConfig(output_dir=stopped, **SHORT))
    (stopped / "checkpoint-3").mkdir()  # one that was being written
    PROGRAM.finetune(FinetuneConfig(output_dir=stopped, **SHORT))
    ours, theirs = (folder / "adapter" / names[1] for folder in (whole, stopped))
    assert ours.read_bytes() == theirs.read_bytes()
