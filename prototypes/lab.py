"""Prototype bench: masks of heads are scored on teacher-forced traces, orders by decoding."""

import json
import os
import random
import time
from pathlib import Path

import torch
from peft import get_peft_model

from rlkv.gates.allocation import HeadAllocation, compression_order
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.engine import InferenceEngine
from rlkv.models.loading import load_model
from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import SamplingParams
from rlkv.training.distill_data import read_traces
from rlkv.training.distillation import collate
from rlkv.training.head_gate import HeadGateConfig, set_gates
from rlkv.verifier.verifier import are_correct

CURRICULUM = os.environ.get("CURRICULUM", "/tmp/finder/curriculum/curriculum.parquet")
GATES = Path("docs/results/study/gates")
STORE = Path("/tmp/finder/accuracy.json")


class Lab:
    def __init__(self, num_traces=32, seed=0, sink=4, window=16, name="tiny", rows=32):
        self.base, self.tokenizer = load_model(name, dtype="float32", device="cpu")
        self.model = get_peft_model(self.base, HeadGateConfig(sink=sink, window=window)).eval()
        self.sink, self.window = sink, window
        recorded = read_traces(CURRICULUM, self.tokenizer, "rlkv", 10**9)
        drawn = random.Random(f"lab-{seed}").sample(recorded, num_traces)
        self.num_traces = num_traces
        drawn = sorted(drawn, key=lambda t: len(t.ids))
        self.batches = [collate(drawn[i : i + rows], 0, self.base.device) for i in range(0, len(drawn), rows)]
        self.head = self.base.get_output_embeddings()
        self.memo, self.forwards, self.cpu = {}, 0, 0.0
        with torch.no_grad(), self.model.disable_adapter():
            self.full = [self.head(self.states(b)).log_softmax(-1) for b in self.batches]
        L, H = self.base.config.num_hidden_layers, self.base.config.num_key_value_heads
        self.shape = (L, H)

    def states(self, batch):
        hidden = self.base.get_decoder()(input_ids=batch.ids_BT, attention_mask=batch.mask_BT, use_cache=False)[0]
        return hidden[batch.row_N, batch.position_N]

    @torch.no_grad()
    def score(self, removed):
        """removed: frozenset of heads (layer * H + head). -> dict of measures, larger is better."""
        removed = frozenset(removed)
        if removed in self.memo:
            return self.memo[removed]
        start = time.process_time()
        alpha = torch.ones(self.shape).flatten()
        alpha[list(removed)] = 0.0
        set_gates(self.model, alpha.view(self.shape))
        kls, nlls, wrongs, rows, offset = [], [], [], [], 0
        for batch, full in zip(self.batches, self.full):
            mixed = self.head(self.states(batch)).log_softmax(-1)
            kls.append((full.exp() * (full - mixed)).sum(-1))
            nlls.append(-mixed.gather(-1, batch.answer_N[:, None])[:, 0])
            wrongs.append(mixed.argmax(-1) != batch.answer_N)
            rows.append(batch.row_N + offset)
            offset += len(batch.ids_BT)
        kl, nll, wrong, row = map(torch.cat, (kls, nlls, wrongs, rows))
        def per_row(v): return torch.zeros(offset).index_add(0, row, v.float())
        bad = per_row(wrong) > 0
        count = per_row(torch.ones_like(kl))
        top = torch.zeros(offset).scatter_reduce(0, row, kl, "amax", include_self=False)
        found = {
            "share": 1 - bad.float().mean().item(),
            "logp": -nll.mean().item(),
            "kl": -kl.mean().item(),
            "kl_row_max": -top.mean().item(),
            "kl_row_max_clip": -top.clamp(max=1).mean().item(),
            "kl_clip": -kl.clamp(max=1).mean().item(),
            "tokens_right": 1 - wrong.float().mean().item(),
            "prob_row": torch.exp(-per_row(nll)).mean().item(),  # expected share of traces sampled again
            "saturate_row": -(1 - torch.exp(-per_row(kl))).mean().item(),
            "log_row": -torch.log1p(per_row(kl)).mean().item(),
        }
        self.forwards += 1
        self.cpu += time.process_time() - start
        self.memo[removed] = found
        return found


def load_order(name):
    gates = HeadGates.load(GATES / f"{name}.safetensors" if not str(name).startswith("/") else name)
    return gates, [l * gates.num_kv_heads + h for l, h in compression_order(gates)]


class Decoder:
    """Greedy accuracy of allocations on a file of problems, memoised on disk."""

    def __init__(self, file="/tmp/finder/valid.jsonl", sink=4, window=16):
        self.problems = [json.loads(line) for line in open(file)]
        self.key = Path(file).stem
        self.model, self.tokenizer = load_model("tiny", dtype="float32", device="cpu")
        self.full = HeadAllocation(torch.ones(4, 6, dtype=torch.bool))
        self.engine = InferenceEngine(self.model, self.tokenizer, self.full, sink, window, batch_size=100)
        self.prompts = [render_prompt(self.tokenizer, p["problem"]) for p in self.problems]
        self.store = json.loads(STORE.read_text()) if STORE.exists() else {}

    def __call__(self, removed):
        key = f"{self.key}:{sorted(removed)}"
        if key not in self.store:
            full = torch.ones(24, dtype=torch.bool)
            full[list(removed)] = False
            self.engine.allocation = HeadAllocation(full.view(4, 6))
            done, _ = self.engine.batch(self.prompts, SamplingParams(208))
            right = are_correct((c.text, p["answer"]) for c, p in zip(done, self.problems))
            self.store = json.loads(STORE.read_text()) if STORE.exists() else {}
            self.store[key] = sum(right) / len(right)
            STORE.write_text(json.dumps(self.store))
        return self.store[key]

    def order(self, order, sparsities=(0.4, 0.5, 0.6, 0.7)):
        counts = {0.4: 10, 0.5: 12, 0.6: 14, 0.7: 17}
        return [round(self(order[: counts[s]]), 3) for s in sparsities]
