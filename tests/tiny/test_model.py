"""The packaged model: it loads offline, reasons, and its ground truth fits it."""

import json
from typing import Any

import torch

import rlkv
from rlkv import tiny
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.prompts import render_prompt
from rlkv.models.shape import ModelShape
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.hf import HFEngine
from rlkv.tiny import longest_solution
from rlkv.verifier import is_correct


def test_shape_is_what_the_card_says() -> None:
    model, tokenizer = tiny.load()
    shape = ModelShape.from_config(model.config)
    assert shape == ModelShape("tiny", "llama", 4, 6, 12, 32)
    assert sum(p.numel() for p in model.parameters()) == 1_252_656
    assert tokenizer.padding_side == "left"
    assert len(tokenizer) == model.config.vocab_size
    assert sum(file.stat().st_size for file in tiny.MODEL_DIR.iterdir()) <= 8 * 2**20


def solved(n: int, seed: int, gates: str | HeadAllocation, **options: Any) -> tuple[float, float]:
    """Return the share of held-out problems that are solved, and that of the full cache's bytes."""
    model, tokenizer = tiny.load()
    problems = tiny.problems(n, seed=seed, max_definitions=10)
    prompts = [render_prompt(tokenizer, problem["problem"]) for problem in problems]
    sampling = SamplingParams(max_new_tokens=longest_solution(10) + 10)
    with rlkv.compress(model, gates, **options) as session:
        found = HFEngine(model, tokenizer, batch_size=n).generate(prompts, sampling)
        assert session.cache is not None
        held = session.cache.used_nbytes() / session.cache.full_nbytes()
    right = [is_correct(c.text, p["answer"]) for c, p in zip(found, problems, strict=True)]
    return sum(right) / n, held


def test_solves_held_out_problems_and_needs_its_heads() -> None:
    """Of 1,000 problems 0.997 are solved: fewer than 38 of 40 would happen once in 10^5 draws."""
    sizes = {"sink": 4, "window": 16}
    accuracy, held = solved(40, 12345, HeadAllocation(torch.ones(4, 6, dtype=torch.bool)), **sizes)
    assert accuracy >= 0.95
    assert held == 1
    accuracy, held = solved(40, 12345, HeadAllocation(torch.zeros(4, 6, dtype=torch.bool)), **sizes)
    assert accuracy < 0.5
    assert held < 0.5


def test_packaged_gates_keep_the_accuracy_at_half_of_the_heads() -> None:
    assert (HeadGates.load("tiny").deploy_sink, HeadGates.load("tiny").deploy_window) == (4, 16)
    accuracy, held = solved(50, 999, "tiny", sparsity=0.5)
    assert accuracy == 1
    assert held < 0.75


def test_ground_truth_orders_every_head_once() -> None:
    truth = json.loads(tiny.GROUND_TRUTH.read_text())
    order = [(step["layer"], step["head"]) for step in truth["elimination"]]
    assert sorted(order) == [(layer, head) for layer in range(4) for head in range(6)]
    assert truth["full_accuracy"] >= 0.97
    assert truth["random_half_mean"] <= 0.5
    assert torch.tensor(truth["accuracy_lost_by_single_head"]).shape == (4, 6)
