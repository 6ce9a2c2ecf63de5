"""RPC without aggregation: a model with grouped queries keeps what its twin with a KV head per
query head keeps.
"""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from rlkv.eviction import RPC
from tests.helpers.cached_logits import MIXED, TOLERANCE, cached_logits, draw_ids, real_tokens
from tests.helpers.models import make_tiny_model

POLICY = RPC(P=12, R=3, c=3, aggregation="head")
CALLS, PADDING = [20] + [1] * 45, [0, 5, 17]


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """The same function with as many KV heads as query heads."""
    config, state = model.config, model.state_dict()
    group, size = config.num_attention_heads // config.num_key_value_heads, config.head_dim
    for name, weight in state.items():
        if "k_proj" in name or "v_proj" in name:
            state[name] = (
                weight.unflatten(0, (-1, size)).repeat_interleave(group, dim=0).flatten(0, 1)
            )
    twin = LlamaForCausalLM(
        type(config)(**{**config.to_dict(), "num_key_value_heads": config.num_attention_heads})
    )
    twin.load_state_dict(state)
    return twin.eval()


def test_query_heads_keep_their_own_tokens() -> None:
    model = make_tiny_model("llama")
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    assert group > 1
    ids = draw_ids(3, sum(CALLS))
    real = real_tokens(PADDING, ids.shape[1])
    logits, caches = [], []
    for of, full in ((model, MIXED), (twin_of(model), MIXED.repeat_interleave(group, dim=1))):
        of.set_attn_implementation(IMPLEMENTATION)
        caches.append(HeadReallocationCache(full, eviction=POLICY, record=True))
        logits.append(cached_logits(of, ids, caches[-1], CALLS, real))
    assert (logits[0] - logits[1])[real].abs().max() < TOLERANCE
    grouped, own = caches
    assert (
        len(grouped.kept) == len(own.kept) >= 3 * 3 * 2
    )  # three rows, three evictions, layers with compressible heads
    for mine, theirs in zip(grouped.kept, own.kept, strict=True):
        assert torch.equal(mine.positions, theirs.positions)
    differing = [len(torch.unique(kept.positions, dim=0)) for kept in grouped.kept]
    assert max(differing) > 4  # more choices than the layer has KV heads
    for row, pad in enumerate(PADDING):
        held = own.held(row).unflatten(1, (-1, group)).any(dim=2)
        assert torch.equal(grouped.held(row), held), pad
