"""Callbacks of a training run: early stop, held-out accuracy, bad gradients, SIGTERM."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from peft import get_peft_model
from transformers import TrainerCallback

from rlkv.attention.head_gate import HeadGateConfig, set_gates
from rlkv.data.problems import hold_out, read_curriculum
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.prompts import render_prompt
from rlkv.training import callbacks
from rlkv.training.callbacks import StopWhenStable
from rlkv.training.run_folder import last_checkpoint
from rlkv.training.trainer import RLKVTrainer
from rlkv.utils.files import read_log
from tests.helpers import random_run
from tests.helpers.gates import make_gates


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> HeadGates:
    """A run that nothing happens to."""
    gates: HeadGates = random_run.run(tmp_path_factory.mktemp("whole") / "run")
    return gates


# --- early stop

START = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
SWAPPED = START[:, [1, 0]]
OTHER = torch.tensor([[0.6, 0.4], [0.9, 0.1]])  # another order of the same full heads
HALVED = START / 2


@pytest.mark.parametrize(
    ("alphas", "sparsities", "steps", "moving", "expected"),
    [
        ([START, HALVED, SWAPPED, SWAPPED, SWAPPED, SWAPPED], [0.5], 3, True, [0, 1, 0, 1, 2, 3]),
        ([START, OTHER, START, OTHER], [0.5, 0.25], 2, True, [0, 0, 0, 0]),
        # steps that leave the gates as they are do not count
        ([START, START, HALVED, HALVED, START], [0.5], 2, False, [0, 0, 1, 1, 2]),
        # gates that are equal decide nothing; equal among the full heads is another thing
        ([torch.ones(2, 2)] * 5, [0.5], 2, True, [0, 0, 0, 0, 0]),
        ([torch.tensor([[1.0, 0.0], [1.0, 0.0]])] * 5, [0.5], 2, True, [0, 1, 2]),
    ],
)
def test_only_steps_that_keep_the_full_heads_count(
    alphas: list[torch.Tensor],
    sparsities: list[float],
    steps: int,
    moving: bool,
    expected: list[int],
) -> None:
    base = make_gates(alpha=START, mean_alpha=START, model=None)
    now = [START]
    callback = StopWhenStable(
        lambda: replace(base, alpha=now[0], mean_alpha=now[0]), sparsities, steps
    )
    counts = []
    for step, alpha in enumerate(alphas, start=1):
        now[0] = alpha * (1 - 1e-3 * step) if moving else alpha
        control = SimpleNamespace(should_save=False, should_training_stop=False)
        state = SimpleNamespace(global_step=step, max_steps=len(alphas) + 1)
        callback.on_step_end(None, state, control)
        resumed = StopWhenStable(callback.make_gates, sparsities, steps)
        resumed.load(callback.state())
        callback = resumed
        counts.append(callback.unchanged)
        assert control.should_save == control.should_training_stop
        if control.should_training_stop:
            break
    assert counts == expected


def test_a_run_stops_and_says_so_and_is_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-steps", "40", "--learning-rate", "0.2", "--save-steps", "100"]
    early = [*options, "--target-sparsity", "0.5", "--stable-steps"]
    gates = random_run.run(tmp_path / "early", [*early, "3"])
    last = gates.training["steps"]
    assert 4 <= last < 40
    told = f"stopped after step {last} of 40: the full heads at sparsity 0.5 have been the same"
    assert told in capsys.readouterr().out
    assert (tmp_path / "early" / "gates.pt").exists()
    again = random_run.run(tmp_path / "early", [*early, "3"])
    assert len(read_log(tmp_path / "early" / "gates.jsonl")) == last
    assert torch.equal(again.alpha, gates.alpha)
    # with a longer patience the run goes on
    assert random_run.run(tmp_path / "early", [*early, "4"]).training["steps"] > last


# --- held-out problems


def plain(folder: Path, full_LH: torch.Tensor) -> dict[str, float]:
    """Measure by transformers' own greedy decoding, a problem at a time."""
    rows = read_curriculum(str(folder / "curriculum.jsonl"))
    args = SimpleNamespace(seed=3, world_size=1)
    _, held = hold_out(
        Dataset.from_list([{"row": row, "prompt": row["problem"]} for row in rows]), 4, args
    )
    assert held is not None
    model, tokenizer = random_run.make_policy()
    gated: Any = get_peft_model(model, HeadGateConfig(sink=2, window=6)).eval()
    set_gates(gated, full_LH.float())
    found = {"accuracy": 0.0, "truncated_share": 0.0, "length_mean": 0.0}
    for row in held["row"]:
        text = render_prompt(tokenizer, row["problem"])
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        whole = gated.generate(**prompt, do_sample=False, max_new_tokens=14)[0]
        ids = whole[prompt["input_ids"].shape[1] :].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=True)
        found["accuracy"] += random_run.checksum_reward([text], [str(row["answer"])])[0] / 4
        found["truncated_share"] += (ids[-1] not in model.generation_config.eos_token_id) / 4
        found["length_mean"] += len(ids) / 4
    return found


