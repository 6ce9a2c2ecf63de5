"""Whole distillation runs on the tiny model: both data sources, the export, resume, and errors in
one sentence.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.cli.train import parse_distill_config
from rlkv.gates.head_gates import HeadGates
from rlkv.tiny import draw_problem
from rlkv.training.distillation import distill_gates
from rlkv.utils.files import read_log
from tests.helpers.paths import ROOT

OPTIONS = [
    *[
        "--sink",
        "2",
        "--window",
        "6",
        "--steps",
        "4",
        "--batch_size",
        "3",
        "--forward_rows",
        "2",
        "--device",
        "cpu",
    ],
    *[
        "--dtype",
        "float32",
        "--save_steps",
        "2",
        "--learning_rate",
        "0.1",
        "--passkeys",
        "6",
        "--l1_weight",
        "0.5",
    ],
]


def write_traces(path: Path) -> Path:
    import random

    rng = random.Random(0)
    drawn = [draw_problem(rng, 4) for _ in range(5)]
    rows = [{"problem": p.problem, "answer": p.answer, "output": p.solution} for p in drawn]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def source(data: str, folder: Path) -> list[str]:
    if data == "recall":
        return []
    return ["--data", "traces", "--curriculum", str(write_traces(folder / "traces.jsonl"))]


def run(folder: Path, *options: str) -> HeadGates:
    return distill_gates(parse_distill_config([*OPTIONS, "--output_dir", str(folder), *options]))


@pytest.mark.parametrize("data", ["recall", "traces"])
def test_a_run_of_the_tiny_model(data: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    gates = run(folder, *source(data, tmp_path))
    assert HeadGates.load(folder / "gates.pt") == gates
    assert gates.alpha.shape == (4, 6)
    assert (gates.alpha < 1).any(dim=1).all()
    assert (gates.sink, gates.window, gates.deploy_sink, gates.deploy_window) == (2, 6, 16, 64)
    facts = gates.training
    assert facts["method"] == {"recall": "duo_attention", "traces": "trace_distillation"}[data]
    assert (facts["steps"], facts["l1_weight"], facts["seed"]) == (4, 0.5, 0)
    assert str(tmp_path) not in json.dumps(facts)
    records = read_log(folder / "log.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert all(record["time/step_cpu_s"] > 0 for record in records)
    assert records[-1]["gates/mean"] == pytest.approx(gates.alpha.mean().item())
    if data == "traces":  # recorded in the model's own words
        assert min(record["teacher/right"] for record in records) > 0.95
    for name in ("heat_map.png", "training_curves.png", "losses.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert {"training", "config", "versions", "hardware", "command"} <= json.loads(
        (folder / "summary.json").read_text()
    ).keys()


def test_the_loss_can_be_exchanged_and_the_method_says_so(tmp_path: Path) -> None:
    usual, other = run(tmp_path / "a"), run(tmp_path / "b", "--loss", "kl")
    assert (usual.training["loss"], other.training["loss"]) == ("distance", "kl")
    assert other.training["method"] == "duo_attention_kl"
    assert not torch.equal(usual.alpha, other.alpha)


def test_a_stopped_run_goes_on_and_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlkv.training.distillation import Distiller

    options = source("traces", tmp_path)
    whole = run(tmp_path / "whole", *options)
    step = Distiller.train_step

    def dies_at_step_3(self: Any, samples: Any) -> dict[str, float]:
        if self.step == 3:
            raise KeyboardInterrupt
        return step(self, samples)

    with monkeypatch.context() as patch:
        patch.setattr(Distiller, "train_step", dies_at_step_3)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run", *options)
    assert not (tmp_path / "run" / "gates.pt").exists()
    assert run(tmp_path / "run", *options) == whole
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2, 3, 4]
    assert (
        run(tmp_path / "run", *options) == whole
    )  # a finished run is exported again, not trained on
    with pytest.raises(ValueError, match=r"\(l1_weight 0.5 -> 0.1\)"):
        run(tmp_path / "run", *options, "--l1_weight", "0.1")
    with pytest.raises(ValueError, match="--resume"):
        run(tmp_path / "run", *options, "--resume", "false")


def test_seeds_draw_other_samples_and_gradient_checkpointing_changes_nothing(
    tmp_path: Path,
) -> None:
    first, second = run(tmp_path / "a"), run(tmp_path / "b", "--seed", "1")
    assert not torch.equal(first.alpha, second.alpha)
    again = run(tmp_path / "c", "--gradient_checkpointing", "true")
    assert torch.allclose(again.alpha, first.alpha, atol=1e-6)


def test_the_text_task_runs_with_a_haystack(tmp_path: Path) -> None:
    """A tokenizer that knows no bindings gets the task in text; here one of bytes, with a random
    model.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.helpers.models import make_tiny_model

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *letters])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
    )
    book = tmp_path / "book.txt"
    book.write_text("Call me anything you like. " * 20)
    options = [
        *OPTIONS,
        "--output_dir",
        str(tmp_path / "run"),
        "--haystack",
        str(book),
        "--passkeys",
        "1",
    ]
    options += [
        "--passkey_words",
        "2",
        "--min_length",
        "300",
        "--max_length",
        "400",
        "--steps",
        "2",
    ]
    gates = distill_gates(
        parse_distill_config(options), make_tiny_model("qwen3", vocab_size=len(vocab)), tokenizer
    )
    assert gates.training["recall_task"] == "word sequences in text"
    assert gates.model is not None
    assert gates.model.model_type == "qwen3"
    assert (gates.alpha < 1).any()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--bogus", "3"], "unknown option --bogus"),
        (["--data", "books"], "unknown --data 'books': choose one of recall, traces"),
        (["--loss", "mse"], "unknown --loss 'mse': choose one of auto, distance, kl"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--l1_weight", "-1"], "l1_weight must be 0 or more"),
        (["--learning_rate", "0"], "learning_rate above 0"),
        (["--wandb", "maybe"], "unknown --wandb"),
        (["--max_length", "10"], "max_length must be at least 1000"),
        (["--data", "traces"], "no traces: pass --curriculum FILE"),
        (
            ["--data", "traces", "--curriculum", "nowhere.parquet"],
            "nowhere.parquet: there is no such file",
        ),
        (["--curriculum", "a.parquet"], "curriculum belongs to --data traces"),
        (["--data", "traces", "--haystack", "a.txt"], "haystack belongs to --data recall"),
        (["--haystack", "a.txt"], "the tiny model reads no text"),
        (["--prefill", "half"], "unknown --prefill 'half': choose one of local, full"),
        (["--prefill", "full"], "use prefill local"),
        (
            ["--prefill", "full", "--data", "traces", "--gradient_checkpointing", "true"],
            "use prefill local",
        ),
        (["--passkeys", "40"], "passkeys must lie in [2, 16]"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_the_program_ends_with_one_sentence(
    options: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["distill_gates.py", "--output_dir", str(tmp_path / "run"), *options]
    )
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "train" / "distill_gates.py"), run_name="__main__")
    assert ended.value.code == 2
    assert named in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_help_explains_the_tasks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["distill_gates.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "train" / "distill_gates.py"), run_name="__main__")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "DuoAttention" in shown
    assert "--l1-weight" in shown


def test_traces_without_outputs_are_named(tmp_path: Path) -> None:
    for row, named in [
        ({"problem": "p", "answer": "1"}, "line 1.*output"),
        ({"problem": "p", "answer": "1", "output": " "}, "output of row 0"),
    ]:
        file = tmp_path / "a.jsonl"
        file.write_text(json.dumps(row) + "\n")
        with pytest.raises(ValueError, match=named):
            run(tmp_path / "run", "--data", "traces", "--curriculum", str(file))
    file = write_traces(tmp_path / "long.jsonl")
    with pytest.raises(ValueError, match="within max_length=5"):
        run(tmp_path / "run", "--data", "traces", "--curriculum", str(file), "--max_length", "5")


@pytest.mark.parametrize("name", ["distill_tiny", "distill_tiny_traces", "distill_llama8b"])
def test_shipped_files_are_read(name: str) -> None:
    settings = parse_distill_config(["--config", str(ROOT / "configs" / f"{name}.yaml")])
    tiny = settings.model == "tiny"
    assert (settings.sink, settings.window) == ((4, 16) if tiny else (128, 256))
    assert (settings.deploy_sink, settings.deploy_window) == ((4, 16) if tiny else (16, 64))
    assert settings.learning_rate == 0.02
    if not tiny:
        assert (settings.l1_weight, settings.steps, settings.passkeys, settings.passkey_words) == (
            0.05,
            2000,
            10,
            32,
        )
