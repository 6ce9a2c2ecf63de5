"""Accuracy on held-out problems: what plain greedy decoding finds, measured without a trace in the
training.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model

from rlkv.attention.head_gate import HeadGateConfig, set_gates
from rlkv.data.problems import read_curriculum
from rlkv.gates.allocation import HeadAllocation
from rlkv.models.prompts import build_messages
from rlkv.training.callbacks import hold_out
from rlkv.utils.files import read_log
from tests.helpers import random_run

OPTIONS = [
    "--held_out",
    "4",
    "--target_sparsity",
    "0.5",
    "0.25",
    "--stable_steps",
    "0",
    "--max_steps",
    "3",
]
NAMES = ("accuracy", "truncated_share", "length_mean")


def plain(folder: Path, full_LH: torch.Tensor) -> tuple[float, float, float]:
    """The figures by transformers' own greedy decoding, a problem at a time."""
    rows = read_curriculum(str(folder / "curriculum.jsonl"))
    _, held = hold_out(
        Dataset.from_list([{"row": row} for row in rows]), 4, SimpleNamespace(seed=3, world_size=1)
    )
    assert held is not None
    model, tokenizer = random_run.make_policy()
    gated: Any = get_peft_model(model, HeadGateConfig(sink=2, window=6)).eval()
    set_gates(gated, full_LH.float())
    found = []
    for row in held["row"]:
        prompt = tokenizer.apply_chat_template(
            build_messages(row["problem"], "rlkv"),
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids = gated.generate(**prompt, do_sample=False, max_new_tokens=14)[
            0, prompt["input_ids"].shape[1] :
        ].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=True)
        right = random_run.checksum_reward([text], [str(row["answer"])])[0]
        found.append((right, ids[-1] not in model.generation_config.eos_token_id, len(ids)))
    accuracy, truncated, length = (sum(values) / 4 for values in zip(*found, strict=True))
    return accuracy, truncated, length


def test_figures_are_those_of_greedy_decoding_and_training_does_not_notice(tmp_path: Path) -> None:
    often = random_run.run(tmp_path / "often", [*OPTIONS, "--held_out_steps", "2"])
    seldom = random_run.run(tmp_path / "seldom", [*OPTIONS, "--held_out_steps", "100"])
    assert torch.equal(often.alpha, seldom.alpha)
    logs = [read_log(tmp_path / name / "log.jsonl") for name in ("often", "seldom")]
    measured = [
        [record["step"] for record in log if "held_out/accuracy_at_0.5" in record] for log in logs
    ]
    assert measured == [[2, 3], [3]]
    for sparsity in (0.5, 0.25):
        expected = plain(tmp_path, HeadAllocation.from_gates(often, sparsity).full)
        for name, value in zip(NAMES, expected, strict=True):
            assert logs[0][-1][f"held_out/{name}_at_{sparsity}"] == pytest.approx(value)
            assert often.training["held_out_figures"][f"{name}_at_{sparsity}"] == pytest.approx(
                value
            )


def test_problems_that_are_held_out_are_not_trained_on() -> None:
    rows = Dataset.from_list([{"answer": str(number)} for number in range(10)])
    args = SimpleNamespace(seed=1, world_size=2)
    trained, held = hold_out(rows, 4, args)
    assert held is not None
    assert sorted([*trained["answer"], *held["answer"]]) == sorted(rows["answer"])
    assert len(held) == 4
    assert hold_out(rows, 0, args) == (rows, None)
    for number, reason in ((10, "leaves none"), (3, "not a multiple of the 2 processes")):
        with pytest.raises(ValueError, match=reason):
            hold_out(rows, number, args)


def test_a_target_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at the sparsities of target_sparsity"):
        random_run.run(tmp_path / "run", ["--held_out", "4"])
