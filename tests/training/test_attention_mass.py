"""Scores by attention: against explicit weights, and whole runs of the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlkv import tiny
from rlkv.attention.call import MixedCall
from rlkv.attention.softmax import Softmax
from rlkv.data.recall import MarkedText
from rlkv.evaluation.run_page import write_training_page
from rlkv.gates.head_gates import HeadGates
from rlkv.models.layout import Layout
from rlkv.training import attention_mass
from rlkv.training.attention_mass import mass_of_call, outside_mass, score_heads
from rlkv.training.run_folder import RunLogs
from rlkv.training.solutions import draw_traces, hard_masks, read_traces
from tests.helpers.families import make_family
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.models import make_tiny_model
from tests.training.conftest import finder_options, random_texts

SINK, WINDOW = 2, 5
# tokens of prompts and whole texts: prompts are padded on the left, solutions on the right; the
# last text is covered by sinks and window
LENGTHS = [(9, 43), (1, 38), (17, 20), (3, 7)]


def explicit(model: PreTrainedModel, text: MarkedText) -> Tensor:
    """Score heads, ``[L, H]``, by the whole attention weights of one text, token by token."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.tensor([text.ids]), output_attentions=True).attentions
    model.set_attn_implementation(before)
    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    layers = []
    for weights_1PTT in weights:
        masses = []
        for query in text.answers[:-1]:  # the last token predicts nothing
            first_seen = max(SINK, query - WINDOW + 1)
            of_heads = weights_1PTT[0, :, query, SINK:first_seen].sum(-1)
            masses.append(of_heads.view(-1, groups).max(dim=1).values)
        mass_QH = torch.stack(masses)
        layers.append(mass_QH.max(dim=0).values)
    return torch.stack(layers)


def measured(model: PreTrainedModel, chosen: list[MarkedText]) -> Tensor:
    with hard_masks(model, SINK, WINDOW) as gated:
        return outside_mass(gated, chosen, SINK, WINDOW)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "granite", "gemma2", "gpt_oss"])
