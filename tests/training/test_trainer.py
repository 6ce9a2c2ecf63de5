"""Whole GRPO runs on a random model: what changes, the log, the export, and exact resume."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from rlkv.attention import branches
from rlkv.attention.head_gate import gate_parameters, gates_matrix, set_gates
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from rlkv.rollout.base import Rows, completion_text
from rlkv.rollout.hf import GatedHFEngine
from rlkv.training import grpo
from rlkv.training.trainer import RLKVTrainer, verifier_reward
from rlkv.utils.files import read_log, write_jsonl
from tests.helpers import engine_run, random_run
from tests.helpers.models import build_tokenizer, make_tiny_model

FAST = ["--learning-rate", "0.3"]
START = torch.tensor([[0.0, 0.3, 0.6, 1.0], [0.2, 0.4, 0.8, 0.5]])


class Watch(TrainerCallback):
    """Keeps the frozen parameters and optimizer settings, and may stop a run like a crash."""

    def __init__(self, crash_at: int | None = None) -> None:
        self.crash_at = crash_at
        self.frozen: list[dict[str, torch.Tensor]] = []
        self.groups: list[dict[str, Any]] = []
        self.gates: list[torch.Tensor] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        named = given["model"].named_parameters()
        self.frozen.append({n: p.detach().clone() for n, p in named if not p.requires_grad})

    on_train_end = on_train_begin

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.gates.append(gates_matrix(given["model"]))
        self.groups = [group for group in given["optimizer"].param_groups if group["params"]]
        if state.global_step == self.crash_at:
            raise KeyboardInterrupt


def log_of(folder: Path) -> list[dict[str, Any]]:
    """Return the records without their times."""
    records = read_log(folder / "log.jsonl")
    return [{k: v for k, v in record.items() if not k.startswith("time/")} for record in records]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watch, HeadGates]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    watch = Watch()
    return folder, watch, random_run.run(folder, FAST, [watch])


def test_gates_are_trained_within_their_bounds_and_nothing_else(
    whole_run: tuple[Path, Watch, HeadGates],
) -> None:
    _, watch, gates = whole_run
    history = torch.stack(watch.gates)
    assert history.shape == (5, 2, 4)
    assert (history != 1).any(0).any(1).all()  # every layer's parameter; a gate may be held at 1
    assert history.min() == 0 <= history.max() <= 1  # lr 0.3: without the clamp some would be below
    before, after = watch.frozen
    assert len(before) > 10
    assert all(torch.equal(before[name], after[name]) for name in before)
    (group,) = watch.groups
    assert (group["weight_decay"], group["lr"], tuple(group["betas"])) == (0.017, 0.3, (0.9, 0.999))
    assert (history.mean(0) - gates.mean_alpha).abs().max() < 1e-6  # heads are ranked by it


def test_the_log_has_a_record_per_step(whole_run: tuple[Path, Watch, HeadGates]) -> None:
    """Which figures it has is recorded in tests/golden."""
    records = read_log(whole_run[0] / "log.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    for record in records:
        assert record["gates/grad_norm"] > 0
        assert record["policy/clip_share"] == 0  # one update per rollout: the ratio is 1
        # cached decoding and the forward of the loss differ by rounding
        mean, largest = record["rollout/logprob_diff_mean"], record["rollout/logprob_diff_max"]
        assert 0 < mean <= largest < 2e-5
    assert any(0 < record["reward/zero_spread_share"] < 1 for record in records)
    assert any(record["penalty/beta_prime"] > 0 for record in records)


def naive_loss(
    model: Any, gates: list[torch.Tensor], texts: Sequence[Any], recipe: str
) -> torch.Tensor:
    """The objective by its formula, a text at a time without padding."""
    rewards = torch.tensor([reward for *_, reward in texts])
    tokens = torch.tensor([float(len(completion)) for _, completion, _ in texts])
    number = len(texts)
    policy = torch.zeros(())
    weights = []
    for prompt, completion, reward in texts:
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])
        if recipe == "paper":
            group = torch.tensor([other for of, _, other in texts if of == prompt])
            assert len(group) == 4
            advantage = (reward - group.mean()) / (group.std() + 1e-4)
            policy = policy - advantage * chosen.mean() / number
            weights.append(0.05 * group.mean().expm1() if group.mean() > 0.4 else torch.zeros(()))
        else:  # every token counts the same
            mean = (tokens * rewards).sum() / tokens.sum()
            variance = (tokens * (rewards - mean) ** 2).sum() / (tokens.sum() - 1)
            advantage = (reward - mean) / (variance.sqrt() + 1e-6)
            policy = policy - advantage * chosen.sum() / tokens.mean() / number
            weights.append(0.05 * rewards.mean().expm1())
    return policy + torch.stack(weights).mean() * torch.cat(gates).mean()


@pytest.mark.parametrize("recipe", ["paper", "published"])
@pytest.mark.parametrize("family", ["llama", "granite", "gemma2"])  # scaled and capped logits
def test_the_gradient_is_that_of_the_formula(
    family: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build_tokenizer()
    base = make_tiny_model(family, vocab_size=len(tokenizer))
    base.generation_config.eos_token_id = [2, *range(20, 40)]
    monkeypatch.setattr(random_run, "make_policy", lambda: (base, tokenizer))
    start = torch.rand(3, 4, generator=torch.Generator().manual_seed(2)) * 0.8 + 0.1
    texts: list[tuple[list[int], list[int], float]] = []
    found: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    judge = RLKVTrainer.judge

    def judged(trainer: Any, prompts: Any, completions: Any, answers: Any) -> list[float]:
        rewards = judge(trainer, prompts, completions, answers)
        texts.extend(zip(prompts, completions, rewards, strict=True))
        return rewards

    class Compare(TrainerCallback):
        def on_train_begin(self, *_: Any, **given: Any) -> None:
            set_gates(given["model"], start)

        def on_pre_optimizer_step(self, *_: Any, **given: Any) -> None:
            gates = [gate for _, gate in gate_parameters(given["model"])]
            found.extend(gate.grad.clone() for gate in gates)
            with monkeypatch.context() as dense:
                dense.setattr(branches, "MIN_BLOCK", 1000)
                loss = naive_loss(given["model"], gates, texts, recipe)
                expected.extend(torch.autograd.grad(loss, gates))

    monkeypatch.setattr(RLKVTrainer, "judge", judged)
    monkeypatch.setattr(branches, "MIN_BLOCK", 4)  # texts this short take the banded form
    options = ["--recipe", recipe, "--max-steps", "1", "--max-grad-norm", "1000"]
    random_run.run(tmp_path / "run", options, [Compare()])
    assert len(texts) == 16
    assert max(len(prompt) + len(completion) for prompt, completion, _ in texts) > 30
    assert len(found) == 3
    for mine, naive in zip(found, expected, strict=True):
        assert torch.allclose(mine, naive, rtol=2e-3, atol=1e-6)


def test_without_adaptive_weighting_the_penalty_does_not_look_at_the_rewards(
    whole_run: tuple[Path, Watch, HeadGates], tmp_path: Path
) -> None:
    options = ["--no-adaptive", "--learning-rate", "0.001", "--max-steps", "1"]
    gates = random_run.run(tmp_path / "run", options)
    constant, adaptive = log_of(tmp_path / "run")[0], log_of(whole_run[0])[0]
    assert constant["penalty/beta_prime"] == pytest.approx(0.05 * (math.e - 1), rel=1e-6)
    # the same rollout, not all of it right
    assert constant["reward/mean"] == adaptive["reward/mean"] < 1
    assert constant["penalty/beta_prime"] > adaptive["penalty/beta_prime"]
    assert gates.alpha.min() > 0.998  # where none are given, gates start at 1


def test_a_resumed_run_equals_an_uninterrupted_one(
    whole_run: tuple[Path, Watch, HeadGates], tmp_path: Path
) -> None:
    # 10 problems are 2 steps an epoch (4 problems each): at an epoch's end and within the next
    for crash_at in (2, 3):
        with pytest.raises(KeyboardInterrupt):
            random_run.run(tmp_path / "run", FAST, [Watch(crash_at)])
    assert random_run.run(tmp_path / "run", FAST) == whole_run[2]
    assert log_of(tmp_path / "run") == log_of(whole_run[0])


def test_a_model_s_own_dropout_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer()
    model = make_tiny_model("phi", vocab_size=len(tokenizer), resid_pdrop=0.3)
    monkeypatch.setattr(random_run, "make_policy", lambda: (model, tokenizer))
    random_run.run(tmp_path / "run", ["--max-steps", "1"])
    (record,) = log_of(tmp_path / "run")
    assert record["rollout/logprob_diff_mean"] < 1e-5


def test_thoughts_that_the_prompt_opens_are_rewarded_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[str] = []
    model, tokenizer = random_run.make_policy()
    tokenizer.chat_template = "{{ messages[0].content }} <think>"
    tokenizer.add_tokens(["<think>"])
    model.resize_token_embeddings(len(tokenizer))

    def reward(completions: Sequence[str], answers: Sequence[str]) -> list[bool]:
        judged.extend(completions)
        return [True] * len(completions)

    monkeypatch.setattr(random_run, "make_policy", lambda: (model, tokenizer))
    monkeypatch.setattr(random_run, "checksum_reward", reward)
    random_run.run(tmp_path / "run", ["--max-steps", "1"])
    assert judged
    assert all(text.startswith("<think>") for text in judged)


@pytest.mark.parametrize("special", [False, True])
def test_the_end_of_thoughts_counts_where_it_is_a_special_token(special: bool) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=special)
    trainer: Any = SimpleNamespace(_tokenizer=tokenizer, reward=verifier_reward)
    said = "a=1 </think> Therefore, the final answer is: $\\boxed{ 3 }$. I hope it is correct <eos>"
    texts = ["b=2 <think>", said]
    prompt, completion = (tokenizer(text, add_special_tokens=False).input_ids for text in texts)
    assert RLKVTrainer.judge(trainer, [prompt] * 2, [completion] * 2, ["3", "4"]) == [1.0, 0.0]
    text = completion_text(tokenizer, completion)
    assert "<eos>" not in text
    assert text.replace(" ", "").startswith("a=1</think>Therefore")


def test_a_run_resumed_within_a_rollout_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    options = ["--prompts-per-step", "2", "--steps-per-generation", "2", "--max-steps", "4"]
    whole = random_run.run(tmp_path / "whole", options)
    with pytest.raises(KeyboardInterrupt):
        random_run.run(tmp_path / "run", options, [Watch(crash_at=3)])
    assert random_run.run(tmp_path / "run", options) == whole
    assert log_of(tmp_path / "run") == log_of(tmp_path / "whole")


def test_a_finished_run_is_exported_again_and_no_other_takes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    expected = random_run.run(run, ["--max-steps", "1"])
    (run / "gates.pt").unlink()  # killed during the export
    monkeypatch.setattr(RLKVTrainer, "training_step", lambda *_, **__: pytest.fail("trained again"))
    assert random_run.run(run, ["--max-steps", "1"]) == expected
    assert HeadGates.load(run / "gates.pt") == expected
    with pytest.raises(ValueError, match=r"l1_beta 0\.05 -> 0\.1"):
        random_run.run(run, ["--max-steps", "1", "--l1-beta", "0.1"])
    with pytest.raises(ValueError, match="--resume"):
        random_run.run(run, ["--max-steps", "1", "--no-resume"])
    shutil.rmtree(run / "checkpoint-1")
    with pytest.raises(ValueError, match="finished run whose checkpoints are gone"):
        random_run.run(run, ["--max-steps", "1"])


def test_more_epochs_go_on_where_fewer_ended(tmp_path: Path) -> None:
    options = ["--max-steps", "-1", "--num-iterations", "2", "--num-train-epochs"]
    for epochs in (1, 2):  # of 10 problems, 4 a rollout, 2 steps each
        random_run.run(tmp_path / "run", [*options, str(epochs)])
        steps = [record["step"] for record in log_of(tmp_path / "run")]
        assert steps == [*range(1, 4 * epochs + 1)]


def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(named: str, *options: str) -> None:
        with pytest.raises(ValueError, match=named):
            random_run.run(tmp_path / "run", options)

    HeadGates(alpha=torch.ones(3, 4)).save(tmp_path / "others.pt")
    refused(r"others\.pt.*3 layers", "--init-gates", str(tmp_path / "others.pt"))
    refused("liger_kernels needs a CUDA GPU", "--liger-kernels")
    refused("steps_per_generation=1 makes several", "--steps-per-generation", "1")
    positions = r"the model has \d+ positions: lower --max-completion"
    refused(positions, "--max-completion-length", "9999")
    model, tokenizer = random_run.make_policy()
    with monkeypatch.context() as patch:
        patch.setattr(random_run, "make_policy", lambda: (model, tokenizer))
        for name in ("attention_dropout", "residual_dropout"):
            patch.setattr(model.config, name, 0.1, raising=False)
            refused(f"{name} is 0.1")
            patch.setattr(model.config, name, 0.0)
        rope = {"rope_type": "longrope", "original_max_position_embeddings": 50}
        with patch.context() as rotated:
            rotated.setattr(model.config, "rope_parameters", rope)
            refused("longer than 50 .* in two ways", "--max-completion-length", "64")
        patch.setattr(tokenizer, "chat_template", None)
        refused(r"no chat template, .* chat_template\.jinja")
    curriculum = tmp_path / "curriculum.jsonl"
    for answer in (math.nan, "None"):  # of a row without an answer, as pandas writes it
        rows = [{"problem": "p", "answer": 7}, {"problem": "p", "answer": answer}]
        write_jsonl(curriculum, rows)
        refused("row 2 has no answer")
    random_run.write_curriculum(curriculum, number=3)
    refused(r"3 problems.*prompts_per_step")
    assert not (tmp_path / "run").exists()


def test_liger_kernels_come_after_the_forward_call_that_gates_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are on the CPU then, where Liger has no kernels."""
    gates: list[int] = []

    def apply(model: Any) -> None:
        gates.append(len(gate_parameters(model)))

    monkeypatch.setattr(grpo, "find_liger", lambda model, device: apply)
    random_run.run(tmp_path / "run", ["--liger-kernels", "--max-steps", "1"])
    assert gates == [2]


