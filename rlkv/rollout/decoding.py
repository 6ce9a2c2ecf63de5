"""The decoding loop of transformers models: rows that end leave the batch, and waiting prompts take
their places.

Shapes: R rows in the batch, T cached columns, V tokens of the vocabulary.  The tokens of every row
end at the last column; what lies before them is padding.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from rlkv.rollout.base import FinishReason, SamplingParams
from rlkv.utils.devices import moved

AT_ONCE = 1024  # most likely tokens that are looked at before all are sorted


def row_draws(seed: int, rollout: int, rows: Sequence[int], tokens: int) -> Tensor:
    """Numbers in [0, 1), float64 ``[len(rows), tokens]``, one Philox stream per (seed, rollout,
    row).
    """
    streams = [
        np.random.Generator(np.random.Philox(key=[seed, (rollout << 32) | row])) for row in rows
    ]
    return torch.from_numpy(np.stack([stream.random(tokens) for stream in streams]))


def draw_tokens(
    logits_RV: Tensor, draw_R: Tensor, temperature: float, top_p: float, top_k: int
) -> Tensor:
    """One token per row by inverting the cumulative distribution: int64 ``[R]``.

    In the order of transformers: temperature, then ``top_k`` (0: all), then ``top_p``.
    """
    logits, token_RV = logits_RV.double() / temperature, None
    if top_k or top_p < 1:
        total_R1 = logits.logsumexp(-1, keepdim=True)
        token_RV = _likely_tokens(logits_RV, (logits, total_R1), top_p, top_k)
        probs = (logits.gather(1, token_RV) - total_R1).exp()
        if top_k:
            probs[:, top_k:] = 0
        before = probs.cumsum(-1) - probs
        everything = probs.sum(-1, keepdim=True) if top_k else 1.0
        probs = probs.masked_fill(before >= top_p * everything, 0)
    else:
        probs = torch.softmax(logits, dim=-1)
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    # below the total, so that a token of positive probability is found
    wanted = torch.minimum(
        draw_R.to(total)[:, None] * total, torch.nextafter(total, torch.zeros_like(total))
    )
    index = torch.searchsorted(cumulative, wanted, right=True)
    return index[:, 0] if token_RV is None else token_RV.gather(1, index)[:, 0]


def _likely_tokens(
    logits_RV: Tensor, scaled: tuple[Tensor, Tensor], top_p: float, top_k: int
) -> Tensor:
    """Tokens that hold all which ``top_k`` and ``top_p`` keep, the most likely first, of equal ones
    the first.

    ``scaled``: logits in float64 and their log-sum-exp.  The whole vocabulary is sorted only if the
    ``AT_ONCE`` most likely tokens are not enough, or end among equal ones: which of these a GPU
    picks depends on the batch.
    """
    if logits_RV.shape[1] > AT_ONCE:
        found, token_RK = logits_RV.topk(AT_ONCE, dim=-1)
        surely_RK = found > found[:, -1:]
        if top_k:
            enough_R = surely_RK.sum(-1) >= top_k
        else:
            logits, total_R1 = scaled
            inside_RK = (logits.gather(1, token_RK) - total_R1).exp().masked_fill(~surely_RK, 0)
            enough_R = inside_RK.sum(-1) >= top_p
        if bool(enough_R.all()):
            token_RK = token_RK.sort(dim=-1).values
            order = logits_RV.gather(1, token_RK).sort(dim=-1, descending=True, stable=True).indices
            return token_RK.gather(1, order)
    return logits_RV.sort(dim=-1, descending=True, stable=True).indices


def token_logprobs(logits_RV: Tensor, token_R: Tensor, temperature: float) -> Tensor:
    """``log softmax(logits / temperature)`` of the tokens, before top-k and top-p, as in the loss:
    float32 ``[R]``.
    """
    logprobs = torch.log_softmax(logits_RV.float() / temperature, dim=-1)
    return logprobs.gather(1, token_R[:, None])[:, 0]


REFILL_AT = (
    0.75  # share of rows that still run at which the others leave: every change copies the cache
)
READ_TOGETHER = 16  # prompts that are read in one call even if their lengths differ
SIMILAR = (
    0.9  # share of the longest prompt's length that further ones must have: the rest is padding
)


class StopRule(Protocol):
    """Decides after each new token of a row, given all of its new tokens, whether the row is to
    end.
    """

    def ends(self, token_ids: list[int]) -> bool: ...


@dataclass
class Row:
    """A completion while it is decoded and when it has ended: tokens with the end token, without
    padding.
    """

    index: int
    draws: list[float]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    seconds: float = (
        0.0  # its share of the time: each moment in equal parts to the rows that still run
    )


@dataclass(frozen=True)
class Decoding:
    """How prompts are decoded.

    Attributes:
        model: in eval mode, on its device.
        new_cache: an empty cache for texts of at most so many columns, of the prompts with these
            indices; None: the model's own.  Where the cache has ``can_join``, prompts of about the
            same length are read together and join the running batch; otherwise the next batch
            begins when one has ended.
        rollout: which of the calls with one seed this is: its draws are others.
        logprobs: whether log-probabilities are noted.
        stop: ends rows early, with the reason ``repetition``.
        before_change: called with the cache before rows leave it.
        sharded: whether the weights are gathered for each forward; what training reuses must not be
            of inference mode.
    """

    model: PreTrainedModel
    sampling: SamplingParams
    eos_ids: Sequence[int]
    pad_id: int
    max_rows: int
    new_cache: Callable[[int, list[int]], Cache | None]
    rollout: int = 0
    logprobs: bool = False
    stop: StopRule | None = None
    before_change: Callable[[Cache], None] | None = None
    sharded: bool = False

    def run(self, prompts: list[list[int]], numbers: Sequence[int] | None = None) -> Iterator[Row]:
        """Yield each row as it ends; the longest prompts begin.

        Args:
            numbers: of the rows, which fix their draws (:mod:`rlkv.rollout.decoding`); default: 0,
                1, 2...
        """
        context: Any = torch.no_grad() if self.sharded else torch.inference_mode()
        return context(self._run)(prompts, numbers)

    def _run(self, prompts: list[list[int]], numbers: Sequence[int] | None) -> Iterator[Row]:
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        waiting = deque((i, prompts[i], i if numbers is None else numbers[i]) for i in order)

        def admit(rows: int, together: int) -> _Batch:
            """The next prompts, at most ``rows``.

            Beyond ``together`` those that need little padding.
            """
            least = SIMILAR * len(waiting[0][1])
            read = [waiting.popleft() for _ in range(min(rows, together, len(waiting)))]
            while waiting and len(read) < rows and len(waiting[0][1]) >= least:
                read.append(waiting.popleft())
            return _Batch(self, read)

        while waiting:
            joins = getattr(self.new_cache(1, [waiting[0][0]]), "can_join", False)
            batch = admit(self.max_rows, READ_TOGETHER if joins else self.max_rows)
            while batch.rows:
                yield from batch.step()
                if batch.num_running <= REFILL_AT * len(batch.rows):
                    batch.leave()
                while joins and waiting and batch.rows and len(batch.rows) < self.max_rows:
                    joining = admit(self.max_rows - len(batch.rows), READ_TOGETHER)
                    yield from joining.step()
                    joining.leave()
                    batch.join(joining)
                    del joining  # the cache of its prompts


class _Batch:
    """Rows that are decoded together: their cache, and the tokens that it does not hold yet."""

    def __init__(self, decoding: Decoding, prompts: list[tuple[int, list[int], int]]) -> None:
        started = time.perf_counter()
        self.decoding, sampling, device = decoding, decoding.sampling, decoding.model.device
        draws: list[list[float]] = [[] for _ in prompts]
        if not sampling.greedy:
            numbers = [number for _, _, number in prompts]
            draws = row_draws(
                sampling.seed, decoding.rollout, numbers, sampling.max_new_tokens
            ).tolist()
        self.rows = [Row(index, drawn) for (index, _, _), drawn in zip(prompts, draws, strict=True)]
        length = max(len(ids) for _, ids, _ in prompts)
        padded = [[decoding.pad_id] * (length - len(ids)) + ids for _, ids, _ in prompts]
        self.new_RQ = torch.tensor(padded, device=device)
        self.padding_R = torch.tensor([length - len(ids) for _, ids, _ in prompts], device=device)
        self.running_R = torch.ones(len(prompts), dtype=torch.bool, device=device)
        self.last = torch.tensor([-1], device=device)
        self.columns = 0
        self.cache: Any = decoding.new_cache(
            length + sampling.max_new_tokens, [row.index for row in self.rows]
        )
        self.unpaid = (
            time.perf_counter() - started
        )  # seconds around the steps, which the next one divides among rows

    @property
    def num_running(self) -> int:
        return sum(row.finish_reason is None for row in self.rows)

    def step(self) -> list[Row]:
        """Read the new tokens and choose the next one of each row.

        Returns the rows that end with it.
        """
        started, running = (
            time.perf_counter(),
            [row for row in self.rows if row.finish_reason is None],
        )
        token_R, logprob_R = self._choose(self._read())
        self.new_RQ = token_R[:, None]
        for row, token, logprob in zip(
            self.rows, token_R.tolist(), logprob_R.tolist(), strict=True
        ):
            if row.finish_reason is None:
                self._append(row, int(token), logprob)
        seconds = (time.perf_counter() - started + self.unpaid) / len(running)
        self.unpaid = 0.0
        for row in running:
            row.seconds += seconds
        ended = [row for row in running if row.finish_reason is not None]
        if ended:
            flags = [row.finish_reason is None for row in self.rows]
            self.running_R = torch.tensor(flags, device=self.padding_R.device)
        return ended

    def _read(self) -> Tensor:
        """Read the new tokens: the logits ``[R, V]`` of the next one."""
        begin, end = self.columns, self.columns + self.new_RQ.shape[1]
        self.columns = end
        column = torch.arange(end, device=self.padding_R.device)
        position_RQ = (column[begin:] - self.padding_R[:, None]).clamp(min=0)
        model: Any = self.decoding.model
        output = model(
            input_ids=self.new_RQ,
            attention_mask=(column >= self.padding_R[:, None]).long(),
            # rows that have ended may have used all positions
            position_ids=position_RQ * self.running_R[:, None],
            past_key_values=self.cache,
            use_cache=True,
            # by index, which copies: rows of a slice do not lie together, and become a slow product
            # each
            logits_to_keep=self.last,
        )
        self.cache = output.past_key_values
        return output.logits[:, -1]

    def _choose(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """The next tokens, and their log-probabilities (0 where they are not asked for)."""
        sampling = self.decoding.sampling
        if sampling.greedy:
            token_R = logits_RV.max(-1).indices  # as argmax, which takes 4 times as long on a CPU
        else:
            drawn = [
                0.0 if row.finish_reason else row.draws[len(row.token_ids)] for row in self.rows
            ]
            draw_R = moved(torch.tensor(drawn, dtype=torch.float64), logits_RV.device)
            token_R = draw_tokens(
                logits_RV, draw_R, sampling.temperature, sampling.top_p, sampling.top_k
            )
        if not self.decoding.logprobs:
            return token_R, torch.zeros(len(token_R))
        return token_R, token_logprobs(logits_RV, token_R, sampling.temperature or 1.0)

    def _append(self, row: Row, token: int, logprob: float) -> None:
        row.token_ids.append(token)
        row.logprobs.append(logprob)
        stop = self.decoding.stop
        if token in self.decoding.eos_ids:
            row.finish_reason = "stop"
        elif stop is not None and stop.ends(row.token_ids):
            row.finish_reason = "repetition"
        elif len(row.token_ids) == self.decoding.sampling.max_new_tokens:
            row.finish_reason = "length"

    def leave(self) -> None:
        """Drop the rows that have ended."""
        if self.num_running == len(self.rows):
            return
        started = time.perf_counter()
        if self.decoding.before_change is not None:
            self.decoding.before_change(self.cache)
        keep = self.running_R.nonzero()[:, 0]
        self.rows = [row for row in self.rows if row.finish_reason is None]
        if self.rows:
            self.cache.reorder_cache(keep)  # every kind of cache has it
            self.new_RQ, self.padding_R, self.running_R = (
                self.new_RQ[keep],
                self.padding_R[keep],
                self.running_R[keep],
            )
        self.unpaid += time.perf_counter() - started

    def join(self, other: _Batch) -> None:
        """Append the rows of a batch whose prompts have been read."""
        if not other.rows:
            return
        started = time.perf_counter()
        columns = max(batch.columns - int(batch.padding_R.min()) for batch in (self, other))
        self.cache.join(other.cache, columns)
        padding = [batch.padding_R + columns - batch.columns for batch in (self, other)]
        self.rows += other.rows
        self.padding_R, self.columns = torch.cat(padding), columns
        self.new_RQ = torch.cat([self.new_RQ, other.new_RQ])
        self.running_R = torch.cat([self.running_R, other.running_R])
        self.unpaid += other.unpaid + time.perf_counter() - started
