"""A gate update: log-probabilities of a completion under mixed attention, the loss, its gradients,
a step of AdamW.

The trainer takes log-probabilities from trl's fused output layer.  Here it is a plain one in
chunks, recomputed in the backward pass, with and without trl: it holds the logits of one chunk, as
the fused one does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlkv.attention.head_gate import HeadGateConfig, gate_parameters, gates_matrix, set_gates
from rlkv.benchmarks.check import llama8b
from rlkv.benchmarks.check.one import Check, Findings, Setting
from rlkv.benchmarks.turns import timed
from rlkv.rollout.footprint import GIB
from rlkv.training import objective
from rlkv.training.trainer import Score, completion_logprobs

CHUNK = 1024  # tokens whose logits are in memory at once
START, RATE = 0.5, 0.01  # of the gates, and by how much the first step of AdamW moves each
LENGTHS, LENGTHS_ON_CPU = (512, 3000, 8000), (64, 150, 400)


def plain_score(base: Any) -> Score:
    """Log-probabilities of the labelled tokens from a causal language model (without its PEFT
    wrapper).
    """

    def of_chunk(hidden: Tensor, label: Tensor) -> Tensor:
        logits = base.lm_head(hidden).float()
        picked = logits.gather(-1, label.clamp(min=0)[..., None])[..., 0] - logits.logsumexp(-1)
        return picked.masked_fill(label == -100, 0)

    def score(ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        hidden = base.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[
            :, :-1
        ]
        pairs = zip(hidden.split(CHUNK, 1), labels[:, 1:].split(CHUNK, 1), strict=True)
        found: list[Any] = [checkpoint(of_chunk, *pair, use_reentrant=False) for pair in pairs]
        return torch.cat(found, dim=1)

    return score


def gated_model(setting: Setting, found: Findings, positions: int) -> Any:
    """A model of the 8B shape with gates."""
    model, _ = llama8b.build(setting, found, positions)
    sizes = llama8b.GATES if setting.on_gpu else llama8b.GATES_ON_CPU
    return get_peft_model(model, HeadGateConfig(sink=sizes.sink, window=sizes.window))


def update(model: Any, ids: Tensor, completion: int) -> int:
    """One step on a row of token ids ``[1, T]`` whose last ``completion`` tokens were sampled, with
    advantage 1.

    Returns:
        The gates that the policy loss gives no gradient, or one that is not finite.
    """
    gates = [parameter for _, parameter in gate_parameters(model)]
    optimizer = torch.optim.AdamW(gates, lr=RATE, weight_decay=0.0)
    mask = torch.ones_like(ids)
    logprobs = completion_logprobs(plain_score(model.get_base_model()), ids, mask, completion, 1)
    one = torch.ones(1, device=ids.device)
    loss, _ = objective.policy_loss(
        logprobs,
        logprobs.detach(),
        one,
        mask[:, -completion:],
        clip=0.2,
        num_samples=1,
        divisor_N=one * completion,
    )
    loss.backward()
    gradient = torch.cat([gate.grad for gate in gates if gate.grad is not None])
    weight = objective.adaptive_weight(one, beta=1e-3, tau=0.5)
    objective.penalty(weight, torch.cat([gate.view(-1) for gate in gates])).backward()
    torch.nn.utils.clip_grad_norm_(gates, 1.0)
    optimizer.step()
    with torch.no_grad():
        for gate in gates:
            gate.clamp_(0, 1)
    useless = (gradient == 0) | ~gradient.isfinite()
    return sum(gate.numel() for gate in gates) - gradient.numel() + int(useless.sum())


def run(setting: Setting, found: Findings) -> None:
    lengths = LENGTHS if setting.on_gpu else LENGTHS_ON_CPU
    model = gated_model(setting, found, max(lengths))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()  # without it transformers does not recompute
    generator = torch.Generator().manual_seed(0)
    for length in lengths:
        ids = torch.randint(0, model.config.vocab_size, (1, length), generator=generator).to(
            setting.device
        )
        set_gates(model, torch.full_like(gates_matrix(model), START))
        useless = update(model, ids, length - length // 8)  # compiles
        found.require(
            not useless,
            f"{length} tokens: {useless} gates have no gradient, or one that is not finite",
        )
        moved = (gates_matrix(model) - START).abs()
        wrong = int((~torch.isclose(moved, torch.tensor(RATE), rtol=0.1)).sum())
        found.require(
            not wrong, f"{length} tokens: {wrong} of {moved.numel()} gates did not move by {RATE}"
        )
        found.new_peak(setting)
        found.figures[f"s at {length}"] = timed(
            partial(update, model, ids, length - length // 8), setting.device
        )
        if setting.on_gpu:
            found.figures[f"GiB at {length}"] = (
                torch.cuda.max_memory_allocated(setting.device) / GIB
            )
    frozen = [
        name
        for name, weight in model.named_parameters()
        if weight.grad is not None and "rlkv_gate" not in name
    ]
    found.require(not frozen, f"{len(frozen)} frozen weights have gradients")


CHECK = Check(
    "update",
    "A gate update at the 8B shape moves every gate and nothing else; its time and memory.",
    run,
)