def test_a_run_is_tied_to_the_gates_that_it_starts_from(tmp_path: Path) -> None:
    shape = ModelShape.from_config(random_run.make_policy()[0].config)
    start = HeadGates(START, model=shape, training={"method": "trace_distillation", "steps": 7})
    paths = [tmp_path / name for name in ("start.pt", "moved.safetensors", "other.pt")]
    start.save(paths[0])
    start.save(paths[1])
    replace(start, alpha=START.flip(0), mean_alpha=START.flip(0)).save(paths[2])

    def run(steps: int, path: Path) -> HeadGates:
        options = ["--max-steps", str(steps), "--learning-rate", "0.001", "--init-gates", str(path)]
        return random_run.run(tmp_path / "run", options)

    first = run(1, paths[0])
    # AdamW's first step moves a gate by the learning rate at most, plus the weight decay of
    # 0.017 * 0.001
    assert 0 < (first.alpha - START).abs().max() < 0.00102
    facts = first.training["init_gates"]
    assert (facts["method"], facts["steps"]) == ("trace_distillation", 7)
    assert str(tmp_path) not in json.dumps(first.training)
    with pytest.raises(ValueError, match=r"\(init_gates"):
        run(2, paths[2])
    assert run(2, paths[1]).training["init_gates"] == facts


