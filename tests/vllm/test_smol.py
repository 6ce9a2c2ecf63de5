"""The built-in language model in the stock engine writes what transformers write with the same
masks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rlkv.smol
from rlkv.gates.head_gates import HeadGates
from rlkv.models.builtin import PACKAGED_GATES, SMOL, built_in_folder
from rlkv.models.prompts import render_prompt
from tests.helpers.engines import Served, check_equal, engine, generate, need_vllm
from tests.helpers.smol import needs_smol

need_vllm()
pytestmark = needs_smol


def random_gates(folder: Path) -> str:
    gates = HeadGates(torch.rand(30, 3, generator=torch.Generator().manual_seed(1)))
    gates.save(folder / "random.safetensors")
    return str(folder / "random.safetensors")


@pytest.mark.parametrize(("found", "sparsity"), [(True, 0.5), (False, 0.0), (False, 0.8)])
def test_tokens_are_those_of_transformers(found: bool, sparsity: float, tmp_path: Path) -> None:
    model, tokenizer = rlkv.smol.load(dtype="float32")
    gates = PACKAGED_GATES[SMOL] if found else random_gates(tmp_path)
    served = Served(model, built_in_folder(SMOL), HeadGates.load(gates), gates)
    drawn = rlkv.smol.problems(4, seed=7, max_steps=5)
    prompts = [render_prompt(tokenizer, row["problem"], "plain") for row in drawn]
    ids = tokenizer(prompts, add_special_tokens=False).input_ids
    with engine(served, served.request(sparsity, sink=4, window=16)) as llm:
        outputs = generate(llm, ids, 60)
    assert check_equal(served, sparsity, outputs, sizes={"sink": 4, "window": 16}) > 200
