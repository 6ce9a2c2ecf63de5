"""A whole training run on a random model: what changes, what is logged, what is exported, and exact
resume.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import TrainerCallback

from rlkv.attention.head_gate import gates_matrix
from rlkv.gates.head_gates import HeadGates
from rlkv.training.trainer import RLKVTrainer
from rlkv.utils.files import read_log
from tests.helpers import random_run

KEYS = {
    *[
        "step",
        "reward/mean",
        "reward/std",
        "reward/zero_spread_share",
        "response/length_mean",
        "response/length_max",
    ],
    *[
        "response/truncated_share",
        "penalty/beta_prime",
        "penalty/value",
        "policy/loss",
        "policy/clip_share",
    ],
    *[
        "gates/mean",
        "gates/below_0.1",
        "gates/below_0.5",
        "gates/at_0",
        "gates/at_1",
        "gates/grad_norm",
    ],
    *["rollout/logprob_diff_mean", "rollout/logprob_diff_max", "rollout/truncated_share"],
    *["train/learning_rate", "time/rollout_s", "time/reward_s", "time/update_s", "time/step_s"],
    *["time/step_cpu_s", "train/skipped_steps", "epoch"],
}


class Watch(TrainerCallback):
    """Keeps the frozen parameters and optimizer settings of the run, and may stop it like a crash."""

    def __init__(self, crash_at: int | None = None) -> None:
        self.crash_at = crash_at
        self.frozen_before: dict[str, torch.Tensor] = {}
        self.frozen_after: dict[str, torch.Tensor] = {}
        self.groups: list[dict[str, Any]] = []
        self.ranges: list[tuple[float, float]] = []

    @staticmethod
    def _frozen(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {
            name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad
        }

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.frozen_before = self._frozen(model)

    def on_step_end(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        alpha = gates_matrix(model)
        self.ranges.append((alpha.min().item(), alpha.max().item()))
        self.groups = [
            {k: v for k, v in group.items() if k != "params"}
            for group in optimizer.param_groups
            if group["params"]
        ]
        if state.global_step == self.crash_at:
            raise KeyboardInterrupt

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.frozen_after = self._frozen(model)


def without_times(path: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in record.items() if not k.startswith("time/")} for record in read_log(path)
    ]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watch, HeadGates]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    watch = Watch()
    gates = random_run.run(folder, ["--image_steps", "5", "--learning_rate", "0.3"], [watch])
    return folder, watch, gates


def test_gates_are_trained_and_nothing_else(whole_run: tuple[Path, Watch, HeadGates]) -> None:
    folder, watch, _ = whole_run
    history = torch.tensor([record["alpha"] for record in read_log(folder / "gates.jsonl")])
    assert (history != 1).any(0).any(1).all()  # every layer's parameter; a gate may be held at 1
    assert watch.frozen_before.keys() == watch.frozen_after.keys()
    assert len(watch.frozen_before) > 10
    for name, before in watch.frozen_before.items():
        assert torch.equal(before, watch.frozen_after[name]), name


def test_gates_stay_in_the_unit_interval(whole_run: tuple[Path, Watch, HeadGates]) -> None:
    _, watch, gates = whole_run
    assert all(0 <= low <= high <= 1 for low, high in watch.ranges)
    assert (gates.alpha == 0).any()  # lr 0.3: without the clamp some would be below
    assert len(watch.ranges) == 5


def test_the_optimizer_is_the_papers(whole_run: tuple[Path, Watch, HeadGates]) -> None:
    _, watch, _ = whole_run
    assert len(watch.groups) == 1
    group = watch.groups[0]
    assert (group["weight_decay"], group["lr"], tuple(group["betas"])) == (0.017, 0.3, (0.9, 0.999))


def test_the_log_has_every_key_at_every_step(whole_run: tuple[Path, Watch, HeadGates]) -> None:
    folder, _, _ = whole_run
    records = read_log(folder / "log.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    for record in records:
        assert record.keys() == KEYS
        assert all(isinstance(value, int | float) for value in record.values())
    assert any(0 < record["reward/zero_spread_share"] < 1 for record in records)
    assert any(record["penalty/beta_prime"] > 0 for record in records)
    assert all(record["gates/grad_norm"] > 0 for record in records)
    assert all(
        record["policy/clip_share"] == 0 for record in records
    )  # one update per rollout: the ratio is 1
    # cached decoding and the forward of the loss differ by rounding
    assert all(
        0 < record["rollout/logprob_diff_mean"] <= record["rollout/logprob_diff_max"] < 2e-5
        for record in records
    )


def test_without_adaptive_weighting_the_penalty_does_not_look_at_the_rewards(
    whole_run: tuple[Path, Watch, HeadGates], tmp_path: Path
) -> None:
    folder, _, _ = whole_run
    random_run.run(tmp_path / "run", ["--adaptive", "false", "--learning_rate", "0.3"])
    constant, adaptive = read_log(tmp_path / "run" / "log.jsonl"), read_log(folder / "log.jsonl")
    assert [r["penalty/beta_prime"] for r in constant] == pytest.approx(
        [0.05 * (math.e - 1)] * 5, rel=1e-6
    )
    assert (
        constant[0]["reward/mean"] == adaptive[0]["reward/mean"] < 1
    )  # the same rollout, not all of it right
    assert constant[0]["penalty/beta_prime"] > adaptive[0]["penalty/beta_prime"]
    assert HeadGates.load(tmp_path / "run" / "gates.pt").training["adaptive"] is False


def test_rank_is_the_mean_of_the_gates_over_the_training(
    whole_run: tuple[Path, Watch, HeadGates],
) -> None:
    folder, _, gates = whole_run
    history = torch.tensor([record["alpha"] for record in read_log(folder / "gates.jsonl")])
    assert history.shape == (5, 2, 4)
    assert (history.mean(0) - gates.mean_alpha).abs().max() < 2e-6  # six decimals in the log
    assert (history[-1] - gates.alpha).abs().max() < 2e-6


def test_the_export_is_whole(whole_run: tuple[Path, Watch, HeadGates]) -> None:
    folder, _, gates = whole_run
    for name in ("gates.pt", "gates.safetensors", "adapter"):
        assert HeadGates.load(folder / name) == gates, name
    assert torch.equal(HeadGates.load(folder / "adapter_weights.tsv").alpha, gates.alpha)
    for name in (
        "heat_map.png",
        "histogram.png",
        "training_curves.png",
        "images/heat_map_000005.png",
    ):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["training"]["steps"] == 5
    assert summary["training"]["final"]["gates/mean"] == pytest.approx(gates.alpha.mean().item())
    model, _ = random_run.make_policy()
    loaded = PeftModel.from_pretrained(model, folder / "adapter")
    assert torch.equal(gates_matrix(loaded), gates.alpha)
    assert (gates.sink, gates.window, gates.model.num_kv_heads) == (2, 6, 4)


SCHEMES = {
    "one rollout per step": [],
    "two steps per rollout": [
        *["--prompts_per_step", "2", "--steps_per_generation", "2", "--num_iterations", "1"],
        *["--per_device_train_batch_size", "8", "--max_steps", "6"],
    ],
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_resumed_run_equals_an_uninterrupted_one(scheme: str, tmp_path: Path) -> None:
    options = SCHEMES[scheme]
    expected = random_run.run(tmp_path / "whole", options)
    # 10 problems are 2 steps an epoch (4 problems each): crashes in several epochs, one of them at
    # an epoch's start
    for crash_at in (2, 3, 4):
        with pytest.raises(KeyboardInterrupt):
            random_run.run(tmp_path / "crashed", options, [Watch(crash_at)])
    found = random_run.run(tmp_path / "crashed", options)
    assert torch.equal(found.alpha, expected.alpha)
    assert torch.equal(found.mean_alpha, expected.mean_alpha)
    for name in ("log.jsonl", "gates.jsonl"):
        assert without_times(tmp_path / "crashed" / name) == without_times(
            tmp_path / "whole" / name
        )


def test_a_finished_run_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = random_run.run(tmp_path / "run", ["--max_steps", "2"])
    (tmp_path / "run" / "gates.pt").unlink()  # killed during the export
    monkeypatch.setattr(
        RLKVTrainer, "training_step", lambda *args, **kwargs: pytest.fail("trained again")
    )
    again = random_run.run(tmp_path / "run", ["--max_steps", "2"])
    assert again == expected
    assert HeadGates.load(tmp_path / "run" / "gates.pt") == expected


def test_other_settings_or_no_resume_are_refused(tmp_path: Path) -> None:
    random_run.run(tmp_path / "run", ["--max_steps", "1"])
    with pytest.raises(ValueError, match=r"l1_beta 0\.05 -> 0\.1"):
        random_run.run(tmp_path / "run", ["--max_steps", "1", "--l1_beta", "0.1"])
    random_run.write_curriculum(tmp_path / "curriculum.jsonl", number=11)
    with pytest.raises(ValueError, match="problems '"):
        random_run.run(tmp_path / "run", ["--max_steps", "1"])
    with pytest.raises(ValueError, match="--resume"):
        random_run.run(tmp_path / "run", ["--max_steps", "1", "--resume", "false"])


def test_too_few_problems_are_named(tmp_path: Path) -> None:
    random_run.write_curriculum(tmp_path / "curriculum.jsonl", number=3)
    with pytest.raises(ValueError, match=r"3 problems.*prompts_per_step"):
        random_run.run(tmp_path / "run")


def test_dropout_in_attention_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = random_run.make_policy()
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    monkeypatch.setattr(random_run, "make_policy", lambda: (model, tokenizer))
    with pytest.raises(ValueError, match="attention_dropout"):
        random_run.run(tmp_path / "run", ["--max_steps", "1"])
    assert not (tmp_path / "run" / "run_config.json").exists()


def test_more_epochs_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    for epochs, steps in ((1, 2), (2, 4)):  # of 10 problems, 4 a step
        random_run.run(tmp_path / "run", ["--max_steps", "-1", "--num_train_epochs", str(epochs)])
        assert [record["step"] for record in read_log(tmp_path / "run" / "log.jsonl")] == [
            *range(1, steps + 1)
        ]


def test_a_run_of_epochs_with_several_updates_per_rollout_is_not_ended_early(
    tmp_path: Path,
) -> None:
    class Interrupt(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                raise KeyboardInterrupt

    options = ["--max_steps", "-1", "--num_train_epochs", "1", "--num_iterations", "2"]
    with pytest.raises(KeyboardInterrupt):
        random_run.run(tmp_path / "run", options, [Interrupt()])
    random_run.run(tmp_path / "run", options)
    assert [record["step"] for record in read_log(tmp_path / "run" / "log.jsonl")] == [1, 2, 3, 4]
