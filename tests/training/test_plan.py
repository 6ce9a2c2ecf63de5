"""What a training says before it begins: --plan, the engine, and sizes that fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from rlkv.attention.call import LocalSizes
from rlkv.attention.head_gate import HeadGateConfig
from rlkv.benchmarks.turns import LlamaSizes
from rlkv.cli.train import parse_config
from rlkv.rollout.footprint import CARDS, GIB, Footprint
from rlkv.training.grpo import prompt_tokens
from rlkv.training.plan import (
    Machine,
    Plan,
    describe_plan,
    make_plan,
    update_memory,
)
from rlkv.training.trainer import completion_logprobs
from tests.helpers.families import make_config
from tests.helpers.installed import CPU_BUILD, pretend_vllm
from tests.helpers.live_bytes import LiveBytes


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_vllm(monkeypatch, CPU_BUILD)


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_vllm(monkeypatch, None)


def plan(
    *options: str,
    config: str = "llama8b",
    gib: float | None = 80,
    processes: int = 1,
    rows: list[dict[str, Any]] | None = None,
) -> Plan:
    settings, args = parse_config(["--config", config, "--use-cpu", *options])
    machine = Machine(processes, None, None)
    if gib is not None:
        machine = Machine(processes, CARDS["h100"], int(gib * GIB))
    return make_plan(settings, args, machine, rows)


def page(*options: str) -> dict[str, str]:
    """Return the lines that ``--plan`` prints by their first words."""
    settings, args = parse_config([*options, "--use-cpu", "--plan"])
    text = describe_plan(settings, args, prompt_tokens(settings, args))
    return {line.split()[0]: line for line in text.splitlines()}


def test_rollouts_that_several_updates_use() -> None:
    rows = [{"problem": "p", "answer": "1", "output_tokens": 100}] * 200
    options = ("--max-steps", "-1", "--num-train-epochs", "2", "--prompts-per-step", "16")
    once = plan(*options, rows=rows)
    twice = plan(*options, "--num-iterations", "2", rows=rows)
    assert (once.steps, twice.steps) == (24, 48)
    assert twice.seconds[0] == pytest.approx(once.seconds[0] / 2)
    assert twice.seconds[1] == once.seconds[1]
    # an epoch leaves out what fills no rollout: 24 of 216 problems, of which 16 would be a step
    two_steps = ("--per-device-train-batch-size", "64", "--steps-per-generation", "2")
    assert plan(*options, *two_steps, rows=[*rows, *rows[:16]]).steps == 24
    # 8 processes make a step of 16 prompts in one pass, so two passes read 32 of 40 problems
    spread = ("--per-device-train-batch-size", "8", "--steps-per-generation", "2")
    assert plan(*options, *spread, processes=8, rows=rows[:40]).steps == 4


def test_a_plan_counts_no_held_out_problem_nor_its_copies() -> None:
    rows = [{"problem": f"p {number}", "answer": "1"} for number in range(40)]
    options = ("--max-steps", "-1", "--num-train-epochs", "1", "--prompts-per-step", "4")
    held = ("--held-out", "8", "--target-sparsity", "0.5")
    assert plan(*options, rows=rows).steps == 10
    assert plan(*options, *held, rows=rows).steps == 8
    twice = plan(*options, *held, rows=rows * 2)  # 8 of 80, of which 16 have a copy or are one
    assert twice.problems is not None
    assert 64 <= twice.problems < 72


def test_a_plan_says_where_the_problems_come_from() -> None:
    assert "problems of the built-in task" in page("--config", "tiny")["curriculum"]
    line = page("--config", "tiny", "--model", "smol")["curriculum"]
    assert "none: pass --curriculum FILE, which rlkv-filter --model smol writes" in line


def test_a_plan_needs_no_hub_gpu_or_curriculum(tmp_path: Path, without_vllm: None) -> None:
    """What it says of 8 GPUs is recorded in tests/golden."""
    lines = page("--config", "llama8b", "--dtype", "auto")
    assert "1 x h100" in lines["machine"]
    assert "15.0 GiB of weights" in lines["memory"]  # bfloat16, whatever auto is here
    # 4,608 tokens of 128 KiB, 576 MiB; half of the heads keep 80 of them
    assert "576 MiB at 0, " in lines["serving"]
    assert "293 MiB at 0.5" in lines["serving"]
    assert not any(tmp_path.iterdir())
    assert "time" not in page("--config", "tiny")


def test_the_plan_of_a_hybrid_counts_layers_with_gates(tmp_path: Path, without_vllm: None) -> None:
    make_config("gemma3_text", num_hidden_layers=12).save_pretrained(tmp_path / "model")
    found = page("--config", "llama8b", "--model", str(tmp_path / "model"))["serving"]
    # 4,608 tokens of 4 heads, 32 bytes each in bfloat16; at 0.5 two of them keep 80 tokens
    assert "in the layers with gates: 0.6 MiB at 0, " in found
    assert "0.3 MiB at 0.5" in found


@pytest.mark.parametrize("name", ["llama8b", "qwen7b", "qwen3_4b"])
def test_big_configs_use_vllm_where_it_is_installed(name: str, with_vllm: None) -> None:
    found = plan(config=name)
    settings = found.settings
    model = found.footprint
    assert settings.rollout == "vllm"
    assert model is not None
    assert settings.rollout_kv_gib is not None
    assert settings.rollout_rows is not None
    assert 32 < settings.rollout_rows <= 128  # all of a step's at most
    assert settings.rollout_rows * 4096 * model.kv_per_token <= settings.rollout_kv_gib * GIB
    update = found.update(checkpointing=True)
    # and 6 for the engine's graphs and activations
    assert settings.rollout_kv_gib + 6 + (2 * model.weights + update) / GIB <= 0.9 * 80 + 0.01
    assert found.lacking == 0
    assert "vLLM" in found.line()
    lines = page("--config", name, "--plan-gpus", "4xh100")
    assert "4 x h100" in lines["machine"]
    assert "of 80.0 GiB free" in lines["memory"]


def test_without_vllm_transformers_sample_and_hours_are_named(without_vllm: None) -> None:
    found = plan()
    assert found.settings.rollout == "hf"
    assert 2 * (found.settings.rollout_rows or 0) + 15 + 4 <= 72  # rows of 1 GiB, and a copy
    assert "pip install 'rlkv[vllm]'" in found.line()
    assert " h in all" in found.line()
    assert plan("--rollout-eager").settings.rollout == "hf"
    on_cpu = plan(gib=None)
    assert (on_cpu.settings.rollout_rows, on_cpu.settings.rollout_kv_gib) == (64, None)
    assert "this CPU" in on_cpu.line()
    tiny = plan(config="tiny", gib=None)
    assert tiny.line() == "rollouts through transformers, 64 rows at once"


def test_what_was_asked_for_stays(with_vllm: None) -> None:
    found = plan("--rollout-rows", "7", "--rollout-kv-gib", "3")
    assert (found.settings.rollout_rows, found.settings.rollout_kv_gib) == (7, 3)
    assert plan("--rollout", "hf").settings.rollout == "hf"
    assert plan("--rollout", "vllm-server").settings.rollout == "vllm-server"


def test_a_small_gpu_samples_with_the_trainers_copy_or_says_what_it_lacks(with_vllm: None) -> None:
    found = plan(gib=36)
    assert (found.settings.rollout, found.lacking) == ("hf", 0)
    assert "no room for KV" in found.line()
    small = plan(gib=20)
    assert (small.settings.rollout, small.settings.rollout_rows) == ("hf", 1)
    update = small.update(checkpointing=True) / GIB
    assert small.lacking == pytest.approx(15 + update + 1 - 0.9 * 20, abs=0.1)
    assert f"too small by about {small.lacking:.1f} GiB" in small.line()


def test_lengths_and_steps_come_from_the_curriculum(tmp_path: Path) -> None:
    row = {"problem": "1 + 1", "answer": "2", "output_tokens": 1000}
    (tmp_path / "c.jsonl").write_text((json.dumps(row) + "\n") * 64)
    options = ["--max-steps", "-1", "--num-train-epochs", "3", "--curriculum"]
    found = plan(*options, "c.jsonl", rows=[row] * 64)
    assert (found.mean_tokens, found.problems, found.steps) == (1000, 64, 6)
    lines = page("--config", "llama8b", *options, "c.jsonl")
    assert "1,000 on average (the mean of the curriculum)" in lines["tokens"]
    lines = page("--config", "llama8b", *options, "c.jsonl", "--prompts-per-step", "65")
    assert " 0, 260 completions each" in lines["steps"]
    lines = page("--config", "llama8b", *options, "absent.parquet")
    assert "as the curriculum has it" in lines["steps"]


def test_more_gpus_take_less_time(with_vllm: None) -> None:
    settings, args = parse_config(["--config", "llama8b", "--use-cpu"])
    args.generation_batch_size = 128
    one = make_plan(settings, args, Machine(1, CARDS["h100"], 80 * GIB))
    eight = make_plan(settings, args, Machine(8, CARDS["h100"], 80 * GIB))
    assert sum(one.seconds) > 4 * sum(eight.seconds) > 0
    assert eight.settings.rollout_kv_gib == 16.0  # 16 of 128 completions each, 1 GiB the longest
    # a step without its prompts has as many completions for each process
    settings, args = parse_config(["--model", settings.model, "--use-cpu"])
    for processes in (1, 8):
        found = make_plan(settings, args, Machine(processes, CARDS["h100"], 80 * GIB))
        assert found.samples == 8 * processes


def test_sharded_weights_are_shared_out_and_vllms_copy_is_not(
    with_vllm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    found = plan(processes=8)
    assert found.footprint is not None
    assert found.own_weights == found.footprint.weights // 8


def test_servers_hold_the_kv() -> None:
    options = ["--config", "llama8b", "--plan-gpus", "h100", "--rollout", "vllm-server"]
    memory = page(*options)["memory"]
    assert "of KV" not in memory
    assert 19 < float(memory.split()[1]) < 19.3  # 15.0 of weights, 4.2 for the update


def test_a_step_on_a_cpu_takes_about_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2.5-Coder-1.5B on two cores: rollouts 111 s, update 75 s."""
    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        "qwen2", **sizes, **heads, vocab_size=151936, tie_word_embeddings=True
    )
    model = Footprint.of_config(config, "qwen", 2)
    monkeypatch.setattr(Footprint, "of", lambda *_: model)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    step = ["--model", "qwen", "--prompts-per-step", "8", "--max-completion-length", "512"]
    settings, args = parse_config([*step, "--rollout-rows", "32", "--use-cpu"])
    rows = [{"output_tokens": 332}, {"output_tokens": "1000"}]  # text is no number
    found = make_plan(settings, args, Machine(1, None, None), rows)
    assert found.seconds == pytest.approx([111, 75], rel=0.2)


