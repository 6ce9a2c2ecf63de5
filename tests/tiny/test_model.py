"""The packaged model: it loads offline, reasons, and its ground truth fits it."""

import json

import torch

from rlkv import tiny
from rlkv.evaluation.heads.measure import CacheSettings, measure
from rlkv.gates.allocation import HeadAllocation
from rlkv.models.shape import ModelShape
from rlkv.tiny.task import longest_solution


def test_shape_is_what_the_card_says() -> None:
    model, tokenizer = tiny.load()
    shape = ModelShape.from_config(model.config)
    assert (shape.num_layers, shape.num_kv_heads, shape.num_query_heads, shape.head_dim) == (4, 6, 12, 32)
    assert shape.model_id == "tiny"
    assert sum(p.numel() for p in model.parameters()) == 1_252_656
    assert tokenizer.padding_side == "left"
    assert len(tokenizer) == model.config.vocab_size


def test_package_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in tiny.MODEL_DIR.iterdir()) <= 8 * 2**20


def test_solves_held_out_problems_and_needs_its_heads() -> None:
    """40 problems: 0.997 measured on 1,000, so fewer than 38 right would happen once in 10^5 draws."""
    model, tokenizer = tiny.load()
    problems = tiny.problems(40, seed=12345, max_definitions=10)
    settings = CacheSettings(sink=4, window=16, max_new_tokens=longest_solution(10) + 10, batch_size=40)
    full = measure(model, tokenizer, problems, HeadAllocation(torch.ones(4, 6, dtype=torch.bool)), settings)
    none = measure(model, tokenizer, problems, HeadAllocation(torch.zeros(4, 6, dtype=torch.bool)), settings)
    assert full.accuracy >= 0.95
    assert none.accuracy < 0.5
    assert full.kv_bytes == full.kv_bytes_full
    assert none.kv_bytes < 0.5 * none.kv_bytes_full


def test_ground_truth_orders_every_head_once() -> None:
    truth = json.loads(tiny.GROUND_TRUTH.read_text())
    order = [(step["layer"], step["head"]) for step in truth["elimination"]]
    assert sorted(order) == [(layer, head) for layer in range(4) for head in range(6)]
    assert truth["full_accuracy"] >= 0.97
    assert truth["random_half_mean"] <= 0.5
    assert torch.tensor(truth["accuracy_lost_by_single_head"]).shape == (4, 6)
