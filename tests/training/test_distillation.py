"""Distillation: losses against their formulas, the optimizer step, and whole runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import rlkv
from rlkv.attention.head_gate import HeadGateConfig, gates_matrix, set_gates
from rlkv.cli.train import parse_distill_config
from rlkv.gates.head_gates import HeadGates
from rlkv.training.config import DistillSettings
from rlkv.training.distillation import (
    Distiller,
    count_right,
    distill_gates,
    distill_traces,
    kl_of_states,
    lr_factor,
    squared_distance,
)
from rlkv.training.solutions import TraceLoss, check_head
from rlkv.utils.files import read_log
from tests.helpers.families import make_family
from tests.helpers.models import build_tokenizer, make_tiny_model
from tests.training.conftest import random_texts

HYBRIDS = ["gemma3_text", "qwen3_5_text", "falcon_h1"]
LENGTHS = [(24, 30), (30, 37), (36, 44)]  # tokens of prompts and whole texts


def make_distiller(loss: str, family: str = "llama", **options: Any) -> Distiller:
    made = make_family(family) if family in HYBRIDS else make_tiny_model(family)
    model = get_peft_model(made, HeadGateConfig(sink=2, window=5))
    defaults = {"steps": 10, "learning_rate": 0.05, "l1_weight": 0.05, "forward_rows": 4}
    return Distiller(model, DistillSettings(loss=loss, **{**defaults, **options}))


# --- losses


def test_the_distance_per_token() -> None:
    torch.manual_seed(0)
    full, mixed = torch.randn(2, 7, 12, dtype=torch.float64)
    found = squared_distance(mixed, full)
    assert torch.allclose(found, ((full - mixed) ** 2).sum(-1) / 12, rtol=1e-12)
    assert squared_distance(mixed.bfloat16(), full.bfloat16()).dtype == torch.float32


def test_kl_in_pieces_has_the_same_value_and_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 20).double().requires_grad_(False)
    full, mixed = torch.randn(2, 10, 8, dtype=torch.float64)
    mixed.requires_grad_()
    p, q = head(full).softmax(-1), head(mixed).softmax(-1)
    whole = (p * (p / q).log()).sum(-1)
    weight = torch.rand(10, dtype=torch.float64)
    (expected,) = torch.autograd.grad(whole @ weight, mixed)
    monkeypatch.setattr("rlkv.training.distillation.TOKENS_AT_ONCE", 3)
    pieces = kl_of_states(head, mixed, full)
    (found,) = torch.autograd.grad(pieces @ weight, mixed)
    assert torch.allclose(pieces, whole, rtol=1e-12)
    assert torch.allclose(found, expected, rtol=1e-12)
    assert kl_of_states(head, full, full).abs().max() < 1e-15
    assert count_right(head, full, head(full).argmax(-1)) == 10


def test_the_learning_rate_rises_and_falls_by_a_fifth() -> None:
    factors = [lr_factor(step, 2000) for step in range(2000)]
    assert factors[0] == factors[39] == factors[-1] == 0.1  # 0.002 of 0.02, as in the paper
    assert factors[199] == factors[1800] == pytest.approx(0.5)
    assert set(factors[399:1601]) == {1.0}
    assert [lr_factor(step, 2) for step in range(2)] == [1.0, 1.0]


# --- the optimizer step


@pytest.mark.parametrize("loss", ["distance", "kl"])
def test_gates_move_and_nothing_else(loss: str, family: str) -> None:
    distiller = make_distiller(loss, family, learning_rate=0.3, l1_weight=2.0)
    named = dict(distiller.model.named_parameters())
    assert all(p.requires_grad == ("rlkv_gate" in name) for name, p in named.items())
    frozen = {name: p.clone() for name, p in named.items() if not p.requires_grad}
    records = [distiller.train_step(random_texts(LENGTHS, seed)) for seed in range(4)]
    alpha = gates_matrix(distiller.model)
    assert (alpha != 1).any(dim=1).all()
    assert alpha.min() >= 0
    assert alpha.max() <= 1
    assert all(torch.equal(named[name], before) for name, before in frozen.items())
    assert records[0]["loss/distill"] < 1e-9  # gates of 1 are full attention
    assert records[-1]["loss/distill"] > 0
    assert records[-1]["gates/mean"] == pytest.approx(alpha.mean().item())
    assert distiller.gate_mean.mean().mean() > alpha.mean()


@pytest.mark.parametrize("prefill", ["full", "local"])
@pytest.mark.parametrize("name", ["llama", *HYBRIDS])
def test_at_gates_of_0_and_1_it_is_the_loss_of_the_elimination(name: str, prefill: str) -> None:
    samples = random_texts(LENGTHS, vocabulary=64)
    distiller = make_distiller("kl", name, data="traces", prefill=prefill, l1_weight=0.0)
    generator = torch.Generator().manual_seed(3)
    full_LH = torch.rand(gates_matrix(distiller.model).shape, generator=generator) > 0.4
    total = 0.0
    for sample in samples:
        loss = TraceLoss(distiller.model, [sample], 1, prefill)
        total += math.expm1(loss.of(full_LH))
    set_gates(distiller.model, full_LH.float())
    record = distiller.train_step(samples)
    answers = sum(len(sample.answers) for sample in samples) - (3 if prefill == "full" else 0)
    assert record["tokens/answers"] == answers
    assert record["loss/distill"] == pytest.approx(total / answers, rel=1e-4)
    assert record["gates/grad_norm"] > 0


@pytest.mark.parametrize("loss", ["distance", "kl"])
def test_the_gradient_is_that_of_the_formula(loss: str) -> None:
    """Row by row without padding, with the model's own logits and hidden states."""
    distiller = make_distiller(loss, l1_weight=0.3)
    samples = random_texts(LENGTHS)
    start = torch.rand(3, 4, generator=torch.Generator().manual_seed(2)) * 0.8 + 0.1
    set_gates(distiller.model, start)
    total, tokens = torch.zeros(()), 0
    for sample in samples:
        ids = torch.tensor([sample.ids])
        before = torch.tensor(sample.answers) - 1
        mixed = distiller.model(ids, output_hidden_states=True)
        with torch.no_grad(), distiller.model.disable_adapter():
            full = distiller.model(ids, output_hidden_states=True)
        if loss == "kl":
            p, q = full.logits[0, before].softmax(-1), mixed.logits[0, before].softmax(-1)
            total = total + (p * (p / q).log()).sum()
        else:
            difference = full.hidden_states[-1][0, before] - mixed.hidden_states[-1][0, before]
            total = total + (difference**2).mean(-1).sum()
        tokens += len(before)
    whole = total / tokens + 0.3 * torch.cat(distiller.gates).mean()
    expected = torch.autograd.grad(whole, distiller.gates)
    found: list[torch.Tensor] = []
    distiller.optimizer.register_step_pre_hook(
        lambda *_: found.extend(gate.grad.clone() for gate in distiller.gates)
    )
    record = distiller.train_step(samples)
    assert record["loss/distill"] == pytest.approx(total.item() / tokens, rel=1e-4)
    for mine, naive in zip(found, expected, strict=True):
        # float32 through three layers; the KL of close distributions loses digits
        assert torch.allclose(mine, naive, rtol=2e-3, atol=1e-6)


