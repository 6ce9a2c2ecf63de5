"""The decoding loop of transformers models: rows that end make room for waiting prompts.

Shapes: R rows in the batch, Q new columns, V tokens of the vocabulary.  The tokens of every row end
at the last column; what lies before them is padding.
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

from rlkv.models.loading import cache_argument
from rlkv.models.shape import rotation_change
from rlkv.rollout.base import FinishReason, SamplingParams
from rlkv.rollout.graphed import GraphedStep, graphed_step
from rlkv.utils.devices import moved
from rlkv.utils.runtime import GRAPH, switched_on

AT_ONCE = 1024  # most likely tokens that are looked at before all are sorted
# share of rows that still run at which the others leave: every change copies the cache
REFILL_AT = 0.75
# the same where a graph serves and no prompt waits: its time hardly depends on the rows
GRAPH_LEAVE_AT = 0.25
READ_TOGETHER = 16  # prompts that are read in one call even if their lengths differ
# tokens, with padding, of several prompts that are read in one call where further rows can join:
# 8 prompts of 32k in one would make masks and MLP states of 8 GB each
READ_AT_ONCE = 2**15
GRAPH_AFTER = 1  # step of the same rows, which loads what a recording may not load
GRAPH_AGAIN = 256  # steps after one that could not be made: trying takes longer than a step
SIMILAR = 0.9  # of the longest prompt's length, which further ones must have: the rest is padding


# --- drawing tokens


def row_draws(seed: int, rollout: int, rows: Sequence[int], tokens: int) -> Tensor:
    """Draw numbers in [0, 1), float64 ``[len(rows), tokens]``, as (seed, rollout, row) fix them."""
    draws = []
    for row in rows:
        stream = np.random.Generator(np.random.Philox(key=[seed, (rollout << 32) | row]))
        draws.append(stream.random(tokens))
    return torch.from_numpy(np.stack(draws))


def draw_tokens(
    logits_RV: Tensor, draw_R: Tensor, temperature: float, top_p: float, top_k: int
) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution: int64 ``[R]``.

    In the order of transformers: temperature, then ``top_k`` (0: all), then ``top_p``.
    """
    scaled = logits_RV.double() / temperature
    token_RK = None
    if top_k or top_p < 1:
        logprobs = scaled - scaled.logsumexp(-1, keepdim=True)
        token_RK = _likely_tokens(logits_RV, logprobs, top_p, top_k)
        probs = logprobs.gather(1, token_RK).exp()
        if top_k:
            probs[:, top_k:] = 0
        before = probs.cumsum(-1) - probs
        everything = probs.sum(-1, keepdim=True) if top_k else 1.0
        probs = probs.masked_fill(before >= top_p * everything, 0)
    else:
        probs = torch.softmax(scaled, dim=-1)
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    # below the total, so that a token of positive probability is found
    most = torch.nextafter(total, torch.zeros_like(total))
    wanted = torch.minimum(draw_R.to(total)[:, None] * total, most)
    index = torch.searchsorted(cumulative, wanted, right=True)
    return index[:, 0] if token_RK is None else token_RK.gather(1, index)[:, 0]


