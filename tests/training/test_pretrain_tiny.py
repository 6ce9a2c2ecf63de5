"""Pretraining: reproducible, resumable, and its closing stage masks the heads that it draws."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import get_peft_model

from rlkv.attention.head_gate import HeadGateConfig, gate_parameters
from rlkv.models.loading import load_tokenizer
from tests.helpers.programs import load_program

PROGRAM = load_program("train/pretrain_tiny.py")
SHORT = PROGRAM.PretrainConfig(steps=3, specialise_steps=2, tokens_per_step=400)


def run(checkpoint: Path, stop_after: int | None = None, **changes: int) -> dict[str, torch.Tensor]:
    tokenizer = PROGRAM.build_tokenizer()
    model = PROGRAM.build_model(tokenizer, seed=0)

    def on_step(step: int, loss: float) -> None:
        if step == stop_after:
            raise KeyboardInterrupt

    config = replace(SHORT, **{"checkpoint_every": 1, **changes})
    PROGRAM.pretrain(model, tokenizer, config, on_step, checkpoint)
    return model.state_dict()


def test_the_packaged_model_is_not_replaced_by_another() -> None:
    PROGRAM.PretrainConfig().check()
    with pytest.raises(ValueError, match="holds a model that these options do not make"):
        SHORT.check()
    with pytest.raises(ValueError, match="--checkpoint-every must be at least 1"):
        PROGRAM.PretrainConfig(checkpoint_every=0).check()


@pytest.mark.parametrize("stop_after", [1, 3])
def test_checkpoints_and_stops_do_not_change_the_weights(tmp_path: Path, stop_after: int) -> None:
    whole = run(tmp_path / "undisturbed.pt", checkpoint_every=100)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "checkpoint.pt", stop_after)
    resumed = run(tmp_path / "checkpoint.pt")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_packaged_tokenizer_is_the_one_that_is_built() -> None:
    packaged = load_tokenizer("tiny")
    built = PROGRAM.build_tokenizer()
    assert packaged.get_vocab() == built.get_vocab()
    assert packaged.chat_template == built.chat_template
    assert packaged.padding_side == built.padding_side == "left"


def test_labels_cover_the_solution_only() -> None:
    tokenizer = PROGRAM.build_tokenizer()
    ids, labels = PROGRAM.encode_batch(tokenizer, random.Random(0), num_definitions=4, rows=3)
    first = int((labels[0] != -100).nonzero()[0])
    assert tokenizer.decode(ids[0, first - 1]) == "<assistant>"
    assert torch.equal(ids[:, first:], labels[:, first:])
    assert (labels[:, -1] == tokenizer.eos_token_id).all()


def test_closing_stage_masks_the_drawn_heads() -> None:
    """All full: the stock model.  All of LOCAL_HEADS local: the trainer's gates at 0 there."""
    tokenizer = PROGRAM.build_tokenizer()
    model = PROGRAM.build_model(tokenizer, seed=0).eval()
    ids, _ = PROGRAM.encode_batch(tokenizer, random.Random(1), num_definitions=6, rows=2)
    with torch.no_grad():
        stock = model(input_ids=ids).logits
        heads = PROGRAM.LocalHeads(model)
        none_local = model(input_ids=ids).logits
        for layer, head in PROGRAM.LOCAL_HEADS:
            heads.is_local[layer, head] = True
        all_local = model(input_ids=ids).logits
        heads.remove()
        gated = get_peft_model(model, HeadGateConfig(sink=4, window=16))
        gates = [gate for _, gate in gate_parameters(gated)]
        for layer, head in PROGRAM.LOCAL_HEADS:
            gates[layer][head] = 0.0
        expected = gated(input_ids=ids).logits
    torch.testing.assert_close(none_local, stock, atol=1e-5, rtol=0)
    torch.testing.assert_close(all_local, expected, atol=1e-5, rtol=0)
    assert (all_local - stock).abs().max() > 1e-3


def test_learning_rate_and_curriculum() -> None:
    config = PROGRAM.PretrainConfig()
    assert config.lr_scale(0) == pytest.approx(1 / PROGRAM.WARMUP_STEPS)
    assert config.lr_scale(config.steps) == pytest.approx(PROGRAM.SPECIALISE_LR)
    assert config.lr_scale(config.total_steps) == pytest.approx(0, abs=1e-9)
    assert [config.longest_chain(step) for step in (0, 500, 1000, 2000, 3999)] == [5, 8, 14, 25, 25]


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "checkpoint.pt", stop_after=1)
    with pytest.raises(ValueError, match=r"checkpoint.pt is of --steps 3 .*--work-dir"):
        run(tmp_path / "checkpoint.pt", steps=2)