def test_logits_that_are_changed_after_the_head_are_refused() -> None:
    check_head(make_tiny_model("llama"), range(3, 20))
    with pytest.raises(ValueError, match="--data recall"):
        check_head(make_tiny_model("granite"), range(3, 20))
    with pytest.raises(ValueError, match="does not name its decoder"):
        check_head(make_family("llama4_text"), range(3, 20))


def test_gradients_that_are_not_finite_end_the_run_and_leave_the_gates() -> None:
    distiller = make_distiller("distance")
    before = gates_matrix(distiller.model).clone()
    distiller.base.get_decoder().layers[0].mlp.down_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="gradients of step 1 are not finite"):
        distiller.train_step(random_texts(LENGTHS[:2]))
    assert torch.equal(gates_matrix(distiller.model), before)


# --- whole runs of the tiny model

OPTIONS = """--sink 2 --window 6 --steps 4 --batch-size 3 --forward-rows 2 --device cpu
    --dtype float32 --save-steps 2 --learning-rate 0.1 --l1-weight 0.5"""


def run(folder: Path, *options: str) -> HeadGates:
    words = [*OPTIONS.split(), "--output-dir", str(folder), *options]
    return distill_gates(parse_distill_config(words))


def test_another_loss_changes_the_gates_and_gradient_checkpointing_does_not(
    tmp_path: Path,
) -> None:
    usual = run(tmp_path / "usual")
    kl = run(tmp_path / "kl", "--loss", "kl")
    assert (usual.training["loss"], kl.training["loss"]) == ("distance", "kl")
    assert kl.training["method"] == "duo_attention_kl"
    assert not torch.equal(usual.alpha, kl.alpha)
    again = run(tmp_path / "checkpointing", "--gradient-checkpointing")
    assert torch.allclose(again.alpha, usual.alpha, atol=1e-6)


def test_a_model_s_own_dropout_is_off(tmp_path: Path) -> None:
    words = [*OPTIONS.split(), "--data", "traces", "--curriculum", "c", "--steps", "1"]
    words += ["--gradient-checkpointing", "--output-dir", str(tmp_path)]
    model = make_tiny_model("phi", resid_pdrop=0.3)
    distill_traces(parse_distill_config(words), random_texts(LENGTHS), model)
    # all gates begin at 1, the unchanged model
    (record,) = read_log(tmp_path / "log.jsonl")
    assert record["loss/distill"] < 1e-6


