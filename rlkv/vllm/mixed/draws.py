"""Sampling in vLLM with the training loop's own draws, so that the same rows give the same tokens in every engine.

vLLM does not give log-probabilities of the tempered distribution, before top-k and top-p. So a logits processor draws
each row's token: its value becomes its log-probability, which the engine reports, and all others minus infinity.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from rlkv.rollout.draws import draw_tokens, row_draws, token_logprobs
from rlkv.vllm.settings import DRAW_KEY


class _Row:
    """The draws of one request; ``output`` is the engine's own, growing list of its tokens."""

    def __init__(self, draw: dict[str, Any], tokens: int, output: list[int]) -> None:
        self.kind = (draw["temperature"], draw["top_p"], draw["top_k"])
        row = draw["row"]
        self.draws: np.ndarray = row_draws(draw["seed"], draw["rollout"], range(row, row + 1), tokens)[0].numpy()
        self.output = output

    def next(self) -> float:
        # the number of tokens so far, not a counter: a preempted request comes back with its tokens, and the chunks
        # of a prompt pass here without giving one
        return float(self.draws[min(len(self.output), len(self.draws) - 1)])


class RowDraws(LogitsProcessor):
    """Draws for the rows whose ``extra_args`` hold :data:`DRAW_KEY`; other rows pass untouched."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            self.rows.pop(index, None)
            draw = (params.extra_args or {}).get(DRAW_KEY)
            if draw is not None:
                self.rows[index] = _Row(draw, params.max_tokens or 1, output)
        for source, target, direction in batch_update.moved:
            moved, replaced = self.rows.pop(source, None), self.rows.pop(target, None)
            if moved is not None:
                self.rows[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self.rows[source] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        kinds: dict[tuple[float, float, int], list[int]] = {}
        for index, row in self.rows.items():
            kinds.setdefault(row.kind, []).append(index)
        for (temperature, top_p, top_k), indices in kinds.items():
            place = torch.tensor(indices, device=logits.device)
            chosen = logits[place]
            if temperature == 0:
                token_R, scale = chosen.argmax(-1), 1.0
            else:
                draw_R = torch.tensor([self.rows[i].next() for i in indices], dtype=torch.float64, device=logits.device)
                token_R, scale = draw_tokens(chosen, draw_R, temperature, top_p, top_k), temperature
            logprob_R = token_logprobs(chosen, token_R, scale).to(logits.dtype)
            logits[place] = float("-inf")
            logits[place, token_R] = logprob_R
        return logits
