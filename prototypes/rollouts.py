"""Prototype: GRPO over hard masks. Every sample of a group runs under its own mask; its reward credits the mask."""

import sys
import time

import torch

from masks import Masked, draw_mask, plackett_luce
from rlkv.data.deepscaler import read_curriculum
from rlkv.models.prompts import render_prompt
from rlkv.gates.allocation import num_full_heads
from rlkv.verifier.verifier import are_correct


def train(seed=0, seconds=200, prompts=16, group=4, lr=0.1, span=(0.3, 0.7), curriculum="/tmp/finder/curriculum/curriculum.parquet", log=print):
    m = Masked()
    n = m.L * m.H
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    rows = read_curriculum(curriculum)
    x = torch.zeros(n, requires_grad=True)
    optimizer = torch.optim.AdamW([x], lr=lr, weight_decay=0.0)
    m.tokenizer.padding_side = "left"
    started, step = time.process_time(), 0
    while time.process_time() - started < seconds:
        pick = [rows[i] for i in torch.randperm(len(rows), generator=generator)[:prompts]]
        texts = [render_prompt(m.tokenizer, row["problem"], "rlkv") for row in pick for _ in range(group)]
        inputs = m.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        k = num_full_heads(round(span[0] + (span[1] - span[0]) * torch.rand((), generator=generator).item(), 4), n)
        mask, order = draw_mask(x, k, len(texts), generator)
        m.set(mask.view(-1, m.L, m.H))
        with torch.inference_mode():
            out = m.base.generate(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, do_sample=True, temperature=1.0,
                                  max_new_tokens=208, pad_token_id=m.tokenizer.pad_token_id or 0)
        done = m.tokenizer.batch_decode(out[:, inputs.input_ids.shape[1]:], skip_special_tokens=True)
        right = are_correct((text, str(row["answer"])) for text, row in zip(done, [r for r in pick for _ in range(group)]))
        r = torch.tensor(right, dtype=torch.float32).view(prompts, group)
        a = ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).flatten()
        loss = -(a * plackett_luce(x, order)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 5 == 0:
            log(f"  rollouts step {step} k {k} reward {r.mean():.2f} cpu {time.process_time() - started:.0f} order {x.detach().argsort().tolist()}")
    return x.detach().argsort().tolist(), x.detach(), time.process_time() - started
