"""The chain from training to serving: gates of 0 and 1 in mixed attention, and the cache with those
heads full.
"""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import rlkv
from rlkv import HeadAllocation

pytest.importorskip("peft")
FULL = torch.tensor(
    [[True, False, True, False], [False, False, False, False], [True, True, True, True]]
)
SINK, WINDOW = 3, 5


def gated(model: PreTrainedModel) -> torch.nn.Module:
    from peft import get_peft_model

    from rlkv.attention.head_gate import HeadGateConfig, gate_parameters

    wrapped = get_peft_model(model, HeadGateConfig(sink=SINK, window=WINDOW)).eval()
    with torch.no_grad():
        for (_, gate), heads in zip(gate_parameters(wrapped), FULL, strict=True):
            gate.copy_(heads.float())
    return wrapped


def test_mixed_attention_with_binary_gates_equals_the_cache(tiny_model: PreTrainedModel) -> None:
    ids = torch.randint(3, 128, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(40) >= torch.tensor([[0], [6]])).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    wrapped = gated(tiny_model)
    with torch.no_grad():
        trained = wrapped(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    base = wrapped.unload()
    with (
        rlkv.compress(base, HeadAllocation(FULL), sink=SINK, window=WINDOW, prefill="local"),
        torch.no_grad(),
    ):
        begin = 20
        out = base(
            ids[:, :begin],
            attention_mask=mask[:, :begin],
            position_ids=positions[:, :begin],
            use_cache=True,
        )
        served = [out.logits]
        for column in range(begin, 40):
            out = base(
                ids[:, column : column + 1],
                attention_mask=mask[:, : column + 1],
                position_ids=positions[:, column : column + 1],
                past_key_values=out.past_key_values,
            )
            served.append(out.logits)
    difference = (torch.cat(served, dim=1) - trained).abs() * mask[..., None]
    assert difference.max() < 2e-5  # logits up to 4, summed in another order


def test_a_model_with_gates_attached_is_refused(tiny_model: PreTrainedModel) -> None:
    wrapped = gated(tiny_model)
    with (
        pytest.raises(ValueError, match="gates attached"),
        rlkv.compress(wrapped, HeadAllocation(FULL)),
    ):
        pass
