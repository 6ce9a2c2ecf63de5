"""Part 3: one gate update at the 8B shape, and a rollout with the log-probabilities that it needs.

The trainer takes log-probabilities from trl's fused output layer.  Here it is a plain one in
chunks, recomputed in the backward pass: it holds the logits of one chunk, as the fused one does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlkv.attention.head_gate import HeadGateConfig, gate_parameters, gates_matrix, set_gates
from rlkv.benchmarks.turns import timed
from rlkv.cache.reallocation import full_cache
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.decoding import Decoding
from rlkv.rollout.footprint import GIB
from rlkv.training import objective
from rlkv.training.objective import Score, completion_logprobs
from rlkv.utils.runtime import GRAPH
from tests.gpu.conftest import FACTOR, Built, Record

CHUNK = 1024  # tokens whose logits are in memory at once
START = 0.5  # of the gates
RATE = 0.01  # by how much the first step of AdamW moves each
LENGTHS = {False: (64, 150, 400), True: (512, 3000, 8000)}
ROWS = 16
LEAST = 1e-4  # nats that log-probabilities may differ by, token by token or read at once


def plain_score(base: Any) -> Score:
    """Return the log-probabilities of the labelled tokens from a causal language model."""

    def of_chunk(hidden: Tensor, label: Tensor) -> Tensor:
        logits = base.lm_head(hidden).float()
        picked = logits.gather(-1, label.clamp(min=0)[..., None])[..., 0] - logits.logsumexp(-1)
        return picked.masked_fill(label == -100, 0)

    def score(ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        output = base.model(input_ids=ids, attention_mask=mask, use_cache=False)
        hidden = output.last_hidden_state[:, :-1]
        pairs = zip(hidden.split(CHUNK, 1), labels[:, 1:].split(CHUNK, 1), strict=True)
        found: list[Any] = [checkpoint(of_chunk, *pair, use_reentrant=False) for pair in pairs]
        return torch.cat(found, dim=1)

    return score


def gated(built: Built, on_gpu: bool) -> Any:
    """Return the model with gates, and sinks and window as in training."""
    sink, window = (128, 256) if on_gpu else (16, 32)
    return get_peft_model(built.model, HeadGateConfig(sink=sink, window=window))


def update(model: Any, ids: Tensor, completion: int) -> int:
    """Take one step on ids ``[1, T]`` whose last ``completion`` tokens were sampled.

    Returns the number of gates without a finite gradient from the policy loss.
    """
    gates = [parameter for _, parameter in gate_parameters(model)]
    # torch's eps of 1e-8 would shorten the step of gates whose gradient is about as small
    optimizer = torch.optim.AdamW(gates, lr=RATE, weight_decay=0.0, eps=1e-16)
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
    useful = 0
    for gate in gates:
        if gate.grad is not None:
            useful += int((gate.grad.isfinite() & (gate.grad != 0)).sum())
    weight = objective.penalty_weight(one, beta=1e-3, tau=0.5)
    objective.penalty(weight, torch.cat([gate.view(-1) for gate in gates])).backward()
    torch.nn.utils.clip_grad_norm_(gates, 1.0)
    optimizer.step()
    with torch.no_grad():
        for gate in gates:
            gate.clamp_(0, 1)
    return sum(gate.numel() for gate in gates) - useful


def test_an_update_moves_every_gate_and_nothing_else(
    llama_8b: Built, device: torch.device, on_gpu: bool, record_property: Record
) -> None:
    model = gated(llama_8b, on_gpu)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()  # without it transformers does not recompute
    generator = torch.Generator().manual_seed(0)
    for length in LENGTHS[on_gpu]:
        drawn = torch.randint(0, model.config.vocab_size, (1, length), generator=generator)
        ids = drawn.to(device)
        completion = length - length // 8
        set_gates(model, torch.full_like(gates_matrix(model), START))
        assert update(model, ids, completion) == 0  # compiles
        moved = (gates_matrix(model) - START).abs()
        assert torch.allclose(moved, torch.tensor(RATE), rtol=0.1), f"{length} tokens"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        seconds, _ = timed(partial(update, model, ids, completion), device)
        record_property(f"s at {length}", seconds)
        if on_gpu:
            gib = torch.cuda.max_memory_allocated(device) / GIB
            record_property(f"GiB at {length}", gib)
    for name, weight in model.named_parameters():
        assert weight.grad is None or "rlkv_gate" in name


def sampled_again(
    base: Any, prompts: list[list[int]], tokens: int, device: torch.device
) -> tuple[float, float]:
    """Sample ``tokens`` after each prompt, and read prompt and tokens at once.

    Returns tokens/s, and the mean difference of the log-probabilities.
    """
    vocabulary = base.config.vocab_size
    decoding = Decoding(
        base,
        SamplingParams(tokens, temperature=1.0),
        eos_ids=[vocabulary],
        pad_id=0,
        max_rows=ROWS,
        new_cache=lambda limit, rows: full_cache(base.config, limit),
        logprobs=True,
    )
    seconds, sampled = timed(lambda: list(decoding.run(prompts)), device)
    assert [len(row.token_ids) for row in sampled] == [tokens] * ROWS
    differences = []
    for row in sampled:
        ids = torch.tensor([prompts[row.index] + row.token_ids], device=device)
        with torch.no_grad():
            again = completion_logprobs(plain_score(base), ids, torch.ones_like(ids), tokens, 1)
        differences.append(float((again[0].cpu() - torch.tensor(row.logprobs)).abs().mean()))
    return ROWS * tokens / seconds, sum(differences) / ROWS


def test_rows_are_sampled_with_the_log_probabilities_of_an_update(
    llama_8b: Built,
    device: torch.device,
    on_gpu: bool,
    record_property: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the longest prompt is more than sink and window, which the local branch then leaves
    tokens, longest = (200, 600) if on_gpu else (20, 100)
    generator = torch.Generator().manual_seed(0)
    vocabulary = llama_8b.model.config.vocab_size
    prompts = []
    for row in range(ROWS):  # of different lengths, so that most rows are padded on the left
        drawn = torch.randint(0, vocabulary, (longest - 3 * row,), generator=generator)
        prompts.append(drawn.tolist())
    monkeypatch.setenv(GRAPH, "0")
    # what rounding makes of it without gates
    speed, allowed = sampled_again(llama_8b.model, prompts, tokens, device)
    record_property("tokens/s without gates", speed)
    record_property("difference of log-probabilities without gates", allowed)
    assert allowed < 0.2
    model = gated(llama_8b, on_gpu).eval()
    set_gates(model, torch.rand(gates_matrix(model).shape, generator=generator))
    for switch, name in (("0", ""), ("1", ", graphs")):
        monkeypatch.setenv(GRAPH, switch)
        speed, difference = sampled_again(model.get_base_model(), prompts, tokens, device)
        record_property(f"tokens/s{name}", speed)
        record_property(f"difference of log-probabilities{name}", difference)
        assert difference <= max(FACTOR * allowed, LEAST)