def _likely_tokens(logits_RV: Tensor, logprobs_RV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Return tokens that hold all which ``top_k`` and ``top_p`` keep, the most likely first.

    Of equal ones the first comes first.  The whole vocabulary is sorted only if the ``AT_ONCE``
    most likely tokens are not enough, or end among equal ones: which of these a GPU picks depends
    on the batch.
    """
    if logits_RV.shape[1] > AT_ONCE:
        found, token_RK = logits_RV.topk(AT_ONCE, dim=-1)
        surely_RK = found > found[:, -1:]
        if top_k:
            enough_R = surely_RK.sum(-1) >= top_k
        else:
            inside_RK = logprobs_RV.gather(1, token_RK).exp().masked_fill(~surely_RK, 0)
            enough_R = inside_RK.sum(-1) >= top_p
        if bool(enough_R.all()):
            token_RK = token_RK.sort(dim=-1).values
            order = logits_RV.gather(1, token_RK).sort(dim=-1, descending=True, stable=True).indices
            return token_RK.gather(1, order)
    return logits_RV.sort(dim=-1, descending=True, stable=True).indices


def token_logprobs(logits_RV: Tensor, token_R: Tensor, temperature: float) -> Tensor:
    """Return ``log softmax(logits / temperature)`` of the tokens, float32 ``[R]``, as in the loss.

    Top-k and top-p do not count.
    """
    logprobs = torch.log_softmax(logits_RV.float() / temperature, dim=-1)
    return logprobs.gather(1, token_R[:, None])[:, 0]


# --- the loop


class StopRule(Protocol):
    """Decides after each new token of a row, given all of its new tokens, whether it is to end."""

    def ends(self, token_ids: list[int]) -> bool: ...


@dataclass
class Row:
    """A completion while it is decoded and when it has ended: tokens with the end token.

    ``seconds``: its share of the time, each moment in equal parts to the rows that still run.
    """

    index: int
    draws: list[float]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class _Prompt:
    index: int
    token_ids: list[int]
    number: int


@dataclass(frozen=True)
class Decoding:
    """A decoding: the model, its cache, how tokens are chosen, and who is told of them.

    Attributes:
        model: in eval mode, on its device.
        new_cache: an empty cache for texts of at most so many columns, of the prompts with these
            indices; None: the model's own.  For a single prompt it may hold the first tokens of it
            already.  Where the cache has ``can_join``, prompts of about the same length are read
            together and join the running batch; otherwise the next batch begins when one has ended.
        rollout: which of the calls with one seed this is: its draws are others.
        logprobs: whether log-probabilities are noted.
        stop: ends rows early, with the reason ``repetition``.
        on_token: called with the prompt's index and each of its new tokens.
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
    on_token: Callable[[int, int], None] | None = None
    before_change: Callable[[Cache], None] | None = None
    sharded: bool = False

    def run(self, prompts: list[list[int]], numbers: Sequence[int] | None = None) -> Iterator[Row]:
        """Yield each row as it ends; the longest prompts begin.

        ``numbers``: of the rows, which fix their draws; default: 0, 1, 2...

        Raises:
            ValueError: if what a row is read with would follow from its neighbours' lengths.
        """
        self._check_rotation([len(prompt) for prompt in prompts])
        context: Any = torch.no_grad() if self.sharded else torch.inference_mode()
        return context(self._run)(prompts, numbers)

    def _check_rotation(self, lengths: list[int]) -> None:
        if len(lengths) < 2:
            return
        limit = max(lengths) + self.sampling.max_new_tokens
        change = rotation_change(self.model.config, min(lengths), limit)
        if change is None or (self.max_rows == 1 and not change.keeps):
            return
        alone = "" if change.keeps else ", or decode one row at a time (batch size 1)"
        raise ValueError(
            f"{change.said}, with which the others would be read too: end them earlier, by fewer "
            f"new tokens{alone}"
        )

    def _run(self, prompts: list[list[int]], numbers: Sequence[int] | None) -> Iterator[Row]:
        numbers = range(len(prompts)) if numbers is None else numbers
        longest_first = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        waiting = deque(_Prompt(index, prompts[index], numbers[index]) for index in longest_first)

        def admit(rows: int, together: int) -> _Batch:
            """Take the next prompts, at most ``rows``; beyond ``together`` only similar ones."""
            longest = len(waiting[0].token_ids)
            least = SIMILAR * longest
            if joins:
                rows = min(rows, max(1, READ_AT_ONCE // longest))
            read = [waiting.popleft() for _ in range(min(rows, together, len(waiting)))]
            while waiting and len(read) < rows and len(waiting[0].token_ids) >= least:
                read.append(waiting.popleft())
            return _Batch(self, read)

        while waiting:
            joins = getattr(self.new_cache(1, [waiting[0].index]), "can_join", False)
            batch = admit(self.max_rows, READ_TOGETHER if joins else self.max_rows)
            try:
                while batch.rows:
                    yield from batch.step()
                    if batch.num_running <= batch.leave_at(bool(waiting)) * len(batch.rows):
                        batch.leave()
                    while joins and waiting and batch.rows and len(batch.rows) < self.max_rows:
                        joining = admit(self.max_rows - len(batch.rows), READ_TOGETHER)
                        yield from joining.step()
                        joining.leave()
                        batch.join(joining)
                        del joining  # the cache of its prompts
            finally:  # where the caller stops early, its cache still holds what was decoded
                batch.forget_graph()


class _Batch:
    """Rows that are decoded together: their cache, and the tokens that it does not hold yet."""

    def __init__(self, decoding: Decoding, prompts: list[_Prompt]) -> None:
        started = time.perf_counter()
        self.decoding = decoding
        sampling = decoding.sampling
        device = decoding.model.device
        draws: list[list[float]] = [[] for _ in prompts]
        if not sampling.greedy:
            numbers = [prompt.number for prompt in prompts]
            drawn = row_draws(sampling.seed, decoding.rollout, numbers, sampling.max_new_tokens)
            draws = drawn.tolist()
        self.rows = [
            Row(prompt.index, row_draw) for prompt, row_draw in zip(prompts, draws, strict=True)
        ]
        length = max(len(prompt.token_ids) for prompt in prompts)
        padding = [length - len(prompt.token_ids) for prompt in prompts]
        padded = [
            [decoding.pad_id] * count + prompt.token_ids
            for count, prompt in zip(padding, prompts, strict=True)
        ]
        self.cache: Any = decoding.new_cache(
            length + sampling.max_new_tokens, [row.index for row in self.rows]
        )
        self.columns = 0 if self.cache is None else int(self.cache.get_seq_length())
        self.new_RQ = torch.tensor(padded, device=device)[:, self.columns :]
        self.padding_R = torch.tensor(padding, device=device)
        self.running_R = torch.ones(len(prompts), dtype=torch.bool, device=device)
        self.last = torch.tensor([-1], device=device)
        self.steps = 0  # of one token each, since the rows last changed
        self.graphed: GraphedStep | None = None
        # seconds around the steps, which the next one divides among its rows
        self.unpaid = time.perf_counter() - started

    @property
    def num_running(self) -> int:
        return sum(row.finish_reason is None for row in self.rows)

    def step(self) -> list[Row]:
        """Read the new tokens and choose the next one of each row.

        Returns the rows that end with it.
        """
        started = time.perf_counter()
        running = [row for row in self.rows if row.finish_reason is None]
        token_R, logprob_R = self._choose(self._read())
        self.new_RQ = token_R[:, None]
        chosen = zip(self.rows, token_R.tolist(), logprob_R.tolist(), strict=True)
        for row, token, logprob in chosen:
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
        begin = self.columns
        self.columns += self.new_RQ.shape[1]
        self.steps = self.steps + 1 if self.new_RQ.shape[1] == 1 else 0
        self._renew_graph()
        if self.graphed is not None:
            return self.graphed(self.new_RQ, self.running_R)
        column = torch.arange(self.columns, device=self.padding_R.device)
        position_RQ = (column[begin:] - self.padding_R[:, None]).clamp(min=0)
        model: Any = self.decoding.model
        output = model(
            input_ids=self.new_RQ,
            attention_mask=(column >= self.padding_R[:, None]).long(),
            # rows that have ended may have used all positions
            position_ids=position_RQ * self.running_R[:, None],
            use_cache=True,
            # an index copies: rows of a slice would become a slow product each
            logits_to_keep=self.last,
            **{cache_argument(): self.cache},
        )
        self.cache = output[cache_argument()]
        return output.logits[:, -1]

    def _renew_graph(self) -> None:
        """Record a graph of a step, where it pays and one can be made."""
        if self.graphed is not None and not self.graphed.has_room:
            self._drop_graph()
        if self.graphed is not None or self.steps <= GRAPH_AFTER or self.decoding.sharded:
            return
        if switched_on(GRAPH):
            self.graphed = graphed_step(
                self.decoding.model, self.cache, self.new_RQ, self.padding_R, self.running_R
            )
            if self.graphed is None:
                self.steps -= GRAPH_AGAIN

    def _drop_graph(self) -> None:
        if self.graphed is not None:
            self.graphed.settle()
            self.graphed = None

    def forget_graph(self) -> None:
        """Drop the graph before the cache's rows change, or others use the cache."""
        self._drop_graph()
        self.steps = min(self.steps, 0)

    def _choose(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the next tokens; with log-probabilities, 0 where they are not asked for."""
        sampling = self.decoding.sampling
        # where it is greedy as argmax, which takes 4 times as long on a CPU
        highest_R, token_R = logits_RV.max(-1)
        finite_R = highest_R.isfinite()
        if not bool(finite_R.all()):
            if bool((self.running_R & ~finite_R).any()):
                advice = "check its weights"
                if logits_RV.dtype == torch.float16:
                    advice = f"load it in bfloat16 or float32 (--dtype), or {advice}"
                dtype = logits_RV.dtype
                raise ValueError(f"the model's logits are not finite in {dtype}: {advice}")
            # of rows that have ended, from which no token could be drawn
            logits_RV = logits_RV.masked_fill(~finite_R[:, None], 0)
        if not sampling.greedy:
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
        if self.decoding.on_token is not None:
            self.decoding.on_token(row.index, token)

    def leave_at(self, are_others_waiting: bool) -> float:
        """Return the share of rows that still run at which those that have ended should leave."""
        return REFILL_AT if are_others_waiting or self.graphed is None else GRAPH_LEAVE_AT

    def leave(self) -> None:
        """Drop the rows that have ended."""
        if self.num_running == len(self.rows):
            return
        started = time.perf_counter()
        self.forget_graph()
        if self.decoding.before_change is not None:
            self.decoding.before_change(self.cache)
        self.rows = [row for row in self.rows if row.finish_reason is None]
        if self.rows:
            keep = self.running_R.nonzero()[:, 0]
            self.cache.reorder_cache(keep)  # every kind of cache has it
            self.new_RQ = self.new_RQ[keep]
            self.padding_R = self.padding_R[keep]
            self.running_R = self.running_R[keep]
        self.unpaid += time.perf_counter() - started

    def join(self, other: _Batch) -> None:
        """Append the rows of a batch whose prompts have been read."""
        if not other.rows:
            return
        started = time.perf_counter()
        self.forget_graph()
        columns = max(batch.columns - int(batch.padding_R.min()) for batch in (self, other))
        self.cache.join(other.cache, columns)
        padding = [batch.padding_R + columns - batch.columns for batch in (self, other)]
        self.padding_R = torch.cat(padding)
        self.columns = columns
        self.rows += other.rows
        self.new_RQ = torch.cat([self.new_RQ, other.new_RQ])
        self.running_R = torch.cat([self.running_R, other.running_R])
        self.unpaid += other.unpaid + time.perf_counter() - started
