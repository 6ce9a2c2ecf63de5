"""rlkv-infer with eviction on files of problems and in chats, and with published gates."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from rlkv import tiny
from rlkv.eviction import TOVA
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.engine import Chat, InferenceEngine
from rlkv.inference.session import InferConfig
from rlkv.models.shape import ModelShape
from rlkv.rollout.base import SamplingParams
from tests.helpers.infer import infer

PROBLEM = "a=7 . b=2 . c = b + a . d = c - b . e = d + a . f = e - c . g = f + a . find g ?"


def run(*arguments: object) -> None:
    infer(*arguments, "--model", "tiny", "--max-new-tokens", 80)


def test_a_file_is_not_resumed_under_another_policy(tmp_path: Path) -> None:
    problems, answers = tmp_path / "problems.jsonl", tmp_path / "answers.jsonl"
    problems.write_text(json.dumps({"problem": PROBLEM, "answer": "1"}) + "\n")
    files = ("--input", str(problems), "--output", str(answers))
    policy = ("--eviction", "tova", "--eviction-option", "buffer=4")
    run(*files, *policy, "--budget", "30")
    before = answers.read_bytes()
    with pytest.raises(ValueError, match=r"\(eviction\.budget\).* 30\b.* 31\b"):
        run(*files, *policy, "--budget", "31")
    assert answers.read_bytes() == before
    run(*files, *policy, "--budget", "30")


def test_a_chat_evicts_from_turn_to_turn() -> None:
    model, tokenizer = tiny.load()
    allocation = HeadAllocation(torch.zeros(4, 6, dtype=torch.bool))
    engine = InferenceEngine(model, tokenizer, allocation, eviction=TOVA(budget=20, buffer=4))
    chat = Chat(engine, SamplingParams(max_new_tokens=40))
    for _ in range(3):
        reply = chat.say(PROBLEM)
        assert 20 <= int(reply.cache.state.row_counts.held[0]) < 24
        assert reply.usage.kv_bytes == reply.cache.used_nbytes() < reply.usage.kv_bytes_full
    assert reply.cache.get_seq_length() > 150
    assert chat.restarted == 0


def test_published_gates_with_eviction(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    gates = tmp_path / "full_attention_heads.tsv"  # DuoAttention's format: one line per layer
    alpha = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    gates.write_text(
        "\n".join("\t".join(f"{value:.4f}" for value in row) for row in alpha.tolist()) + "\n"
    )
    options = (
        "--eviction",
        "rkv",
        "--budget",
        "24",
        "--eviction-option",
        "buffer=4",
        "--sparsity",
        "0.5",
    )
    run("--gates", str(gates), *options, "--prompt", PROBLEM)
    assert "12 full, 12 compressible (rkv)" in capsys.readouterr().err


@pytest.mark.parametrize("compare", [(), ("--compare-full",)])
def test_gates_and_policy(
    tmp_path: Path, compare: tuple[str, ...], capsys: pytest.CaptureFixture
) -> None:
    model, _ = tiny.load()
    path = tmp_path / "gates.pt"
    alpha = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    HeadGates(alpha, model=ModelShape.from_config(model.config, "tiny")).save(path)
    options = ("--eviction", "h2o", "--budget", "24", "--sparsity", "0.25")
    run("--gates", str(path), *options, "--prompt", PROBLEM, *compare)
    assert "18 full, 6 compressible (h2o)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--eviction", "rvk", "--budget", "64"], "'rvk'"),
        (["--eviction", "rkv", "--budget", "4"], "budget is 4"),
        (["--eviction", "rkv", "--budget", "-1"], "budget is -1"),
        (["--eviction", "rkv"], "either a budget"),
        (["--eviction", "rkv", "--ratio", "1.5"], "ratio is 1.5"),
        (["--eviction", "rkv", "--budget", "64", "--ratio", "0.5"], "both are given"),
        (["--eviction", "rkv", "--budget", "64", "--eviction-option", "variant"], "name=value"),
        (["--eviction", "rkv", "--budget", "64", "--eviction-option", "size=3"], "no option size"),
        (["--eviction", "rkv", "--budget", "64", "--sparsity", "0.5"], "--sparsity"),
        (["--eviction", "rkv", "--budget", "64", "--sink", "4"], "--sink"),
        (
            ["--eviction", "sink_window", "--budget", "20", "--eviction-option", "window=30"],
            "window",
        ),
        (["--budget", "64"], "--budget, --ratio and --eviction-option"),
        (
            ["--eviction", "rkv", "--budget", "64", "--eviction-option", "budget=5"],
            "budget is given",
        ),
        (
            ["--eviction", "rkv", "--budget", "64", "--eviction-option", "lam=0.2", "lam=0.2"],
            "option lam",
        ),
        (["--eviction", "rkv", "--budget", "64", "--eviction-option", "lam=abc"], "lam is abc"),
        (
            ["--eviction", "rkv", "--budget", "64", "--eviction-option", "kernel=3.0"],
            "kernel is 3.0",
        ),
        (
            ["--eviction", "rkv", "--budget", "64", "--eviction-option", "protect_prompt=2"],
            "protect_prompt is 2",
        ),
        (["--eviction", "rpc", "--eviction-option", "P=100.5"], "P is 100.5"),
        (["--eviction", "rpc", "--eviction-option", "c=NaN"], "c is nan"),
        (["--eviction", "rpc", "--eviction-option", "R=[1]"], "R is [1]"),
        (["--eviction", "rpc", "--budget", "64", "--eviction-option", "P=512"], "rpc: P"),
        (["--eviction", "rpc", "--eviction-option", "buffer=3"], "buffer is 3"),
        (["--eviction", "sink_window", "--eviction-option", "window=abc"], "window is abc"),
        (
            ["--eviction", "random", "--budget", "64", "--eviction-option", "seed=1.5"],
            "seed is 1.5",
        ),
    ],
)
def test_bad_options_are_one_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(message)
    ):  # the entry point prints it and exits with 2
        run("--prompt", PROBLEM, *arguments)


@pytest.mark.parametrize(("text", "value"), [("False", False), ("true", True)])
def test_truth_values_are_read_as_such(text: str, value: bool) -> None:
    policy = InferConfig(
        eviction="random", budget=64, eviction_option=(f"protect_prompt={text}",)
    ).policy()
    assert policy is not None
    assert policy.protect_prompt is value
