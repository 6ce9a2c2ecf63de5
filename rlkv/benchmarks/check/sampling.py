"""A rollout as in training: rows are sampled under gates between 0 and 1, with their
log-probabilities.
"""

from __future__ import annotations

import torch

from rlkv.attention.head_gate import gates_matrix, set_gates
from rlkv.benchmarks.check.one import Check, Findings, Setting
from rlkv.benchmarks.check.update import gated_model, plain_score
from rlkv.benchmarks.turns import timed
from rlkv.rollout.base import Rows, SamplingParams
from rlkv.rollout.decoding import Row
from rlkv.rollout.hf import roll_out
from rlkv.training.trainer import completion_logprobs

ROWS, TOKENS, TOKENS_ON_CPU = 16, 200, 20
PROMPT, PROMPT_ON_CPU = (
    600,
    100,
)  # the longest: more than sink and window, which the local branch then leaves
# mean difference of log-probabilities, token by token or read at once: rounding in bfloat16 gives
# about 0.02
TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-4}


def run(setting: Setting, found: Findings) -> None:
    tokens, longest = (TOKENS, PROMPT) if setting.on_gpu else (TOKENS_ON_CPU, PROMPT_ON_CPU)
    model = gated_model(setting, found, longest + tokens).eval()
    generator = torch.Generator().manual_seed(0)
    set_gates(model, torch.rand(gates_matrix(model).shape, generator=generator))
    vocabulary, base = model.config.vocab_size, model.get_base_model()
    # of different lengths, so that most rows are padded on the left
    prompts = [
        torch.randint(0, vocabulary, (longest - 3 * i,), generator=generator).tolist()
        for i in range(ROWS)
    ]
    rows, sampling = Rows(prompts, list(range(ROWS)), 0), SamplingParams(tokens, temperature=1.0)
    sampled: list[Row] = []

    def sample() -> None:
        sampled.extend(
            roll_out(base, rows, sampling, eos_ids=[vocabulary], pad_id=0, max_rows=ROWS)
        )

    seconds = timed(sample, setting.device)
    found.figures |= {"rows": ROWS, "tokens each": tokens, "tokens/s": ROWS * tokens / seconds}
    whole = sum(len(row.token_ids) == tokens for row in sampled)
    found.require(whole == ROWS, f"{whole} of {ROWS} rows have {tokens} tokens")
    difference = 0.0
    for row in sampled:
        ids = torch.tensor([prompts[row.index] + row.token_ids], device=setting.device)
        with torch.no_grad():
            again = completion_logprobs(
                plain_score(base), ids, torch.ones_like(ids), len(row.token_ids), 1
            )
        difference += float((again[0].cpu() - torch.tensor(row.logprobs)).abs().mean()) / len(
            sampled
        )
    found.figures["difference of log-probabilities"] = difference
    allowed = TOLERANCE[setting.dtype]
    found.require(
        difference < allowed,
        f"log-probabilities differ by {difference:.2g} on average, allowed {allowed:g}",
    )


CHECK = Check(
    "rollout",
    "16 rows are sampled under gates with the log-probabilities that the trainer computes.",
    run,
)
