"""Prototypes of gate training by distillation: annealed binarisation, and hard masks drawn at random sparsities.

Methods: plain (today's), anneal (+ w(t) mean(a (1-a)), w rises over the second half), temper (a = sigmoid(x / T),
T falls), hard (top-k of logits + Gumbel noise per row, straight through), reinforce (the same masks, no backward pass
through the model: leave-one-out advantages of -KL under Plackett-Luce).
"""

import random
import sys
import time

import torch
from peft import get_peft_model

import rlkv.attention.mixed as mixed
from rlkv.gates.allocation import num_full_heads
from rlkv.models.loading import load_model
from rlkv.training.distill_data import in_epochs, read_traces
from rlkv.training.distillation import collate, lr_factor, next_token_kl
from rlkv.training.head_gate import HeadGateConfig, gate_parameters, full_attention_modules


def mix(full, local, alpha):
    """As rlkv's, for gates per row too: [B, H]."""
    shape = (full.shape[0], alpha.shape[-1], -1, *full.shape[2:])
    a = alpha.view(-1, alpha.shape[-1], 1, 1, 1)
    return torch.lerp(local.reshape(shape), full.reshape(shape), a).view(full.shape)


mixed.mix = mix
mixed._single_branch = lambda alpha: None


class Rows:
    """Holder of a layer's gates per row."""

    def __init__(self, sink, window): self.sink, self.window, self.alpha = sink, window, None
    def current(self): return None if self.alpha is None else mixed.Gate(self.alpha, self.sink, self.window)


class Masked:
    """The model under gates per row: set(alpha [B, L, H] or None)."""

    def __init__(self, name="tiny", sink=4, window=16, curriculum=None):
        self.base, self.tokenizer = load_model(name, dtype="float32", device="cpu")
        self.base.requires_grad_(False)
        self.base.set_attn_implementation(mixed.IMPLEMENTATION)
        self.holders = []
        for _, module in full_attention_modules(self.base):
            holder = Rows(sink, window)
            object.__setattr__(module, mixed.GATE, holder)
            self.holders.append(holder)
        config = self.base.config
        self.L, self.H = config.num_hidden_layers, config.num_key_value_heads
        self.traces = read_traces(curriculum or "/tmp/finder/curriculum/curriculum.parquet", self.tokenizer, "rlkv", 10**9)

    def set(self, alpha):
        for layer, holder in enumerate(self.holders):
            holder.alpha = None if alpha is None else alpha[..., layer, :]

    def states(self, batch):
        hidden = self.base.get_decoder()(input_ids=batch.ids_BT, attention_mask=batch.mask_BT, use_cache=False)[0]
        return hidden[batch.row_N, batch.position_N]

    def kl(self, batch, alpha):
        """Per token."""
        head = self.base.get_output_embeddings()
        with torch.no_grad():
            self.set(None)
            full = head(self.states(batch))
        self.set(alpha)
        return next_token_kl(head(self.states(batch)), full)


def draw_mask(logits, k, rows, generator, tau=1.0):
    """Top-k of logits + Gumbel noise: bool [rows, n], and the order of the kept."""
    u = torch.rand(rows, len(logits), generator=generator).clamp(1e-9, 1 - 1e-9)
    order = (logits.detach() / tau - torch.log(-torch.log(u))).argsort(dim=-1, descending=True)[:, :k]
    return torch.zeros(rows, len(logits)).scatter_(1, order, 1.0), order


def plackett_luce(logits, order):
    """Log-probability of drawing ``order`` [rows, k] one after the other."""
    rows, k = order.shape
    picked = logits[order]
    total = torch.logsumexp(logits, 0)
    gone = torch.cat([torch.zeros(rows, 1), picked.exp().cumsum(1)[:, :-1]], 1)
    return (picked - torch.log((total.exp() - gone).clamp(min=1e-6))).sum(1)


def train(method, seed=0, steps=120, batch_size=8, lr=0.02, l1=0.05, span=(0.3, 0.7), weight=0.2, m=None, log=print, masks=1, row=True):
    m = m or Masked()
    n = m.L * m.H
    draw = in_epochs(m.traces, batch_size, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.ones(n) if method in ("plain", "anneal") else torch.full((n,), 3.0) if method == "temper" else torch.zeros(n)
    x.requires_grad_(True)
    optimizer = torch.optim.AdamW([x], lr=lr, weight_decay=0.0)
    started = time.process_time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * lr_factor(step, steps)
        batch = collate(sorted(draw(step), key=lambda s: len(s.ids)), 0, m.base.device)
        late = max(0.0, 2 * step / steps - 1)
        B = len(batch.ids_BT)
        if method in ("plain", "anneal", "temper"):
            alpha = torch.sigmoid(x / (1 - 0.9 * late)) if method == "temper" else x
            loss = m.kl(batch, alpha.view(1, m.L, m.H)).mean() + l1 * alpha.mean()
            if method == "anneal":
                loss = loss + weight * late * (alpha * (1 - alpha)).mean()
        elif method == "hard":
            k = num_full_heads(round(span[0] + (span[1] - span[0]) * torch.rand((), generator=generator).item(), 4), n)
            mask, _ = draw_mask(x, k, B if row else 1, generator)
            soft = torch.sigmoid(x - x.detach().sort(descending=True).values[k - 1 : k + 1].mean())
            alpha = mask + soft - soft.detach()
            kl = m.kl(batch, alpha.view(-1, m.L, m.H))
            per_row = torch.zeros(B).index_add(0, batch.row_N, kl)
            loss = -torch.exp(-per_row).mean() if weight == "saturate" else torch.log1p(per_row).mean()
        elif method == "reinforce":
            total = torch.zeros(())
            rewards, logps = [], []
            k = num_full_heads(round(span[0] + (span[1] - span[0]) * torch.rand((), generator=generator).item(), 4), n)
            for _ in range(masks):  # every mask sees the same rows
                mask, order = draw_mask(x, k, B if row else 1, generator)
                with torch.no_grad():
                    kl = m.kl(batch, mask.view(-1, m.L, m.H))
                per_row = torch.zeros(B).index_add(0, batch.row_N, kl)
                rewards.append(torch.exp(-per_row) if weight == "saturate" else -torch.log1p(per_row))
                logps.append(plackett_luce(x, order))
            r, lp = torch.stack(rewards), torch.stack(logps)  # [masks, B]
            if masks > 1:
                a = (r - r.mean(0)) / (r.std(0) + 1e-4)
            else:
                a = (r - r.mean()) / (r.std() + 1e-4)
            loss = -(a * lp).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if method in ("plain", "anneal"):
            with torch.no_grad():
                x.clamp_(0, 1)
        if (step + 1) % 40 == 0:
            log(f"  {method} step {step + 1} loss {loss.item():.3f} cpu {time.process_time() - started:.0f} order {x.detach().argsort().tolist()}")
    return x.detach().argsort().tolist(), x.detach(), time.process_time() - started
