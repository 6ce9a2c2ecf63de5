"""Configuration files, options, the program's errors, and reading the curriculum."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from datasets import Dataset

from rlkv.models.prompts import fill_template
from rlkv.tiny import longest_solution
from rlkv.training.config import RLKVSettings, parse_config
from rlkv.training.grpo import load_curriculum
from tests.helpers.paths import ROOT


def test_options_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "l1_beta: 2.0e-3\ntau: 0.7\nmax_steps: 9\nprompts_per_step: "
        "4\nper_device_train_batch_size: 8\n"
    )
    settings, training = parse_config(["--config", str(file), "--tau", "0.6", "--use_cpu", "true"])
    assert (settings.l1_beta, settings.tau, training.max_steps) == (2e-3, 0.6, 9)
    assert training.gradient_accumulation_steps == 2
    assert (
        training.learning_rate,
        training.weight_decay,
        training.adam_beta1,
        training.adam_beta2,
    ) == (
        0.01,
        0.017,
        0.9,
        0.999,
    )
    assert (training.max_grad_norm, training.beta, training.loss_type, training.bf16) == (
        1.0,
        0.0,
        "grpo",
        False,
    )
    assert training.lr_scheduler_type == "constant"


PAPER = {
    "llama8b": ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 1e-3, 0.5, 1.0),
    "qwen7b": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 1e-3, 0.55, 1.0),
    "qwen3_4b": ("Qwen/Qwen3-4B-Thinking-2507", 2.5e-3, 0.5, 0.95),
}


@pytest.mark.parametrize("name", PAPER)
def test_shipped_files_hold_the_papers_numbers(name: str) -> None:
    settings, training = parse_config(["--config", name, "--use_cpu", "true"])
    from_file = parse_config(
        ["--config", str(ROOT / "configs" / f"{name}.yaml"), "--use_cpu", "true"]
    )
    assert settings == from_file[0]
    assert (settings.model, settings.l1_beta, settings.tau, training.top_p) == PAPER[name]
    assert settings.finder == "rlkv"
    assert (settings.sink, settings.window, settings.deploy_sink, settings.deploy_window) == (
        128,
        256,
        16,
        64,
    )
    assert (training.prompts_per_step, training.num_generations, training.max_steps) == (32, 4, 185)
    assert training.gradient_accumulation_steps * training.per_device_train_batch_size == 128
    assert (training.max_completion_length, training.temperature, training.learning_rate) == (
        7168,
        1.0,
        0.01,
    )


@pytest.mark.parametrize("name", PAPER)
def test_published_files_differ_from_the_papers_in_what_they_name(name: str) -> None:
    expected, paper = parse_config(["--config", name, "--use_cpu", "true"])
    settings, training = parse_config(["--config", f"{name}_published", "--use_cpu", "true"])
    assert settings == expected  # model, curriculum, sizes, beta, tau
    assert (paper.recipe, paper.epsilon, paper.importance_cap) == ("paper", 0.2, 3.0)
    assert (training.recipe, training.epsilon, training.importance_cap) == ("published", 0.4, 5.0)
    sampling = (training.temperature, training.top_p, training.top_k)
    assert sampling == ((0.6, 0.95, 20) if name == "qwen3_4b" else (1.0, 1.0, paper.top_k))
    found, before = training.to_dict(), paper.to_dict()
    own = {"recipe", "epsilon", "importance_cap", "temperature", "top_k", "output_dir"}
    assert {key for key in found if found[key] != before[key]} <= own


def test_the_options_override_the_recipe() -> None:
    options = [
        "--recipe",
        "published",
        "--epsilon",
        "0.3",
        "--importance_cap",
        "0",
        "--use_cpu",
        "true",
    ]
    training = parse_config(options)[1]
    assert (training.epsilon, training.importance_cap) == (0.3, 0.0)


def test_the_tiny_file_fits_the_tiny_model() -> None:
    settings, training = parse_config(
        ["--config", str(ROOT / "configs" / "tiny.yaml"), "--use_cpu", "true"]
    )
    assert (settings.model, settings.sink, settings.window) == ("tiny", 4, 16)
    assert (settings.deploy_sink, settings.deploy_window) == (4, 16)
    assert training.generation_batch_size == training.prompts_per_step * training.num_generations


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--bogus", "3"], "--bogus"),
        (["--l1_beta", "x"], "l1_beta"),
        (["--beta", "0.1"], "l1_beta"),
        (["--loss_type", "dapo"], "loss_type"),
        (["--scale_rewards", "batch"], "recipe"),
        (["--use_transformers_continuous_batching", "true"], "continuous_batching"),
        (["--cache_implementation", "static"], "static"),
        (["--entropy_coef", "0.1"], "entropy_coef"),
        (["--delta", "2.0"], "delta"),
        (["--log_completions", "true"], "log_completions"),
        (["--use_vllm", "true"], "use_vllm"),
        (["--min_p", "0.1"], "min_p"),
        (["--report_to", "wandb"], "option wandb"),
        (["--temperature", "0"], "greedy"),
        (["--recipe", "rank"], "recipe.*paper, published.*'rank'"),
        (["--finder", "luck"], "finder.*'luck'"),
        (["--init_gates", "g.pt"], "init_gates.*--finder elimination"),
        (
            ["--elimination_distillation", "7"],
            "elimination_distillation must be 0 or at least 8, got 7",
        ),
        (["--elimination_traces", "0"], "elimination_traces"),
        (["--wandb", "maybe"], "wandb.*'maybe'"),
        (["--save_total_limit", "0"], "save_total_limit"),
        (["--rollout", "sglang"], "rollout.*'sglang'"),
        (["--importance_cap", "0.5"], "importance_cap"),
        (
            [
                "--prompts_per_step",
                "3",
                "--per_device_train_batch_size",
                "8",
                "--steps_per_generation",
                "3",
            ],
            "steps_per_generation=3 splits prompts_per_step=3",
        ),
        (["--config"], "--config"),
        (["stray"], "stray"),
    ],
)
def test_wrong_options_are_named(options: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse_config([*options, *([] if options == ["--config"] else ["--use_cpu", "true"])])


def test_wrong_keys_and_broken_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for text, named in [
        ("l1_betta: 3\n", "l1_betta"),
        ("sink: [1\n", "run.yaml.*YAML"),
        ("sink: many\n", "sink"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=named):
            parse_config(["--config", str(file)])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--bogus", "3"], "error: unknown setting --bogus"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--model", "x"], "error: no solutions to measure heads on: pass --curriculum"),
        (["--model", "x", "--finder", "rlkv"], "error: no problems to train on"),
        (["--curriculum", "nowhere.parquet"], "error: nowhere.parquet: there is no such file"),
    ],
)
def test_the_program_ends_with_one_sentence(
    options: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--use_cpu", "true", "--output_dir", str(tmp_path / "run"), *options]
    monkeypatch.setattr(sys, "argv", ["grpo_gates.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "train" / "grpo_gates.py"), run_name="__main__")
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert named in error
    assert not (tmp_path / "run").exists()


def test_the_tiny_model_draws_problems_of_its_own_task(capsys: pytest.CaptureFixture[str]) -> None:
    settings, training = parse_config(["--config", "tiny", "--use_cpu", "true", "--seed", "5"])
    found = load_curriculum(settings, training)
    line = capsys.readouterr().out
    assert "200 problems of the built-in task" in line
    assert "seed 5" in line
    assert len(found) == 200
    assert found[0] == load_curriculum(settings, training)[0]
    longest = max(prompt[0]["content"].count(" = ") for prompt in found["prompt"])
    assert longest_solution(longest + 2) <= training.max_completion_length
    training.max_completion_length = longest_solution(4)
    prompts = load_curriculum(settings, training)["prompt"]
    assert max(prompt[0]["content"].count(" = ") for prompt in prompts) == 2


def read(path: Path, template: str) -> Dataset:
    options = ["--curriculum", str(path), "--template", template, "--use_cpu", "true"]
    return load_curriculum(*parse_config(options))


def test_problems_are_read_from_both_formats(tmp_path: Path) -> None:
    rows = [
        {"problem": "1 + 1", "answer": "2", "bucket": "0-2k"},
        {"problem": "2 + 2", "answer": 4, "bucket": "0-2k"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Dataset.from_list([{**row, "answer": str(row["answer"])} for row in rows]).to_parquet(
        tmp_path / "a.parquet"
    )
    for name in ("a.jsonl", "a.parquet"):
        found = read(tmp_path / name, "boxed")
        assert found["answer"] == ["2", "4"]
        assert found[1]["prompt"] == [{"role": "user", "content": fill_template("2 + 2", "boxed")}]


def test_the_curriculum_says_which_template(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"problem": "1 + 1", "answer": "2", "template": "plain"}] * 2
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert RLKVSettings(curriculum=str(path)).with_curriculum().template == "plain"
    assert (
        RLKVSettings(curriculum=str(path), template="boxed").with_curriculum().template == "boxed"
    )
    assert RLKVSettings().with_curriculum().template == "rlkv"
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {**rows[0], "template": "boxed"}])
    )
    with pytest.raises(ValueError, match="--template"):
        RLKVSettings(curriculum=str(path)).with_curriculum()


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.csv", "x", "a.csv"),
        ("a.jsonl", '{"problem": "1"}\n', "line 1.*problem"),
        ("a.jsonl", "no json\n", "line 1.*JSON"),
        ("a.parquet", "PAR1 broken", "a.parquet"),
    ],
)
def test_a_wrong_curriculum_is_named(name: str, content: str, named: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=named):
        read(tmp_path / name, "rlkv")
