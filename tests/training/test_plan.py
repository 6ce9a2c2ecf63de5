"""What a training says before it begins: --plan, the engine, sizes that fit, and which curriculum it takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkv.rollout.estimate import GIB
from rlkv.training.config import RLKVSettings, parse_config
from rlkv.training.plan import Plan, describe_plan, make_plan
from rlkv.training.run_folder import link
from tests.helpers import warm
from tests.helpers.installed import CPU_BUILD, pretend_vllm
from tests.helpers.paths import ROOT


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plan(*options: str, config: str = "llama8b", gib: float | None = 80) -> Plan:
    settings, args = parse_config(["--config", config, "--use_cpu", "true", *options])
    return make_plan(settings, args, None if gib is None else int(gib * GIB))


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
    assert set(lines) == {"model", "curriculum", "steps", "tokens", "engine", "memory", "GPU", "time", "gates"}
    assert "32 layers x 8 KV heads" in lines["model"]
    assert "results/curriculum_llama8b/curriculum.parquet" in lines["curriculum"]
    assert "rlkv-filter --model deepseek-ai/DeepSeek-R1-Distill-Llama-8B" in lines["curriculum"]
    assert "185, 128 completions each, 23,680 in all" in lines["steps"]
    assert "at most 7,168" in lines["tokens"]
    assert "1.00 GiB of KV" in lines["memory"]
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
    assert settings.rollout_kv_gib + 2 * footprint.weights / GIB + 16 <= 0.9 * 80 + 0.01
    assert found.lacking == 0
    assert "vLLM" in found.line()


def test_without_vllm_transformers_sample_and_days_are_named(without_vllm: None) -> None:
    found = plan()
    assert found.settings.rollout == "hf"
    assert 2 * (found.settings.rollout_rows or 0) + 15 + 16 <= 72  # rows of 1 GiB, and a copy
    assert "pip install 'rlkv[vllm]'" in found.line()
    assert "days in all" in found.line()


def test_what_was_asked_for_stays(with_vllm: None) -> None:
    found = plan("--rollout_rows", "7", "--rollout_kv_gib", "3")
    assert (found.settings.rollout_rows, found.settings.rollout_kv_gib) == (7, 3)
    assert plan("--rollout", "hf").settings.rollout == "hf"
    assert plan("--rollout", "vllm-server").settings.rollout == "vllm-server"


def test_a_small_gpu_samples_with_the_trainers_copy_or_says_what_it_lacks(with_vllm: None) -> None:
    found = plan(gib=48)
    assert found.settings.rollout == "hf"
    assert "no room for KV" in found.line()
    assert found.lacking == 0
    tiny = plan(gib=24)
    assert tiny.settings.rollout_rows == 1
    assert tiny.lacking == pytest.approx(15 + 16 + 1 - 0.9 * 24, abs=0.1)
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
    assert "1,000 on average (the mean of the curriculum)" in describe_plan(settings, args)
    settings.curriculum = "absent.parquet"
    assert "as the curriculum has it" in describe_plan(settings, args)


def test_elimination_has_no_plan() -> None:
    with pytest.raises(ValueError, match="--finder elimination"):
        parse_config(["--config", "tiny", "--finder", "elimination", "--plan", "--use_cpu", "true"])


def test_a_curriculum_of_another_model_is_refused(tmp_path: Path) -> None:
    path = write_curriculum(tmp_path / "c.jsonl", model="owner/other")
    with pytest.raises(ValueError, match=r"owner/other.*tiny.*rlkv-filter --model tiny.*--allow_foreign_curriculum"):
        RLKVSettings(curriculum=path).with_curriculum()
    settings, _ = parse_config(["--curriculum", path, "--allow_foreign_curriculum", "true", "--use_cpu", "true"])
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


def test_the_link_to_the_gates_replaces_links_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
