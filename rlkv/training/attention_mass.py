"""Heads scored by one pass over recorded solutions, without training: what local attention misses.

The mass of a query is the share of its softmax that falls on keys outside of sinks and window.  A
head's score is the largest mass in a solution, over the query heads of its group too, and the mean
of that over solutions.  The idea is KVzip's (arXiv 2505.23416), which scores KV pairs by the most
attention that any query of a group gives them while the model repeats its context.

Why the largest: a head that looks up one value is needed, though its mean is small, and a solution
goes wrong by one token.  Diffuse attention to the past raises the mean and can be spared.
DuoAttention (arXiv 2410.10819) argues against profiles of attention altogether: they see neither
the values nor what an error does later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel, PreTrainedTokenizerBase
from transformers.masking_utils import AttentionMaskInterface

from rlkv.attention import IMPLEMENTATION
from rlkv.attention.call import MixedCall, local_rule, mixed_mask
from rlkv.attention.head_gate import gate_counts, gate_shares, set_gates
from rlkv.attention.mixed import plain_attention
from rlkv.attention.softmax import SCORES_AT_ONCE, Softmax
from rlkv.data.recall import MarkedText
from rlkv.gates.head_gates import HeadGates
from rlkv.models.layout import gated_places
from rlkv.training.config import GateTrainingArguments, RLKVSettings
from rlkv.training.logs import FinderLog
from rlkv.training.run_folder import RunFolder
from rlkv.training.solutions import (
    READ_BY_ALL,
    by_length,
    check_masks,
    draw_traces,
    hard_masks,
    load_solutions,
    make_batch,
    warn_of_unread,
)
from rlkv.utils.progress import progress_bar
from rlkv.utils.runtime import digest

MEASURING = "rlkv_measuring"  # the attention implementation
CURVES = (("gates/mean", "mean score"), ("gates/below_0.1", "scores below 0.1"))
READ = READ_BY_ALL | {"sink", "window", "elimination_traces"}


def score_heads(
    settings: RLKVSettings,
    args: GateTrainingArguments,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> HeadGates:
    """Score all heads by their attention outside of sinks and window, and export the scores.

    The sizes are ``settings.sink`` and ``settings.window``.  A run that was stopped starts over.

    Args:
        model, tokenizer: instead of the ones that ``settings.model`` names.

    Raises:
        ValueError: for data, a model or a folder that do not fit.
    """
    settings, model, recorded = load_solutions(settings, args, model, tokenizer)
    traces, _ = draw_traces(recorded, settings.elimination_traces, args.seed)
    longest = max(len(trace.ids) for trace in traces)
    if longest <= settings.sink + settings.window:
        raise ValueError(
            f"sink {settings.sink} and window {settings.window} cover the longest of the "
            f"{len(traces)} solutions, {longest} tokens with its prompt, so that every head would "
            "score 0: take smaller ones"
        )
    check_masks(model, traces[0], "full")
    config = {name: getattr(settings, name) for name in sorted(READ)}
    config |= {"seed": args.seed, "output_dir": args.output_dir}
    config["data_digest"] = digest([text.ids for text in traces])
    run = RunFolder(Path(str(args.output_dir)), settings, config)
    with hard_masks(model, settings.sink, settings.window) as gated:
        run.write_config()
        warn_of_unread(settings, args, READ)
        measured = (settings.sink, settings.window)
        served = (settings.deploy_sink, settings.deploy_window)
        if measured != served:
            print(
                f"heads are measured with sink and window {measured}, and their gates file asks "
                f"for {served} in serving (--deploy-sink, --deploy-window)",
                flush=True,
            )
        heads = gate_counts(gated)
        log = FinderLog(run, args.run_name, heads)
        has_gate = gated_places(heads, len(heads), max(heads))
        sum_LH = torch.zeros(1)
        with progress_bar("attention", "solutions", len(traces)) as bar:
            for texts in by_length(traces, settings.forward_rows):
                wall = time.perf_counter()
                cpu = time.process_time()
                score_BLH = outside_mass(gated, texts, settings.sink, settings.window)
                bar.advance(len(texts))
                sum_LH = sum_LH + score_BLH.sum(0)
                score_LH = sum_LH / bar.done
                record = gate_shares(score_LH[has_gate])
                record["time/step_s"] = time.perf_counter() - wall
                record["time/step_cpu_s"] = time.process_time() - cpu
                log.append(record, score_LH)
        set_gates(gated, score_LH)
        gates = run.gates(gated, score_LH, "attention_mass", len(log.records))
    gates.training |= {
        "seconds": round(sum(record["time/step_s"] for record in log.records), 3),
        "cpu_seconds": round(sum(record["time/step_cpu_s"] for record in log.records), 3),
    }
    run.export(gates, CURVES)
    return gates


@torch.no_grad()
def outside_mass(gated: Any, texts: Sequence[MarkedText], sink: int, window: int) -> Tensor:
    """Score heads on solutions, whose tokens but the last are queries; prompts are read first.

    The largest mass of a solution's queries counts.

    Args:
        gated: a model of :func:`~rlkv.training.solutions.hard_masks`, which refuses those whose
            attention has another form.  Its gates are not used.

    Returns:
        ``[B, L, H]`` in [0, 1], float32 on the CPU; 1 where there is no gate.
    """
    heads = gate_counts(gated)
    score_BLH = torch.ones(len(texts), len(heads), max(heads))

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: MixedCall,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        own = cast(Any, module).layer_idx
        if heads[own]:
            softmax = Softmax.of_call(query, scaling, kwargs)
            mass_BHQ = mass_of_call(query, key, attention_mask, sink, window, softmax)
            score_BLH[:, own, : heads[own]] = mass_BHQ.amax(-1).float().cpu().clamp(0, 1)
        return plain_attention(module, query, key, value, attention_mask, scaling, **kwargs)

    AttentionInterface.register(MEASURING, attend)
    AttentionMaskInterface.register(MEASURING, mixed_mask)
    base = gated.get_base_model()
    with gated.disable_adapter():
        batch = make_batch(base.get_decoder(), texts, "full")
        base.set_attn_implementation(MEASURING)
        try:
            batch.states(base.get_decoder())
        finally:
            base.set_attn_implementation(IMPLEMENTATION)
    return score_BLH


def mass_of_call(
    query: Tensor, key: Tensor, call: MixedCall, sink: int, window: int, softmax: Softmax
) -> Tensor:
    """Compute how much of each query's softmax falls on keys that local attention does not see.

    Blocks of queries bound the memory; products and softmax are in float32 or wider.

    Args:
        query: ``[B, H * G, Q, D]``.
        key: ``[B, H, K, D]``.

    Returns:
        ``[B, H, Q]``: the largest mass in the group; 0 for padding and for a text's last token,
        which predicts nothing.
    """
    batch, kv_heads, kv_length, _ = key.shape
    device = query.device
    wide = torch.promote_types(torch.float32, query.dtype)
    keys = key.to(wide).mT
    rows = call.rows(device)
    causal = local_rule(rows, kv_length, 0)
    local = local_rule(rows, sink, window)
    row = torch.arange(batch, device=device)[:, None, None, None]
    key_K = torch.arange(kv_length, device=device)
    query_Q = torch.arange(call.q_length, device=device) + call.q_offset
    block = max(1, SCORES_AT_ONCE // (batch * query.shape[1] * kv_length))
    found = []
    for part, at_Q in zip(query.split(block, dim=2), query_Q.split(block), strict=True):
        at = at_Q[:, None]
        seen = causal(row, None, at, key_K)
        counts = at < rows.end[row] - 1
        is_outside = seen & ~local(row, None, at, key_K) & counts
        grouped = part.to(wide).reshape(batch, kv_heads, -1, part.shape[-1])
        products = (grouped @ keys).view(*part.shape[:3], kv_length)
        weights = softmax.weights(products, seen, softmax.sinks_of(*part.shape[1:3]))
        mass = (weights * is_outside).sum(-1)
        found.append(mass.unflatten(1, (kv_heads, -1)).amax(2))
    return torch.cat(found, dim=-1)
