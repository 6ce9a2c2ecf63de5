"""The formulas of --plan against measured bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from rlkv.attention.call import LocalSizes
from rlkv.attention.head_gate import HeadGateConfig
from rlkv.benchmarks.turns import LlamaSizes
from rlkv.rollout.footprint import Footprint
from rlkv.training.plan import UpdateShape, update_memory
from rlkv.training.trainer import completion_logprobs
from tests.helpers.live_bytes import LiveBytes

SIZES = LocalSizes(4, 16)
MODELS = {
    "tiny": LlamaSizes(
        layers=4,
        hidden=144,
        intermediate=288,
        query_heads=12,
        kv_heads=6,
        head_dim=32,
        vocabulary=313,
    ),
    "smol": LlamaSizes(
        layers=30, hidden=576, intermediate=1536, query_heads=9, kv_heads=3, vocabulary=49152
    ),
    "98M": LlamaSizes(),
}


def make(name: str, dtype: torch.dtype) -> tuple[Footprint, Any]:
    config = MODELS[name].llama(1024)
    base: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    add_fused_lm_head(base)
    gated = get_peft_model(
        base, HeadGateConfig(sink=SIZES.sink, window=SIZES.window, init_value=0.5)
    )
    return Footprint.of_config(config, name, dtype.itemsize), gated


def measured(model: Any, rows: int, length: int, rows_per_call: int) -> tuple[int, int]:
    """Bytes of the weights, and peak bytes besides them, of an update as the trainer computes it."""
    ids = torch.randint(0, model.config.vocab_size, (rows, length))

    def score(ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return model(
            input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True
        ).log_probs

    with LiveBytes(model.parameters()) as live:
        completion_logprobs(
            score, ids, torch.ones_like(ids), length // 2, rows_per_call
        ).sum().backward()
    return live.at_start, live.peak - live.at_start


@pytest.mark.parametrize(
    ("name", "dtype", "rows", "length", "rows_per_call", "checkpointing"),
    [
        ("tiny", torch.float32, 4, 250, 2, False),
        ("tiny", torch.bfloat16, 2, 250, 2, False),
        ("tiny", torch.float32, 2, 400, 2, True),
        ("smol", torch.float32, 2, 160, 1, True),
        ("98M", torch.float32, 1, 256, 1, False),
    ],
)
def test_the_plan_is_within_a_tenth_of_measured_bytes(
    name: str, dtype: torch.dtype, rows: int, length: int, rows_per_call: int, checkpointing: bool
) -> None:
    footprint, model = make(name, dtype)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    weights, peak = measured(model, rows, length, rows_per_call)
    planned = update_memory(
        footprint, UpdateShape(rows, length, rows_per_call, SIZES, checkpointing)
    )
    print(
        f"{name} {dtype} {rows} x {length}: measured {peak:,} besides {weights:,}, planned "
        f"{planned.peak:,}"
    )
    assert weights == pytest.approx(footprint.weights, rel=0.01)  # besides it the gates and buffers
    assert planned.peak == pytest.approx(peak, rel=0.1)