# --- recipes and engines


def test_a_published_run_does_not_depend_on_its_micro_batches(tmp_path: Path) -> None:
    options = ["--recipe", "published", "--learning-rate", "0.2", "--max-steps", "3"]
    options.append("--per-device-train-batch-size")
    whole = random_run.run(tmp_path / "whole", [*options, "16"])
    # 16 rows in 18 slots
    parts = random_run.run(tmp_path / "parts", [*options, "3"])
    assert (whole.alpha < 0.9).any()
    assert (whole.alpha - parts.alpha).abs().max() < 1e-5
    for record in log_of(tmp_path / "parts"):
        mean = record["reward/mean"]
        expected = 0.05 * math.expm1(mean) if mean > 0.4 else 0.0
        assert record["penalty/beta_prime"] == pytest.approx(expected, rel=1e-6)
        # advantages have mean 0 over tokens
        assert record["policy/loss"] == pytest.approx(0, abs=1e-6)


def test_a_continued_run_saves_as_often_as_it_is_asked_to(tmp_path: Path) -> None:
    random_run.run(tmp_path / "run", ["--max-steps", "1", "--save-steps", "100"])
    random_run.run(tmp_path / "run", ["--max-steps", "3", "--save-total-limit", "9"])
    saved = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert saved == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_a_run_that_is_closed_at_an_earlier_checkpoint_has_its_log(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    random_run.run(folder, ["--max-steps", "3", "--save-steps", "2"])
    shutil.rmtree(folder / "checkpoint-3")  # as if killed in step 3
    gates = random_run.run(folder, ["--max-steps", "2"])
    assert gates.training["steps"] == 2
    assert [record["step"] for record in log_of(folder)] == [1, 2]


def test_options_of_trl_are_compared_when_a_run_is_continued(tmp_path: Path) -> None:
    random_run.run(tmp_path / "run", ["--max-steps", "1", "--warmup-steps", "4"])
    with pytest.raises(ValueError, match=r"other settings \(trl \{'warmup_steps': 4.0\} -> \{\}\)"):
        random_run.run(tmp_path / "run", ["--max-steps", "2"])
    options = ["--max-steps", "2", "--warmup-steps", "4", "--dataloader-num-workers", "0"]
    random_run.run(tmp_path / "run", options)


def test_gates_on_a_quantized_base_are_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = random_run.run(tmp_path / "plain", ["--max-steps", "2"])
    model, tokenizer = random_run.make_policy()
    model.is_loaded_in_8bit = True
    monkeypatch.setattr(random_run, "make_policy", lambda: (model, tokenizer))
    found = random_run.run(tmp_path / "quantized", ["--max-steps", "2"])
    assert torch.equal(found.alpha, plain.alpha)
    assert found.alpha.min() < 1


class OffEngine(GatedHFEngine):
    """Says of the fourth and eleventh token that they were less likely, by ``exp(shift)``."""

    shift = 0.0

    def sample(self, *args: Any) -> Iterator[Any]:
        for index, sample in super().sample(*args):
            logprobs = list(sample.logprobs)
            logprobs[3::7] = [value - self.shift for value in logprobs[3::7]]
            yield index, replace(sample, logprobs=logprobs)


def test_tokens_above_the_cap_are_left_out_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of e^1.7 = 5.5 and e^2 = 7.4 are above 5, e^1.5 = 4.5 is not."""

    def run(shift: float) -> tuple[float, torch.Tensor]:
        engine = engine_run.make_engine(OffEngine)
        engine.shift = shift
        monkeypatch.setattr("rlkv.training.grpo.open_engine", lambda *_: nullcontext(engine))
        options = ["--rollout", "vllm-server", "--max-steps", "1", "--learning-rate", "0.2"]
        folder = tmp_path / f"{shift}"
        gates = random_run.run(folder, [*options, "--recipe", "published"])
        return log_of(folder)[0]["rollout/truncated_share"], gates.alpha

    below, above, further = (run(shift) for shift in (1.5, 1.7, 2.0))
    assert below[0] == 0
    assert 0.05 < above[0] == further[0] < 0.25
    assert torch.equal(above[1], further[1])
    assert not torch.equal(below[1], further[1])


class OneServerOff(GatedHFEngine):
    """Every fourth row is the second server's, whose weights are others."""

    shift = 0.9

    def sample(self, rows: Rows, *args: Any) -> Iterator[Any]:
        for index, sample in super().sample(rows, *args):
            if rows.numbers[index] % 4 == 3:
                logprobs = [value - self.shift for value in sample.logprobs]
                sample = replace(sample, logprobs=logprobs, source=1)
            yield index, sample


def test_a_server_with_other_weights_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_run.make_engine(OneServerOff)  # the mean over all rows is far from the limit
    monkeypatch.setattr("rlkv.training.grpo.open_engine", lambda *_: nullcontext(engine))
    servers = ["--rollout", "vllm-server", "--rollout-servers", "http://good:1, http://bad:2"]
    named = r"by 0\.90 on average: the rollout engine at http://bad:2 must serve"
    with pytest.raises(ValueError, match=named):
        random_run.run(tmp_path / "run", servers)


def test_rows_of_a_server_that_is_gone_are_trained_on_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint lies between the two steps that use one rollout."""
    engine = engine_run.make_engine(OneServerOff)
    engine.shift = 0.0
    monkeypatch.setattr("rlkv.training.grpo.open_engine", lambda *_: nullcontext(engine))
    options = ["--rollout", "vllm-server", "--num-iterations", "2", "--rollout-servers"]
    random_run.run(tmp_path / "run", [*options, "http://a:1,http://b:2", "--max-steps", "1"])
    found = random_run.run(tmp_path / "run", [*options, "http://a:1", "--max-steps", "2"])
    assert found.training["steps"] == 2
