"""What a training says before it begins: --plan, the engine, sizes that fit, and which curriculum
it takes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlkv.rollout.footprint import CARDS, GIB
from rlkv.training.config import RLKVSettings, parse_config
from rlkv.training.grpo import prompt_tokens
from rlkv.training.plan import Machine, Plan, describe_plan, make_plan
from rlkv.training.run_folder import link
from tests.helpers import warm
from tests.helpers.installed import CPU_BUILD, pretend_vllm
from tests.helpers.paths import ROOT

PUBLISHED_LLAMA = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plan(*options: str, config: str = "llama8b", gib: float | None = 80) -> Plan:
    settings, args = parse_config(["--config", config, "--use_cpu", "true", *options])
    here = Machine(1, None, None) if gib is None else Machine(1, CARDS["h100"], int(gib * GIB))
    return make_plan(settings, args, here)


def page(settings: RLKVSettings, args: Any) -> str:
    return describe_plan(settings, args, prompt_tokens(settings, args))


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_vllm(monkeypatch, CPU_BUILD)


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_vllm(monkeypatch, None)


def test_the_program_plans_without_hub_gpu_and_curriculum(tmp_path: Path) -> None:
    command = [ROOT / "train/grpo_gates.py", "--config", ROOT / "configs/llama8b.yaml", "--plan"]
    done = warm.run(command, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr) == (0, "")
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert list(lines) == [
        *[
            "model",
            "curriculum",
            "steps",
            "tokens",
            "engine",
            "machine",
            "memory",
            "update",
            "serving",
            "time",
            "gates",
        ]
    ]
    assert "32 layers x 8 KV heads" in lines["model"]
    assert "results/curriculum_llama8b/curriculum.parquet" in lines["curriculum"]
    assert "rlkv-filter --model deepseek-ai/DeepSeek-R1-Distill-Llama-8B" in lines["curriculum"]
    assert "185, 128 completions each, 23,680 in all" in lines["steps"]
    assert "at most 7,168" in lines["tokens"]
    assert "1 x h100" in lines["machine"]
    assert "15.0 GiB of weights" in lines["memory"]
    # 4,608 tokens of 128 KiB, 576 MiB; half of the heads keep 80 of them
    assert "576 MiB at 0, " in lines["serving"]
    assert "293 MiB at 0.5" in lines["serving"]
    assert "assumed, not measured" in lines["time"]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["llama8b", "qwen7b", "qwen3_4b"])
def test_big_configs_use_vllm_where_it_is_installed(name: str, with_vllm: None) -> None:
    found = plan(config=name)
    settings, footprint = found.settings, found.footprint
    assert settings.rollout == "vllm"
    assert footprint is not None
    assert settings.rollout_kv_gib is not None
    assert settings.rollout_rows is not None
    assert 32 < settings.rollout_rows <= 128  # all of a step's at most
    assert settings.rollout_rows * 4096 * footprint.kv_per_token <= settings.rollout_kv_gib * GIB
    update = found.update(1, checkpointing=True).peak
    # and 6 for the engine's graphs and activations
    assert settings.rollout_kv_gib + 6 + (2 * footprint.weights + update) / GIB <= 0.9 * 80 + 0.01
    assert found.lacking == 0
    assert "vLLM" in found.line()


def test_without_vllm_transformers_sample_and_days_are_named(without_vllm: None) -> None:
    found = plan()
    assert found.settings.rollout == "hf"
    assert 2 * (found.settings.rollout_rows or 0) + 15 + 4 <= 72  # rows of 1 GiB, and a copy
    assert "pip install 'rlkv[vllm]'" in found.line()
    assert "days in all" in found.line()


def test_what_was_asked_for_stays(with_vllm: None) -> None:
    found = plan("--rollout_rows", "7", "--rollout_kv_gib", "3")
    assert (found.settings.rollout_rows, found.settings.rollout_kv_gib) == (7, 3)
    assert plan("--rollout", "hf").settings.rollout == "hf"
    assert plan("--rollout", "vllm-server").settings.rollout == "vllm-server"


def test_a_small_gpu_samples_with_the_trainers_copy_or_says_what_it_lacks(with_vllm: None) -> None:
    found = plan(gib=36)
    assert found.settings.rollout == "hf"
    assert "no room for KV" in found.line()
    assert found.lacking == 0
    tiny = plan(gib=20)
    assert tiny.settings.rollout_rows == 1
    update = tiny.update(1, checkpointing=True).peak / GIB
    assert tiny.settings.rollout == "hf"
    assert tiny.lacking == pytest.approx(15 + update + 1 - 0.9 * 20, abs=0.1)
    assert "too small" in tiny.line()


def test_sizes_without_a_gpu_are_the_plain_ones(without_vllm: None) -> None:
    found = plan(gib=None)
    assert (found.settings.rollout_rows, found.settings.rollout_kv_gib) == (64, None)
    assert "this CPU" in found.line()
    assert plan(config="tiny", gib=None).line() == "rollouts through transformers, 64 rows at once"


def write_curriculum(path: Path, **fields: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((json.dumps({"problem": "1 + 1", "answer": "2", **fields}) + "\n") * 64)
    return str(path)


def test_lengths_and_steps_come_from_the_curriculum(tmp_path: Path) -> None:
    path = write_curriculum(tmp_path / "c.jsonl", output_tokens=1000)
    options = ["--curriculum", path, "--max_steps", "-1", "--num_train_epochs", "3"]
    found = plan(*options)
    assert (found.mean_tokens, found.problems, found.steps) == (1000, 64, 6)
    settings, args = parse_config(["--config", "llama8b", "--use_cpu", "true", *options])
    assert "1,000 on average (the mean of the curriculum)" in describe_plan(
        settings, args, prompt_tokens(settings, args)
    )
    settings.curriculum = "absent.parquet"
    assert "as the curriculum has it" in page(settings, args)


def test_elimination_has_no_plan() -> None:
    with pytest.raises(ValueError, match="--finder elimination"):
        parse_config(["--config", "tiny", "--finder", "elimination", "--plan", "--use_cpu", "true"])


def test_a_curriculum_of_another_model_is_refused(tmp_path: Path) -> None:
    path = write_curriculum(tmp_path / "c.jsonl", model="owner/other")
    with pytest.raises(
        ValueError, match=r"owner/other.*tiny.*rlkv-filter --model tiny.*--allow_foreign_curriculum"
    ):
        RLKVSettings(curriculum=path).with_curriculum()
    settings, _ = parse_config(
        ["--curriculum", path, "--allow_foreign_curriculum", "true", "--use_cpu", "true"]
    )
    assert settings.with_curriculum().curriculum == path
    for fields in ({"model": "tiny"}, {"model": None}, {}):
        own = write_curriculum(tmp_path / "own.jsonl", **fields)
        assert RLKVSettings(curriculum=own).with_curriculum().curriculum == own


def test_a_missing_curriculum_names_the_command_that_writes_it() -> None:
    for path, command in (
        ("results/curriculum_smol/curriculum.parquet", "--model smol`"),
        ("a/b.jsonl", "--output-dir a`"),
    ):
        with pytest.raises(ValueError, match=f"{path}.*rlkv-filter .*{command}"):
            RLKVSettings(model="smol", curriculum=path).with_curriculum()


def test_the_link_to_the_gates_replaces_links_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "gates.pt").write_text(run)
        link(Path("new/gates.pt"), tmp_path / run / "gates.pt")
        assert Path("new/gates.pt").read_text() == run
    Path("mine.pt").write_text("mine")
    capsys.readouterr()
    link(Path("mine.pt"), tmp_path / "two" / "gates.pt")
    assert Path("mine.pt").read_text() == "mine"
    assert "mine.pt" in capsys.readouterr().out


@pytest.mark.parametrize("gpus", ["h100", "4xh100", "8xa100"])
def test_the_papers_models_are_planned_for_named_gpus(gpus: str, with_vllm: None) -> None:
    hours = {}
    for config in ("llama8b", "qwen7b", "qwen3_4b"):
        settings, args = parse_config(
            ["--config", config, "--use_cpu", "true", "--plan", "--plan_gpus", gpus]
        )
        lines = {line.split()[0]: line for line in page(settings, args).splitlines()}
        assert gpus.replace("x", " x ") in lines["machine"] or f"1 x {gpus}" in lines["machine"]
        assert "of 80.0 GiB free" in lines["memory"]
        hours[config] = lines["time"]
    assert len(set(hours.values())) == 3


def test_more_gpus_take_less_time(with_vllm: None) -> None:
    settings, args = parse_config(["--config", "llama8b", "--use_cpu", "true"])
    args.generation_batch_size = 128
    one, eight = (
        make_plan(settings, args, Machine(number, CARDS["h100"], 80 * GIB)) for number in (1, 8)
    )
    assert one.rates is not None
    assert sum(one.seconds(one.rates)) > 4 * sum(eight.seconds(eight.rates or one.rates))
    assert eight.settings.rollout_kv_gib == 16.0  # 16 of 128 completions each, 1 GiB the longest


def test_a_built_in_model_has_no_assumed_time() -> None:
    settings, args = parse_config(["--config", "tiny", "--use_cpu", "true"])
    assert "time" not in {line.split()[0] for line in page(settings, args).splitlines()}


def test_named_gpus_hold_bfloat16(with_vllm: None) -> None:
    """Whatever ``auto`` is on the machine that plans."""
    settings, args = parse_config(["--config", "llama8b", "--use_cpu", "true", "--dtype", "auto"])
    settings.plan, settings.plan_gpus = True, "h100"
    assert "15.0 GiB of weights" in page(settings, args)


def test_a_step_without_its_prompts_has_as_many_completions_for_each_process(
    with_vllm: None,
) -> None:
    options = [
        "--model",
        PUBLISHED_LLAMA,
        "--use_cpu",
        "true",
        "--per_device_train_batch_size",
        "8",
    ]
    settings, args = parse_config([*options, "--curriculum", "c.parquet"])
    one, eight = (
        make_plan(settings, args, Machine(number, CARDS["h100"], 80 * GIB)) for number in (1, 8)
    )
    assert (one.samples, one.own_samples) == (8, 8)
    assert (eight.samples, eight.own_samples) == (64, 8)


def test_sharded_weights_are_shared_out_and_vllms_copy_is_not(
    with_vllm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    settings, args = parse_config(["--config", "llama8b", "--use_cpu", "true"])
    found = make_plan(settings, args, Machine(8, CARDS["h100"], 80 * GIB))
    assert found.footprint is not None
    assert found.own_weights == found.footprint.weights // 8
    assert found.engine_weights == found.footprint.weights


def test_servers_hold_the_kv() -> None:
    options = [
        "--config",
        "llama8b",
        "--use_cpu",
        "true",
        "--plan_gpus",
        "h100",
        "--plan",
        "--rollout",
        "vllm-server",
    ]
    settings, args = parse_config(options)
    memory = next(line for line in page(settings, args).splitlines() if line.startswith("memory"))
    assert "of KV" not in memory
    assert 19 < float(memory.split()[1]) < 19.3  # 15.0 of weights, 4.2 for the update


def test_gpus_to_plan_for_need_a_plan() -> None:
    with pytest.raises(ValueError, match="--plan"):
        parse_config(["--config", "tiny", "--use_cpu", "true", "--plan_gpus", "h100"])


@pytest.mark.parametrize("gpus", ["h1000", "0xh100", "8x", "x h100"])
def test_gpus_that_are_not_known_are_named(gpus: str) -> None:
    settings, args = parse_config(
        ["--config", "tiny", "--use_cpu", "true", "--plan", "--plan_gpus", gpus]
    )
    with pytest.raises(ValueError, match=r"8xh100; known are a10g"):
        page(settings, args)
