"""Mixed attention in a model on the device against float64 on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor

from rlkv.attention.head_gate import HeadGateConfig, set_gates
from rlkv.benchmarks.check.explicit import visible_keys
from rlkv.benchmarks.check.one import Check, Findings, Setting
from rlkv.benchmarks.check.twins import (
    SINK,
    WINDOW,
    Texts,
    Twins,
    compare,
    error_of,
    read_at_once,
    read_by_tokens,
    summarise,
)
from rlkv.cache.reallocation import full_cache


def gated(model: Any, alpha_LH: Tensor) -> Any:
    """A copy of the model with gates ``[layers, KV heads]``."""
    copied = get_peft_model(copy.deepcopy(model), HeadGateConfig(sink=SINK, window=WINDOW)).eval()
    set_gates(copied, alpha_LH)
    return copied


def local_mask(texts: Texts) -> Tensor:
    """What the local branch sees in every head: bool ``[B, 1, T, T]``."""
    return torch.stack([visible_keys(real_T, SINK, WINDOW) for real_T in texts.real])[:, None]


def run(setting: Setting, found: Findings) -> None:
    twins = Twins.make(setting)
    shape = (twins.sizes.layers, twins.sizes.kv_heads)
    between = torch.rand(shape, generator=torch.Generator().manual_seed(2))
    for texts in twins.texts():
        rows = f"{len(texts.ids)} rows"
        full = read_at_once(twins.exact, texts)
        stock = error_of(read_at_once(twins.own, texts), full, texts)
        wanted = {
            "gates 1": (torch.ones(shape), full),
            "gates 0": (torch.zeros(shape), read_at_once(twins.exact, texts, local_mask(texts))),
            "gates between": (between, read_at_once(gated(twins.exact, between), texts)),
        }
        for name, (alpha, logits) in wanted.items():
            own = gated(twins.own, alpha)
            compare(
                found, f"{name}, {rows}", error_of(read_at_once(own, texts), logits, texts), stock
            )
            decoded = read_by_tokens(own, texts, full_cache(own.config, texts.ids.shape[1]))
            compare(
                found, f"{name}, {rows}, token by token", error_of(decoded, logits, texts), stock
            )
    summarise(found)


CHECK = Check(
    "mixed_attention",
    "Gates 1 equal the unpatched model and gates 0 an explicit mask, read at once and token by "
    "token.",
    run,
)
