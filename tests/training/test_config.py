"""Options of a training run, what they refuse, and reading the curriculum."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from rlkv.cli.train import GROUPS, parse_config, parse_distill_config
from rlkv.models.prompts import fill_template
from rlkv.tiny import longest_solution
from rlkv.training.config import (
    RESUMABLE_KEYS,
    UNPUBLISHED_KEYS,
    DistillSettings,
    GateTrainingArguments,
    RLKVSettings,
    option_names,
    print_unread,
    unread_options,
)
from rlkv.training.grpo import load_curriculum, unread_by_grpo
from tests.helpers.programs import run_program

PAPER = {
    "llama8b": ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 1e-3, 0.5, 1.0),
    "qwen7b": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 1e-3, 0.55, 1.0),
    "qwen3_4b": ("Qwen/Qwen3-4B-Thinking-2507", 2.5e-3, 0.5, 0.95),
}


def read(*options: str) -> tuple[RLKVSettings, GateTrainingArguments]:
    return parse_config([*options, "--use-cpu"])


def values(settings: Any, *names: str) -> list[Any]:
    return [getattr(settings, name) for name in names]


def test_options_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "l1_beta: 2.0e-3\ntau: 0.7\nmax_steps: 9\nprompts_per_step: 4\n"
        "per_device_train_batch_size: 8\nlr_scheduler_kwargs: {num_cycles: 2}\nbf16: false\n"
    )
    options = ("--tau", "0.6", "--warmup-steps", "3", "--recipe", "published", "--epsilon", "0.3")
    settings, training = read("--config", str(file), *options)
    assert values(training, "epsilon", "importance_cap") == [0.3, 5.0]
    assert values(settings, "finder", "l1_beta", "tau", "resume") == ["rlkv", 2e-3, 0.6, True]
    assert values(training, "max_steps", "warmup_steps", "beta") == [9, 3, 0.0]
    assert training.gradient_accumulation_steps == 2
    assert training.lr_scheduler_kwargs == {"num_cycles": 2}
    paper = ["learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm"]
    assert values(training, *paper) == [0.01, 0.017, 0.9, 0.999, 1.0]
    assert training.lr_scheduler_type == "constant"
    assert training.ddp_timeout == 4 * 3600
    assert read("--ddp-timeout", "60")[1].ddp_timeout == 60


@pytest.mark.parametrize("name", PAPER)
def test_packaged_files_hold_the_papers_numbers(name: str) -> None:
    settings, training = read("--config", name)
    assert (settings.model, settings.l1_beta, settings.tau, training.top_p) == PAPER[name]
    sizes = values(settings, "finder", "sink", "window", "deploy_sink", "deploy_window")
    assert sizes == ["rlkv", 128, 256, 16, 64]
    assert values(training, "prompts_per_step", "num_generations", "max_steps") == [32, 4, 185]
    assert training.gradient_accumulation_steps * training.per_device_train_batch_size == 128
    assert values(training, "max_completion_length", "temperature") == [7168, 1.0]
    # the published recipe differs in what its file names
    same, published = read("--config", f"{name}_published")
    assert same == settings
    assert values(training, "recipe", "epsilon", "importance_cap") == ["paper", 0.2, 3.0]
    assert values(published, "recipe", "epsilon", "importance_cap") == ["published", 0.4, 5.0]
    found = published.to_dict()
    before = training.to_dict()
    own = {"recipe", "epsilon", "importance_cap", "temperature", "top_k", "output_dir"}
    assert {key for key in found if found[key] != before[key]} <= own


def test_help_shows_our_options_by_group_and_hides_those_of_trl(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for parse, prog in ((parse_config, "rlkv-train"), (parse_distill_config, "rlkv-distill")):
        with pytest.raises(SystemExit) as ended:
            parse(["--help"])
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert f"usage: {prog}" in out
        for name in ("--model", "--no-resume", "--save-steps", "--output-dir"):
            assert name in out
        assert "--hub-token" not in out
        assert "_steps" not in out


def test_what_options_are_is_in_their_metadata() -> None:
    kinds = (RLKVSettings, GateTrainingArguments, DistillSettings)
    for kind in kinds:
        for name in option_names(kind):
            metadata = kind.__dataclass_fields__[name].metadata
            assert metadata["help"]
            assert metadata["group"] in GROUPS
    assert {"save_steps", "max_steps", "wandb", "forward_rows", "curriculum"} <= RESUMABLE_KEYS
    assert not RESUMABLE_KEYS & {"seed", "l1_beta", "finder", "steps", "held_out", "model"}
    assert {"model", "haystack", "output_dir", "rollout_servers"} <= UNPUBLISHED_KEYS
    assert not UNPUBLISHED_KEYS & {"max_steps", "seed", "finder", "target_sparsity"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--bogus 3", "unknown option --bogus"),
        ("--beta 0.1", "l1_beta"),
        ("--loss-type dapo", "loss_type"),
        ("--train-sampling-strategy sequential", "train_sampling_strategy must be random"),
        ("--remove-unused-columns", "remove_unused_columns must be False"),
        ("--use-transformers-continuous-batching", "continuous_batching"),
        ("--use-vllm", "use_vllm"),
        ("--report-to wandb", "option wandb"),
        ("--temperature 0", "greedy"),
        ("--temperature nan", "temperature must be above 0, got nan"),
        ("--top-p 2", "top_p is 2.0"),
        ("--top-k -1", "top_k .* is -1"),
        ("--seed -1", "seed is -1"),
        ("--sink -1", "--sink must be at least 0"),
        ("--importance-cap nan", "importance_cap must be 0 .* or at least 1, got nan"),
        ("--l1-beta nan", "--l1-beta must be at least 0, got nan"),
        ("--tau nan", "--tau must be at least 0, got nan"),
        ("--epsilon -1", "--epsilon must be at least 0"),
        ("--max-grad-norm nan", "--max-grad-norm must be at least 0, got nan"),
        ("--deploy-sink -1", "--deploy-sink must be at least 0"),
        ("--deploy-window 0", "--deploy-window must be at least 1"),
        ("--elimination-budget nan", "--elimination-budget must be at least 0, got nan"),
        ("--max-steps 0", "max_steps must be at least 1"),
        ("--per-device-train-batch-size 0", "--per-device-train-batch-size must be at least 1"),
        ("--prompts-per-step 0", "--prompts-per-step must be at least 1"),
        ("--num-generations 0", "--num-generations must"),
        ("--num-iterations 0", "--num-iterations must"),
        ("--steps-per-generation 0", "--steps-per-generation must"),
        ("--num-generations None", "--num-generations needs a whole number, got 'None'"),
        ("--max-completion-length 0", "--max-completion-length must be at least 1"),
        ("--config tiny --num-train-epochs 1", "max_steps=100 would end.*--max-steps -1"),
        ("--output-dir=", "--output-dir has an empty value"),
        ("--fp16", "mixed_precision must be no"),
        ("--vllm-gpu-memory-utilization 0.5", "vllm_gpu_memory_utilization=0.5 is for trl's own"),
        ("--model-init-kwargs {} ", "model_init_kwargs"),
        ("--recipe rank", "--recipe 'rank'.*paper, published"),
        ("--finder elimination --init-gates g.pt", "init_gates='g.pt' has no effect"),
        ("--finder elimination --plan", "plan=True has no effect without --finder rlkv"),
        ("--finder attention --held-out 4", "held_out=4 has no effect without --finder rlkv"),
        ("--init-gates g.pt --init-value 0.5", "exclude each other"),
        ("--plan-gpus h100", "plan_gpus says what --plan counts with"),
        ("--elimination-distillation 7", "must be 0 or at least 8, got 7"),
        ("--elimination-traces 0", "--elimination-traces must"),
        ("--target-sparsity 1.5", "target_sparsity needs"),
        ("--target-sparsity 0.5 --stable-steps -1", "--stable-steps must"),
        ("--held-out 4", "at the sparsities of target_sparsity"),
        ("--save-total-limit 0", "--save-total-limit must"),
        ("--importance-cap 0.5", "importance_cap"),
        ("--logging-strategy no", "logging_strategy must be steps"),
        ("--no-disable-dropout", "disable_dropout must be True.*rollouts have no dropout"),
        ("--resume-from-checkpoint c", "resume_from_checkpoint must be None.*output_dir"),
        ("--save-only-model", "save_only_model must be False"),
        ("--save-strategy epoch", "save_strategy must be steps"),
        ("--push-to-hub", "push_to_hub must be False.*rlkv-gates push"),
        ("--cast-lm-head-to-fp32", "cast_lm_head_to_fp32 must be False"),
        ("--router-aux-loss-coef 0.01", "router_aux_loss_coef=0.01 is an option of trl that"),
        (
            "--prompts-per-step 4 --gradient-accumulation-steps 1",
            "gradient_accumulation_steps=1 and prompts_per_step=4, which takes 2 passes",
        ),
        (
            "--prompts-per-step 3 --per-device-train-batch-size 8 --steps-per-generation 3",
            "steps_per_generation=3 splits prompts_per_step=3",
        ),
    ],
)
def test_wrong_options_are_named(options: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read(*options.split())


def test_mixed_precision_of_the_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ValueError, match="mixed_precision must be no, got 'bf16'"):
        read()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--data traces --haystack a.txt", "haystack='a.txt' has no effect without --data recall"),
        ("--curriculum a.parquet", "curriculum='a.parquet' has no effect without --data traces"),
        ("--prefill full", "prefill full is for --data traces"),
        ("--data traces --prefill full --gradient-checkpointing", "use prefill local"),
        ("--max-length 10", "max_length must be at least 1000"),
        ("--steps 0", "--steps must be at least 1"),
        ("--l1-weight -1", "--l1-weight must"),
        ("--learning-rate 0", "learning_rate must be above 0"),
    ],
)
def test_wrong_options_of_a_distillation_are_named(options: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse_distill_config(options.split())


def test_choices_are_checked_in_python_too() -> None:
    with pytest.raises(ValueError, match="output_dir is empty"):
        GateTrainingArguments(output_dir="", use_cpu=True)
    with pytest.raises(ValueError, match="data must be one of recall, traces, got 'books'"):
        DistillSettings(data="books")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--config nowhere.yaml", "nowhere.yaml"),
        ("--model x", "error: no problems to train on"),
        ("--model x --finder elimination", "error: no solutions to measure heads on"),
        ("--model x --finder attention", "error: no solutions to measure heads on"),
        ("--curriculum nowhere.parquet", "error: nowhere.parquet: there is no such file"),
    ],
)
def test_the_program_ends_with_one_sentence(
    options: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--use-cpu", "--output-dir", tmp_path / "run"]
    assert run_program("train/grpo_gates.py", *folder, *options.split()) == 2
    assert named in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "run").exists()


# --- the curriculum


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ("--elimination-sparsity 0.5", {"elimination_sparsity": "--finder elimination"}),
        ("--elimination-traces 4", {"elimination_traces": "--finder elimination or attention"}),
        ("--rollout-servers http://a:1", {"rollout_servers": "--rollout vllm-server"}),
        ("--rollout vllm --rollout-patience 9", {"rollout_patience": "--rollout vllm-server"}),
        ("--rollout-kv-gib 3", {"rollout_kv_gib": "--rollout vllm or auto"}),
        ("--rollout vllm-server --rollout-eager", {"rollout_eager": "--rollout vllm or auto"}),
        ("--importance-cap 4", {"importance_cap": "--rollout vllm: .* are not weighed"}),
        ("--rollout vllm --importance-cap 4 --rollout-kv-gib 3", {}),
        ("--rollout vllm-server --rollout-rows 9", {"rollout_rows": "--rollout hf or vllm or"}),
        ("--warmup-steps 5", {"warmup_steps": "--lr-scheduler-type, such as constant_with_"}),
        ("--warmup-steps 5 --lr-scheduler-type linear", {}),
        ("--stable-steps 5", {"stable_steps": "--target-sparsity"}),
        ("--stable-steps 0", {}),
        ("--no-adaptive --tau 0.6", {"tau": "--adaptive$"}),
        ("--held-out-steps 5", {"held_out_steps": "--held-out$"}),
        ("--held-out 8 --held-out-steps 5 --target-sparsity 0.5", {}),
        ("--wandb-project gates", {"wandb_project": "--wandb online or offline$"}),
        ("--recipe published", {}),
        ("--config smol", {}),
    ],
)
def test_options_without_effect_are_named(options: str, needed: dict[str, str]) -> None:
    found = unread_by_grpo(*read(*options.split()))
    assert found.keys() == needed.keys()
    assert all(re.match(needed[name], said) for name, said in found.items())


def test_a_config_may_hold_what_another_kind_of_data_reads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = parse_distill_config(["--config", "distill_smol", "--data", "traces"])
    print_unread(unread_options(settings))
    assert "passkeys has no effect without --data recall\n" in capsys.readouterr().out


def test_the_tiny_model_draws_problems_of_its_own_task(capsys: pytest.CaptureFixture[str]) -> None:
    def draw() -> tuple[Dataset, int]:
        _, found = load_curriculum(settings, training)
        return found, max(prompt[0]["content"].count(" = ") for prompt in found["prompt"])

    settings, training = read("--config", "tiny", "--seed", "5")
    found, longest = draw()
    line = capsys.readouterr().out
    assert "200 problems of the built-in task" in line
    assert "seed 5" in line
    assert len(found) == 200
    assert found[0] == draw()[0][0]
    assert longest_solution(longest + 2) <= training.max_completion_length
    training.max_completion_length = longest_solution(4)
    assert draw()[1] == 2


def test_problems_become_messages_and_answers_text(tmp_path: Path) -> None:
    rows = [{"problem": "1 + 1", "answer": "2"}, {"problem": "2 + 2", "answer": 4}]
    path = write(tmp_path / "a.jsonl", *rows)
    _, found = load_curriculum(*read("--curriculum", path, "--template", "boxed"))
    assert found["answer"] == ["2", "4"]
    assert found[1]["prompt"] == [{"role": "user", "content": fill_template("2 + 2", "boxed")}]


def test_the_curriculum_says_which_template(tmp_path: Path) -> None:
    row = {"problem": "1 + 1", "answer": "2", "template": "plain"}
    path = write(tmp_path / "a.jsonl", row, row)
    assert RLKVSettings(curriculum=path).with_curriculum().template == "plain"
    assert RLKVSettings(curriculum=path, template="boxed").with_curriculum().template == "boxed"
    assert RLKVSettings().with_curriculum().template == "rlkv"
    write(tmp_path / "a.jsonl", row, {**row, "template": "boxed"})
    with pytest.raises(ValueError, match="--template"):
        RLKVSettings(curriculum=path).with_curriculum()
    assert RLKVSettings(curriculum=path, template="boxed").with_curriculum().template == "boxed"


def test_a_curriculum_of_another_model_is_refused(tmp_path: Path) -> None:
    row = {"problem": "1 + 1", "answer": "2"}
    path = write(tmp_path / "c.jsonl", {**row, "model": "owner/other"})
    message = r"owner/other.*tiny.*rlkv-filter --model tiny.*--allow-foreign-curriculum"
    with pytest.raises(ValueError, match=message):
        RLKVSettings(curriculum=path).with_curriculum()
    settings, _ = read("--curriculum", path, "--allow-foreign-curriculum")
    assert settings.with_curriculum().curriculum == path
    for fields in ({"model": "tiny"}, {"model": None}, {}):
        own = write(tmp_path / "own.jsonl", {**row, **fields})
        assert RLKVSettings(curriculum=own).with_curriculum().curriculum == own


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.csv", "x", "a.csv"),
        ("a.jsonl", '{"problem": "1"}\n', "line 1.*problem"),
        ("absent/c.parquet", None, "absent/c.parquet.*rlkv-filter .*--output-dir"),
    ],
)
def test_a_wrong_curriculum_is_named(
    name: str, content: str | None, named: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    settings, args = read("--curriculum", str(tmp_path / name), "--template", "rlkv")
    with pytest.raises(ValueError, match=named):
        load_curriculum(settings.with_curriculum(), args)
