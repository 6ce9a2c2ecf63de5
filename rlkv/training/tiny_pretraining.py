"""Pretraining of the tiny model from scratch: next-token loss on worked solutions, short chains first.

Recall of far bindings is slow to emerge, so the longest chain grows with training.  A batch holds problems of one
number of definitions: their token counts are equal, nothing is padded.

A closing stage makes half of the KV heads specialise: in every step all, about half or none of LOCAL_HEADS read only
the first 4 and the last 16 tokens.  Without it nearly every head takes part in far recall; large models do have local
heads.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.masking_utils import AttentionMaskInterface

from rlkv.models.prompts import render_prompt
from rlkv.models.shape import ModelShape
from rlkv.tiny.task import MAX_DEFINITIONS, MIN_DEFINITIONS, draw_length, draw_problem
from rlkv.training.run_folder import load_tensors, save_tensors

TOKENS_PER_DEFINITION = 24  # 6 in the problem, 18 in the solution
SINK, WINDOW = 4, 16
# (layer, head): the twelve that a backward elimination on the model of the first stage (seed 0) could best spare
LOCAL_HEADS = (
    *((0, 1), (0, 2), (0, 3), (1, 2), (1, 4)),
    *((2, 0), (2, 1), (2, 2), (2, 4), (3, 2), (3, 3), (3, 5)),
)


@dataclass
class PretrainConfig:
    """``curriculum``: pairs (share of ``steps`` at which the stage ends, longest chain of the stage).

    ``specialise_steps`` come after ``steps``, at ``specialise_lr`` of the peak learning rates.
    """

    seed: int = 0
    steps: int = 3500
    specialise_steps: int = 500
    specialise_lr: float = 0.2
    tokens_per_step: int = 8000
    muon_lr: float = 5e-3
    adamw_lr: float = 3e-3
    warmup_steps: int = 50
    final_lr: float = 0.02
    max_grad_norm: float = 1.0
    curriculum: tuple[tuple[float, int], ...] = ((0.12, 5), (0.22, 8), (0.35, 14), (1.0, MAX_DEFINITIONS))

    @property
    def total_steps(self) -> int:
        return self.steps + self.specialise_steps

    def longest_chain(self, step: int) -> int:
        """The largest number of definitions that ``step`` (0-based) may draw."""
        return next((longest for end, longest in self.curriculum if step < end * self.steps), MAX_DEFINITIONS)

    def lr_scale(self, step: int) -> float:
        """Linear warm-up, then a cosine down to ``final_lr`` of the peak; a second, lower cosine to specialise."""
        if step >= self.steps:
            cosine = 0.5 * (1 + math.cos(math.pi * (step - self.steps) / self.specialise_steps))
            return self.specialise_lr * cosine
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return min(1.0, (step + 1) / self.warmup_steps) * (self.final_lr + (1 - self.final_lr) * cosine)


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """The tiny Llama with random weights: 4 layers x 6 KV heads of 32, two query heads per KV head."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=144,
        intermediate_size=288,
        num_hidden_layers=4,
        num_attention_heads=12,
        num_key_value_heads=6,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return LlamaForCausalLM(config)


def encode_batch(
    tokenizer: PreTrainedTokenizerBase, rng: random.Random, num_definitions: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(input_ids, labels)``, both int64 ``[rows, length]``; prompt positions carry the label -100."""
    drawn = [draw_problem(rng, num_definitions) for _ in range(rows)]
    prompts = [render_prompt(tokenizer, p.problem) for p in drawn]
    texts = [prompt + p.solution + tokenizer.eos_token for prompt, p in zip(prompts, drawn, strict=True)]
    ids = torch.tensor(tokenizer(texts, add_special_tokens=False).input_ids)
    prompt_length = len(tokenizer(prompts[0], add_special_tokens=False).input_ids)
    labels = ids.clone()
    labels[:, :prompt_length] = -100
    return ids, labels


def build_optimizers(model: LlamaForCausalLM, config: PretrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, output head and norms."""
    inner = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in inner}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(inner, lr=config.muon_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=config.adamw_lr, betas=(0.9, 0.98), weight_decay=0.01),
    ]


class LocalHeads:
    """Attention of the closing stage: ``draw`` decides for one step which of LOCAL_HEADS read locally.

    One dense mask per head in a single attention call: at these lengths far cheaper than two branches.
    """

    IMPLEMENTATION = "rlkv_tiny_pretraining"

    def __init__(self, model: LlamaForCausalLM) -> None:
        config = model.config
        self.model, self.before = model, config._attn_implementation
        shape = ModelShape.from_config(config)
        self.is_local = torch.zeros(shape.num_layers, shape.num_kv_heads, dtype=torch.bool)
        AttentionInterface.register(self.IMPLEMENTATION, self._attend)
        AttentionMaskInterface.register(self.IMPLEMENTATION, lambda *args, **kwargs: None)
        model.set_attn_implementation(self.IMPLEMENTATION)

    def draw(self, rng: random.Random) -> None:
        """All, about half or none of the heads are local, with equal chances."""
        share = rng.choice((0.0, 0.5, 1.0))
        for layer, head in LOCAL_HEADS:
            self.is_local[layer, head] = rng.random() < share

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        position = torch.arange(query.shape[2], device=query.device)
        past = position[:, None] - position  # [query, key]
        near = (past < WINDOW) | (position < SINK)
        is_local = self.is_local[module.layer_idx].to(query.device).repeat_interleave(query.shape[1] // key.shape[1])
        mask = (past >= 0) & (near | ~is_local[:, None, None])
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[None], scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    def remove(self) -> None:
        self.model.set_attn_implementation(self.before)


def pretrain(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainConfig,
    on_step: Callable[[int, float], None],
    checkpoint: Path | None = None,
    checkpoint_every: int = 100,
) -> None:
    """Train ``model`` in place; ``on_step(step, loss)`` is called after every step.

    Goes on from the file ``checkpoint`` if it exists.  The batch of a step depends on the seed and the step alone.
    """
    optimizers = build_optimizers(model, config)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    first = 0
    if checkpoint is not None and checkpoint.exists():
        state = load_tensors(checkpoint)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first = state["step"]
    device = next(model.parameters()).device
    model.train()
    local_heads: LocalHeads | None = None
    for step in range(first, config.total_steps):
        for peak, optimizer in zip(peaks, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = peak * config.lr_scale(step)
        rng = random.Random(f"rlkv-tiny-pretrain-{config.seed}-{step}")
        num_definitions = draw_length(rng, MIN_DEFINITIONS, config.longest_chain(step))
        rows = max(4, config.tokens_per_step // (TOKENS_PER_DEFINITION * num_definitions))
        ids, labels = encode_batch(tokenizer, rng, num_definitions, rows)
        if step >= config.steps:
            local_heads = local_heads or LocalHeads(model)
            local_heads.draw(rng)
        loss = model(input_ids=ids.to(device), labels=labels.to(device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if checkpoint is not None and (step + 1) % checkpoint_every == 0:
            saved = {"step": step + 1, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
            save_tensors(checkpoint, saved)
        on_step(step, loss.item())
    if local_heads is not None:
        local_heads.remove()
    model.eval()