def test_a_stopped_run_goes_on_and_ends_the_same(
    curriculum: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = ["--data", "traces", "--curriculum", str(curriculum)]
    whole = run(tmp_path / "whole", *traces)
    step = Distiller.train_step
    folder = tmp_path / "run"

    def dies_at_step_3(self: Any, samples: Any) -> dict[str, float]:
        if self.step == 3:
            raise KeyboardInterrupt
        return step(self, samples)

    with monkeypatch.context() as patch:
        patch.setattr(Distiller, "train_step", dies_at_step_3)
        with pytest.raises(KeyboardInterrupt):
            run(folder, *traces)
    assert not (folder / "gates.pt").exists()
    for _ in range(2):  # a finished run is exported again, not trained on
        assert run(folder, *traces) == HeadGates.load(folder / "gates.pt") == whole
        assert [record["step"] for record in read_log(folder / "log.jsonl")] == [1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"\(l1_weight 0.5 -> 0.1\)"):
        run(folder, *traces, "--l1-weight", "0.1")
    with pytest.raises(ValueError, match="--resume"):
        run(folder, *traces, "--no-resume")


def test_the_text_task_runs_with_a_haystack(tmp_path: Path) -> None:
    """A tokenizer that knows no bindings gets the task in text: here one of bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *letters])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
    )
    book = tmp_path / "book.txt"
    book.write_text("Call me anything you like. " * 20)
    short = "--passkeys 1 --passkey-words 2 --min-length 300 --max-length 400 --steps 2"
    folder = ["--haystack", str(book), "--output-dir", str(tmp_path / "run")]
    settings = parse_distill_config([*OPTIONS.split(), *short.split(), *folder])
    gates = distill_gates(settings, make_tiny_model("qwen3", vocab_size=len(vocab)), tokenizer)
    assert gates.training["recall_task"] == "word sequences in text"
    assert (gates.alpha < 1).any()
    few = make_tiny_model("qwen3", vocab_size=len(vocab), max_position_embeddings=399)
    settings = replace(settings, output_dir=str(tmp_path / "other"))
    with pytest.raises(ValueError, match="up to 400 tokens, the model has 399 positions"):
        distill_gates(settings, few, tokenizer)


EMPTY = {"problem": "p", "answer": "1"}


@pytest.mark.parametrize(
    ("options", "row", "named"),
    [
        ("--data traces", None, "no traces: pass --curriculum FILE"),
        ("--data traces --curriculum nowhere.parquet", None, "nowhere.parquet: there is no such"),
        ("--haystack a.txt", None, "the tiny model reads no text"),
        ("--passkey-words 4", None, "--passkey-words 4: the tiny model reads no text"),
        ("--template plain", None, "template='plain' has no effect without --data traces"),
        ("--passkeys 40", None, r"passkeys must lie in \[2, 16\]"),
        ("--data traces", EMPTY, "line 1.*output"),
        ("--data traces", {**EMPTY, "output": " "}, "output of row 1 "),
        ("--data traces --max-length 5", {**EMPTY, "output": "a=1"}, "within max_length=5"),
    ],
)
def test_data_that_do_not_fit_are_refused_before_anything_is_written(
    options: str, row: dict[str, str] | None, named: str, tmp_path: Path
) -> None:
    words = options.split()
    if row is not None:
        (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
        words += ["--curriculum", str(tmp_path / "a.jsonl")]
    with pytest.raises(ValueError, match=named):
        run(tmp_path / "run", *words)
    assert not (tmp_path / "run").exists()


def test_a_hybrid_trains_and_exports_the_gates_of_its_full_layers(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "num_hidden_layers": 4}
    kinds = ["sliding_attention", "full_attention"] * 2
    model = make_family("olmo3", layer_types=kinds, **sizes)
    settings = parse_distill_config([*OPTIONS.split(), "--output-dir", str(tmp_path)])
    gates = distill_gates(settings, model, tokenizer)
    assert gates.heads == (0, 2, 0, 2)
    assert bool((gates.alpha[[0, 2]] == 1).all())
    assert bool((gates.alpha[[1, 3]] < 1).any())
    final = gates.training["final"]["gates/mean"]
    assert final == pytest.approx(gates.alpha[gates.gated].mean().item())
    assert read_log(tmp_path / "log.jsonl")[-1]["gates/mean"] == pytest.approx(final)
    assert not list(tmp_path.glob("*.tsv"))
    for name in ("gates.pt", "gates.safetensors", "adapter"):
        assert HeadGates.load(tmp_path / name) == gates
    with rlkv.compress(model, tmp_path, sparsity=0.5) as session:
        model.generate(torch.randint(3, 20, (1, 30)), max_new_tokens=4, do_sample=False)
        assert session.allocation.num_compressible == 2
