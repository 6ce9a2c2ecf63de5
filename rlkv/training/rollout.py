"""Rollouts of the training loop: completions sampled under the current gates by the trainer's own model.

Unlike ``model.generate`` this drops rows that have ended from the batch, writes keys and values into a growing buffer
instead of copying them at every token, and draws tokens per row (:mod:`rlkv.rollout.draws`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlkv.cache.growing import growing_cache
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.draws import draw_tokens, row_draws, token_logprobs
from rlkv.rollout.gated import Rows

SHRINK_AT = 0.75  # share of unfinished rows below which the others are dropped from the batch


def roll_out(
    model: PreTrainedModel, rows: Rows, sampling: SamplingParams, eos_ids: list[int], pad_id: int, max_rows: int
) -> list[tuple[list[int], list[float]]]:
    """Sampled completions and the log-probabilities of their tokens, in the order of ``rows``.

    Token ids are with the end token and without padding; log-probabilities as in :func:`token_logprobs`.

    Args:
        model: in eval mode, on its device.
        rows: their numbers count among the rows of all processes, ``rows.rollout`` since the start of training.
        max_rows: rows decoded at once.
    """
    draws_RT = row_draws(sampling.seed, rows.rollout, rows.numbers, sampling.max_new_tokens)
    order = sorted(range(len(rows.prompts)), key=lambda i: -len(rows.prompts[i]))
    completions: dict[int, tuple[list[int], list[float]]] = {}
    for start in range(0, len(order), max_rows):
        chunk = order[start : start + max_rows]
        found = _decode(model, [rows.prompts[i] for i in chunk], draws_RT[chunk], sampling, eos_ids, pad_id)
        completions.update(zip(chunk, found, strict=True))
    return [completions[i] for i in range(len(order))]


@torch.inference_mode()
def _decode(
    model: PreTrainedModel,
    prompts: list[list[int]],
    draws_RT: Tensor,
    sampling: SamplingParams,
    eos_ids: list[int],
    pad_id: int,
) -> list[tuple[list[int], list[float]]]:
    device = model.device
    width = max(len(ids) for ids in prompts)
    token_RQ = torch.tensor([[pad_id] * (width - len(ids)) + ids for ids in prompts], device=device)
    mask_RT = torch.ones(len(prompts), width + sampling.max_new_tokens, dtype=torch.bool, device=device)
    for row, ids in enumerate(prompts):
        mask_RT[row, : width - len(ids)] = False
    position_RQ = (mask_RT[:, :width].cumsum(-1) - 1).clamp(min=0)
    draws_RT = draws_RT.to(device)
    ends = torch.tensor(eos_ids, device=device)
    sampled = torch.full((len(prompts), sampling.max_new_tokens), pad_id, device=device)
    logprobs = torch.zeros(sampled.shape, device=device)
    lengths = torch.full((len(prompts),), sampling.max_new_tokens, device=device)
    in_batch = torch.arange(len(prompts), device=device)  # row of ``prompts`` that each row of the batch is
    running = torch.ones(len(prompts), dtype=torch.bool, device=device)
    cache = growing_cache(model.config, width + sampling.max_new_tokens)
    if cache is None:
        cache = DynamicCache(config=model.config)  # sliding and linear layers have their own kinds
    for step in range(sampling.max_new_tokens):
        logits = model(
            input_ids=token_RQ,
            attention_mask=mask_RT[in_batch, : width + step],
            position_ids=position_RQ,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        token_R = draw_tokens(logits, draws_RT[in_batch, step], sampling.temperature, sampling.top_p, sampling.top_k)
        sampled[in_batch[running], step] = token_R[running]
        logprobs[in_batch, step] = token_logprobs(logits, token_R, sampling.temperature)
        ended = running & torch.isin(token_R, ends)
        lengths[in_batch[ended]] = step + 1
        running &= ~ended
        left = int(running.sum())
        if left == 0:
            break
        if left <= SHRINK_AT * len(running):
            keep = running.nonzero()[:, 0]
            cache.batch_select_indices(keep)
            in_batch, running, token_R, position_RQ = in_batch[keep], running[keep], token_R[keep], position_RQ[keep]
        token_RQ, position_RQ = token_R[:, None], position_RQ[:, -1:] + 1
    rows = zip(sampled.tolist(), logprobs.tolist(), lengths.tolist(), strict=True)
    return [(ids[:length], values[:length]) for ids, values, length in rows]