def test_figures_are_those_of_greedy_decoding_and_training_does_not_notice(tmp_path: Path) -> None:
    options = ["--held-out", "4", "--target-sparsity", "0.5", "0.25", "--stable-steps", "0"]
    options += ["--max-steps", "3", "--held-out-steps"]
    found = {}
    for name, every, expected in (("seldom", "100", [3]), ("often", "2", [2, 3])):
        found[name] = random_run.run(tmp_path / name, [*options, every])
        logs = read_log(tmp_path / name / "log.jsonl")
        assert [of["step"] for of in logs if "held_out/accuracy_at_0.5" in of] == expected
    often = found["often"]
    assert torch.equal(often.alpha, found["seldom"].alpha)
    for sparsity in (0.5, 0.25):
        full = HeadAllocation.from_gates(often, sparsity).full
        for name, value in plain(tmp_path, full).items():
            assert logs[-1][f"held_out/{name}_at_{sparsity}"] == pytest.approx(value)
            noted = often.training["held_out_figures"][f"{name}_at_{sparsity}"]
            assert noted == pytest.approx(value)


def test_problems_that_are_held_out_are_not_trained_on() -> None:
    drawn = [{"prompt": f"p {number}", "answer": str(number)} for number in range(10)]
    rows = Dataset.from_list(drawn)
    args = SimpleNamespace(seed=1, world_size=2)
    trained, held = hold_out(rows, 4, args)
    assert held is not None
    assert sorted([*trained["answer"], *held["answer"]]) == sorted(rows["answer"])
    assert len(held) == 4
    assert hold_out(rows, 0, args) == (rows, None)
    again = Dataset.from_list([row | {"answer": f"{row['answer']}.0"} for row in drawn])
    for copies in (rows, again):
        trained, held = hold_out(concatenate_datasets([rows, copies]), 4, args)
        assert held is not None
        assert not set(trained["prompt"]) & set(held["prompt"])
    for number, reason in ((10, "leaves none"), (3, "not a multiple of the 2 processes")):
        with pytest.raises(ValueError, match=reason):
            hold_out(rows, number, args)


# --- gradients that are not finite


def spoil(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Make the loss of some steps NaN."""
    stock = RLKVTrainer._policy_loss

    def spoiled(self: RLKVTrainer, model: Any, inputs: dict[str, Any]) -> Any:
        loss, clipped = stock(self, model, inputs)
        return loss * (float("nan") if self.state.global_step + 1 in steps else 1.0), clipped

    monkeypatch.setattr(RLKVTrainer, "_policy_loss", spoiled)


def test_a_bad_step_changes_nothing_and_three_in_a_row_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: HeadGates
) -> None:
    spoil(monkeypatch, 2)
    gates = random_run.run(tmp_path / "run", ["--max-steps", "3"])
    alphas = [record["alpha"] for record in read_log(tmp_path / "run" / "gates.jsonl")]
    assert alphas[0] == alphas[1] != alphas[2]
    assert gates.alpha.isfinite().all()
    records = read_log(tmp_path / "run" / "log.jsonl")
    assert [record["train/skipped_steps"] for record in records] == [0, 1, 1]
    monkeypatch.undo()
    spoil(monkeypatch, 2, 3, 4)
    with pytest.raises(ValueError, match="3 steps in a row are not finite: try --dtype float32"):
        random_run.run(tmp_path / "again", ["--save-steps", "100"])
    monkeypatch.undo()
    assert torch.equal(random_run.run(tmp_path / "again").alpha, whole.alpha)


# --- SIGTERM

NEVER = ["--save-steps", "100"]  # but at the end


class Terminate(TrainerCallback):
    """Sends SIGTERM to this process in a step, which then takes ``seconds`` longer."""

    def __init__(self, step: int, seconds: float = 0.0) -> None:
        self.step = step
        self.seconds = seconds

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
            until = time.monotonic() + self.seconds
            while time.monotonic() < until:
                time.sleep(0.01)


@pytest.mark.parametrize(
    ("grace", "terminate", "told"),
    [
        (20.0, Terminate(2), "after step 2: the same command goes on"),
        (0.1, Terminate(3, seconds=60), "within a step"),
    ],
)
def test_a_step_is_finished_or_given_up_and_the_run_goes_on_from_the_last_checkpoint(
    grace: float,
    terminate: Terminate,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    whole: HeadGates,
) -> None:
    monkeypatch.setattr(callbacks, "GRACE", grace)
    before = signal.getsignal(signal.SIGTERM)
    started = time.monotonic()
    options = NEVER if grace > 1 else []
    with pytest.raises(SystemExit) as ended:
        random_run.run(tmp_path / "run", options, [terminate])
    assert ended.value.code == 0
    assert time.monotonic() - started < 60
    if grace > 1:
        assert signal.getsignal(signal.SIGTERM) == before
    signal.signal(signal.SIGTERM, before)
    assert told in capsys.readouterr().out
    assert last_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-2"
    assert not (tmp_path / "run" / "gates.pt").exists()
    assert torch.equal(random_run.run(tmp_path / "run", options).alpha, whole.alpha)


def test_in_the_last_step_the_run_ends_as_usual(tmp_path: Path) -> None:
    gates = random_run.run(tmp_path / "run", NEVER, [Terminate(5)])
    assert gates.training["steps"] == 5
    assert (tmp_path / "run" / "gates.pt").exists()