# --- formulas against measured bytes

SIZES = LocalSizes(4, 16)
WIDTHS: dict[str, dict[str, int]] = {
    "tiny": {"layers": 4, "hidden": 144, "intermediate": 288, "query_heads": 12, "kv_heads": 6},
    "smol": {"layers": 30, "hidden": 576, "intermediate": 1536, "query_heads": 9, "kv_heads": 3},
}
MODELS = {
    "tiny": LlamaSizes(**WIDTHS["tiny"], head_dim=32, vocabulary=313),
    "smol": LlamaSizes(**WIDTHS["smol"], vocabulary=49152),
}


def measured(model: Any, rows: int, length: int, rows_per_call: int) -> tuple[int, int]:
    """Return the bytes of the weights, and peak bytes besides them, of the trainer's update."""
    ids = torch.randint(0, model.config.vocab_size, (rows, length))

    def score(ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        found = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        return found.log_probs

    with LiveBytes(model.parameters()) as live:
        logprobs = completion_logprobs(score, ids, torch.ones_like(ids), length // 2, rows_per_call)
        logprobs.sum().backward()
    return live.at_start, live.peak - live.at_start


@pytest.mark.parametrize(
    ("name", "dtype", "rows", "length", "rows_per_call", "checkpointing"),
    [
        ("tiny", torch.float32, 4, 250, 2, False),
        ("tiny", torch.bfloat16, 2, 250, 2, False),
        ("tiny", torch.float32, 2, 400, 2, True),
        pytest.param("smol", torch.float32, 2, 160, 1, True, marks=pytest.mark.slow),
    ],
)
def test_the_plan_is_within_a_tenth_of_measured_bytes(
    name: str, dtype: torch.dtype, rows: int, length: int, rows_per_call: int, checkpointing: bool
) -> None:
    config = MODELS[name].llama(1024)
    base: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    add_fused_lm_head(base)
    gates = HeadGateConfig(sink=SIZES.sink, window=SIZES.window, init_value=0.5)
    model: Any = get_peft_model(base, gates)
    footprint = Footprint.of_config(config, name, dtype.itemsize)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    weights, peak = measured(model, rows, length, rows_per_call)
    planned = update_memory(footprint, rows, length, rows_per_call, SIZES, checkpointing)
    assert weights == pytest.approx(footprint.weights, rel=0.01)  # besides it the gates and buffers
    assert planned == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("family", ["mistral_sliding", "deepseek_v3"])
def test_a_model_without_gates_gets_no_plan(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Footprint.of_config(make_config(family), family, 2)
    monkeypatch.setattr(Footprint, "of", lambda *_: model)
    settings, args = parse_config(["--model", family, "--use-cpu"])
    with pytest.raises(ValueError, match="has no layer whose heads can have gates"):
        make_plan(settings, args, Machine(1, None, None))
