"""Sampling in vLLM with the training loop's own draws, so that the same rows give the same tokens
in every engine.

vLLM does not give log-probabilities of the tempered distribution, before top-k and top-p. So a
logits processor draws each row's token: its value becomes its log-probability, which the engine
reports, and all others minus infinity. The engine's two model runners take processors of different
kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotProcessor

from rlkv.rollout.decoding import draw_tokens, row_draws, token_logprobs
from rlkv.utils.devices import moved
from rlkv.vllm.settings import DRAW_KEY


class _Row:
    """The draws of one request."""

    def __init__(self, draw: dict[str, Any], tokens: int) -> None:
        self.kind = (draw["temperature"], draw["top_p"], draw["top_k"])
        row = draw["row"]
        self.draws: np.ndarray = row_draws(
            draw["seed"], draw["rollout"], range(row, row + 1), tokens
        )[0].numpy()

    @classmethod
    def of(cls, params: Any) -> _Row | None:
        """What a request's parameters ask for; None: it is not one of rlkv's."""
        draw = (params.extra_args or {}).get(DRAW_KEY)
        return None if draw is None else cls(draw, params.max_tokens or 1)

    def draw(self, made: int) -> float:
        """For the token after ``made`` of them.

        Chunks of a prompt pass here without giving a token.
        """
        return float(self.draws[min(max(made, 0), len(self.draws) - 1)])


def choose_tokens(logits: Tensor, rows: Mapping[int, tuple[_Row, int]]) -> Tensor:
    """Leave one token in each line of ``logits`` ``[lines, vocabulary]`` that has a row, with its
    tokens so far.
    """
    kinds: dict[tuple[float, float, int], list[int]] = {}
    for line, (row, _) in rows.items():
        kinds.setdefault(row.kind, []).append(line)
    for (temperature, top_p, top_k), lines in kinds.items():
        place = moved(torch.tensor(lines), logits.device)
        chosen = logits[place]
        if temperature == 0:
            token_R, scale = chosen.argmax(-1), 1.0
        else:
            draws = [row.draw(made) for row, made in (rows[line] for line in lines)]
            draw_R = moved(torch.tensor(draws, dtype=torch.float64), logits.device)
            token_R, scale = draw_tokens(chosen, draw_R, temperature, top_p, top_k), temperature
        logprob_R = token_logprobs(chosen, token_R, scale).to(logits.dtype)
        logits[place] = float("-inf")
        logits[place, token_R] = logprob_R
    return logits


class BatchDraws(LogitsProcessor):
    """Of the first model runner, whose batches tell what moved.

    Rows without :data:`DRAW_KEY` pass untouched.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        # the list is the engine's own: its length is right also when a preempted request comes back
        # with its tokens
        self.rows: dict[int, tuple[_Row, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            self.rows.pop(index, None)
            if (row := _Row.of(params)) is not None:
                self.rows[index] = (row, output)
        for source, target, direction in batch_update.moved:
            moved, replaced = self.rows.pop(source, None), self.rows.pop(target, None)
            if moved is not None:
                self.rows[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self.rows[source] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        return choose_tokens(
            logits, {index: (row, len(output)) for index, (row, output) in self.rows.items()}
        )


class SlotDraws(SlotProcessor):
    """Of the second model runner, in which a request keeps its slot.

    It may be a step ahead of the scheduler.
    """

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.prompt_lengths: np.ndarray = req_states.prompt_len.np
        self.rows: dict[int, _Row] = {}

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self.rows.pop(req_idx, None)
        if (row := _Row.of(sampling_params)) is not None:
            self.rows[req_idx] = row
        return row is not None

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        slots = ctx.idx_mapping_np.tolist()
        assert len(slots) == len(logits), "speculative decoding is refused at start"
        # exact without speculative decoding, and known on the host before the tokens themselves are
        lengths = ctx.seq_lens_upper_bound_np[: len(slots)].tolist()
        rows = {
            line: (self.rows[slot], length - int(self.prompt_lengths[slot]))
            for line, (slot, length) in enumerate(zip(slots, lengths, strict=True))
            if slot in self.rows
        }
        return choose_tokens(logits, rows)
