"""The built-in language model in the stock engine writes what transformers write with the same masks."""

from __future__ import annotations

import pytest

import rlkv.smol
from rlkv.gates.head_gates import HeadGates
from rlkv.models.builtin import PACKAGED_GATES, SMOL, built_in_folder
from rlkv.models.prompts import render_prompt
from tests.helpers.engines import Served, check_equal, engine, generate, need_vllm
from tests.helpers.smol import needs_smol

need_vllm()
pytestmark = needs_smol


@pytest.mark.parametrize("sparsity", [0.5, 0.7])
def test_tokens_are_those_of_transformers(sparsity: float) -> None:
    model, tokenizer = rlkv.smol.load(dtype="float32")
    gates = PACKAGED_GATES[SMOL]
    served = Served(model, built_in_folder(SMOL), HeadGates.load(gates), gates)
    drawn = rlkv.smol.problems(4, seed=7, max_steps=5)
    prompts = [render_prompt(tokenizer, row["problem"], "plain") for row in drawn]
    ids = tokenizer(prompts, add_special_tokens=False).input_ids
    with engine(served, served.request(sparsity, sink=4, window=16)) as llm:
        outputs = generate(llm, ids, 60)
    assert check_equal(served, sparsity, outputs, sizes={"sink": 4, "window": 16}) > 200