def test_scores_are_those_of_explicit_attention_weights(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batched and padded, in blocks of a few queries, against single texts in eager attention."""
    model = make_tiny_model(name)
    before = model.config._attn_implementation
    expected = torch.stack([explicit(model, text) for text in random_texts(LENGTHS)])
    found = measured(model, random_texts(LENGTHS))
    assert found.shape == (4, 3, 4)
    assert torch.allclose(found, expected, atol=2e-6)  # sums of 43 weights in float32
    assert expected[:3].max() > 0.3
    assert not found[3].any()
    monkeypatch.setattr(attention_mass, "SCORES_AT_ONCE", 4 * 8 * 51 * 3)  # three queries
    assert torch.allclose(measured(model, random_texts(LENGTHS)), found, atol=1e-6)
    assert model.config._attn_implementation == before
    assert not any("rlkv_gate" in module for module, _ in model.named_modules())


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text", "falcon_h1"])
def test_scores_on_hybrids(family: str) -> None:
    """Only layers with gates have scores; prompts in full go through the other layers too."""
    model = make_family(family)
    chosen = random_texts(LENGTHS, vocabulary=64)
    found = measured(model, chosen)
    gated = Layout.from_config(model.config).gated
    for text, score_LH in zip(chosen, found, strict=True):
        weights = explicit(model, text)  # of layers with attention
        assert torch.allclose(score_LH[gated], weights[-len(gated) :], atol=5e-6)
    assert found[:3, gated].max() > 0.2
    others = sorted(set(range(found.shape[1])) - set(gated))
    assert (found[:, others] == 1).all()


def test_scores_in_bfloat16_are_near_those_in_float32() -> None:
    model = make_tiny_model("llama")
    expected = measured(model, random_texts(LENGTHS))
    found = measured(model.bfloat16(), random_texts(LENGTHS))
    assert found.dtype == torch.float32
    # states of 8 bits move the softmax of single queries, and with it the largest mass
    assert torch.allclose(found, expected, atol=0.05)


def test_scores_of_a_long_text_are_never_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_mass, "SCORES_AT_ONCE", 2**16)
    tokens = 600
    torch.manual_seed(0)
    query = torch.randn(2, 8, tokens, 16)
    key = torch.randn(2, 4, tokens, 16)
    call = MixedCall(
        batch_size=2,
        q_length=tokens,
        kv_length=tokens,
        q_offset=0,
        padding_BK=None,
        causal=True,
        make_stock_mask=lambda: None,
    )
    with LiveBytes() as live:
        mass_BHQ = mass_of_call(query, key, call, SINK, WINDOW, Softmax(0.25))
    assert mass_BHQ.shape == (2, 4, tokens)
    assert live.peak < 8 * 4 * 2**16  # a few copies of a block; all scores at once: 23 MB


# --- whole runs of the tiny model


def run(folder: Path, curriculum: Path, *model: Any, **other: object) -> HeadGates:
    given = {"finder": "attention", "curriculum": curriculum, "elimination_traces": 5}
    return score_heads(*finder_options(**given, output_dir=folder, **other), *model)


def test_a_run_exports_scores(
    curriculum: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    model, tokenizer = tiny.load()
    folder = tmp_path / "run"
    options = {"forward_rows": 2, "l1_beta": 0.3, "wandb": "offline", "top_p": 0.9}
    options["warmup_steps"] = 2
    gates = run(folder, curriculum, model, tokenizer, **options)
    assert list((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    for name in ("gates.pt", "gates.safetensors", "adapter"):
        assert HeadGates.load(folder / name) == gates
    assert HeadGates.load(folder / "adapter_weights.tsv").alpha.equal(gates.alpha)
    traces, _ = draw_traces(read_traces(str(curriculum), tokenizer, "rlkv"), 5, seed=0)
    with hard_masks(model, 4, 16) as gated:
        expected = outside_mass(gated, traces, 4, 16).mean(0)
    assert torch.allclose(gates.alpha, expected, atol=1e-6)  # whatever the batches
    assert gates.alpha.std() > 0.001
    assert (gates.sink, gates.window, gates.deploy_sink, gates.deploy_window) == (4, 16, 4, 16)
    logs = RunLogs.read(folder)
    assert logs.finished
    assert [record["step"] for record in logs.records] == [1, 2, 3]
    assert torch.tensor(logs.gates[-1]["alpha"]).equal(gates.alpha)
    told = json.loads((folder / "summary.json").read_text())
    for name, total in (("time/step_s", "seconds"), ("time/step_cpu_s", "cpu_seconds")):
        spent = sum(record[name] for record in logs.records)
        assert told["training"][total] == pytest.approx(spent, abs=1e-3)
    told_of = capsys.readouterr().out
    assert "heads are measured with" not in told_of
    unread = told_of.partition("does not read ")[2].partition(" (")[0].split(", ")
    assert {"l1_beta", "max_steps", "top_p", "warmup_steps"} <= set(unread)
    assert not {"sink", "window", "elimination_traces", "epsilon", "output_dir"} & set(unread)
    # the same command measures again, other settings are refused
    assert run(folder, curriculum, forward_rows=2).alpha.equal(gates.alpha)
    assert len(RunLogs.read(folder).records) == 3
    with pytest.raises(ValueError, match=r"window \d+ -> 9"):
        run(folder, curriculum, window=9)
    run(tmp_path / "other", curriculum, window=9)
    sizes = "heads are measured with sink and window (4, 9), and their gates file asks for (4, 16)"
    assert sizes in capsys.readouterr().out


def test_a_run_on_a_hybrid(curriculum: Path, tmp_path: Path) -> None:
    _, tokenizer = tiny.load()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    model = make_family("qwen3_5_text", **sizes)
    gates = run(tmp_path / "run", curriculum, model, tokenizer, forward_rows=2)
    assert gates.layers == [3]
    assert gates.alpha[3].std() > 0.001
    assert HeadGates.load(tmp_path / "run" / "gates.pt") == gates
    logs = RunLogs.read(tmp_path / "run")
    mean = gates.alpha[3].mean().item()
    assert logs.records[-1]["gates/mean"] == pytest.approx(mean)
    # the page of the run shows the layers with gates alone
    page = tmp_path / "page.html"
    write_training_page(tmp_path / "run", page)
    shown = page.read_text()
    assert "layer 3" in shown
    assert "layer 2" not in shown


def test_sizes_that_cover_all_solutions_are_named(curriculum: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sink 4 and window 2000 cover the longest of the 5 sol"):
        run(tmp_path / "run", curriculum, window=2000)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("gpt2", "no layer with full attention"),
        ("deepseek_v3", "latent"),
        ("jamba", "does not go on from a cached prompt"),
        ("minimax", "a cache class of its own"),
    ],
)
def test_models_whose_attention_is_another_are_refused(
    family: str, named: str, curriculum: Path, tmp_path: Path
) -> None:
    _, tokenizer = tiny.load()
    model = make_family(family, vocab_size=len(tokenizer))
    with pytest.raises(ValueError, match=named):
        run(tmp_path / "run", curriculum, model, tokenizer)
    assert not (tmp_path / "run").exists()
    assert not any("rlkv_gate" in name for name, _ in model.named_modules())
