"""A check of what attention reads: ``RLKV_CHECK=1`` compares it with the settings in every step.

Next to each cache lies a tag for each token: a hash of the text up to it.  The entries that a
kernel is handed for a query must have the tags of the tokens that the settings let it see, each
once: whatever block tables, managers of blocks, preemption and cached prefixes did.  Of some
queries the output is computed again in float64.

Sinks and windows only: what an eviction policy has kept does not follow from positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform

from rlkv.attention.softmax import Softmax
from rlkv.vllm.paged import Reads
from rlkv.vllm.plugin import wrap_once
from rlkv.vllm.settings import CHECK, FULL, ServingSettings, asks_for_check

OUTPUTS_EVERY = 29  # calls of a layer of which one is computed again
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
UNWRITTEN = -1


@dataclass(frozen=True)
class SeenTokens:
    """The specification: what queries see, from the settings alone.

    ``block``: tokens of a block, if windows are aligned to them, else 1; None: full heads.
    """

    settings: ServingSettings
    block: int | None

    def positions(self, position: int, prompt: int) -> list[int]:
        """Return the positions that are seen from one, in a text with such a prompt."""
        settings = self.settings
        reads_prompt = settings.prefill == FULL and position < prompt
        if self.block is None or reads_prompt:
            return list(range(position + 1))
        assert settings.sink is not None
        assert settings.window is not None
        first = max(settings.sink, prompt) if settings.protect_prompt else settings.sink
        first = -(-first // self.block) * self.block
        window = (position - settings.window + 1) // self.block * self.block
        return [place for place in range(position + 1) if place < first or place >= window]


@dataclass(frozen=True)
class Row:
    """A query and what its kernel is handed: ``token``, its place in the step, and slots."""

    token: int
    slots: Tensor


@dataclass
class Text:
    """A request's tokens as far as they were read, and the hash of each prefix."""

    prompt: int
    tokens: list[int]
    hashes: list[int] = field(default_factory=list)


def _hash(before: int, token: int) -> int:
    return hash((before, token)) & (2**62 - 1)


class ReachabilityCheck:
    """Counts of what was compared; tags by the layer, or the bin, with the block table."""

    def __init__(self) -> None:
        self.sets = 0
        self.outputs = 0
        self.largest = 0.0
        self._texts: dict[str, Text] = {}
        self._tags: dict[str, Tensor] = {}
        self._checked: set[tuple[str, Any]] = set()  # in this step
        self._calls = 0
        self._states: dict[str, Tensor] = {}
        self._places: list[tuple[Text, int]] = []  # of the step's tokens: text and position

    def begin(self, runner: Any, input_ids: Tensor, positions: Tensor) -> None:
        """Note the step's tokens, which the runner is about to read."""
        self._checked.clear()
        self._places = []
        batch = runner.input_batch
        ids = input_ids.tolist()
        at = positions.tolist()
        starts = runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
        for row, (first, end) in enumerate(pairwise(starts)):
            name = batch.req_ids[row]
            prompt = int(batch.num_prompt_tokens[row])
            text = self._texts.setdefault(name, Text(prompt, []))
            for place in range(first, end):
                position = at[place]
                while len(text.tokens) < position:  # in the cache by another request
                    text.tokens.append(int(batch.token_ids_cpu[row, len(text.tokens)]))
                del text.tokens[position:], text.hashes[position:]
                text.tokens.append(ids[place])
                self._places.append((text, position))
            while len(text.hashes) < len(text.tokens):
                before = text.hashes[-1] if text.hashes else 0
                text.hashes.append(_hash(before, text.tokens[len(text.hashes)]))
        alive = set(batch.req_ids)
        self._texts = {name: text for name, text in self._texts.items() if name in alive}

    def write(self, table: str, entries: int, slots: Tensor) -> None:
        """Tag the slots that the step writes, of the cache of ``table`` with so many entries."""
        if table not in self._tags:
            self._tags[table] = torch.full((entries,), UNWRITTEN, dtype=torch.int64)
        for (text, position), slot in zip(self._places, slots.tolist(), strict=False):
            if slot >= 0:
                self._tags[table][slot] = text.hashes[position]

    def forget(self, table: str, slots: Tensor) -> None:
        """Note that drafts were written, which must not be read before they are written again."""
        if table in self._tags:
            self._tags[table][slots[slots >= 0]] = UNWRITTEN

    def compare(self, table: str, key: Any, rows: list[Row], heads: int, seen: SeenTokens) -> None:
        """Compare rows with what their queries see, once in a step for each ``key``.

        heads: that read the same.

        Raises:
            RuntimeError: for the first query that is handed anything else.
        """
        if (table, key) in self._checked:
            return
        self._checked.add((table, key))
        tags = self._tags[table]
        for row in rows:
            text, position = self._places[row.token]
            wanted = [text.hashes[place] for place in seen.positions(position, text.prompt)]
            found = tags[row.slots].tolist()
            if sorted(wanted) != sorted(found):
                missing = len(set(wanted) - set(found))
                foreign = len(set(found) - set(wanted))
                raise RuntimeError(
                    f"rlkv: {CHECK}: the query at position {position:,} is handed "
                    f"{len(found):,} entries of {table}, where the settings say {len(wanted):,}: "
                    f"{missing:,} are missing and {foreign:,} are of other tokens"
                )
            self.sets += heads

    def recompute(
        self,
        name: str,
        entries: int,
        slots: Tensor,
        states: tuple[Tensor, Tensor, Tensor],
        rows: list[Row],
        softmax: Softmax,
        out: Tensor,
    ) -> None:
        """Compute the last query of one call in ``OUTPUTS_EVERY`` again, in float64.

        Args:
            name: of the layer's heads whose keys and values are noted, with a place for each entry.
            states: queries ``[tokens, query heads, size]``, keys and values ``[tokens, heads,
                size]``.
            rows: as handed to the heads; the last one counts.
            out: ``[tokens, query heads, size]``.
        """
        query, key, value = states
        if name not in self._states:  # as large as the layer's cache: made once
            self._states[name] = key.new_zeros(2, entries, *key.shape[1:])
        noted = self._states[name]
        kept = slots >= 0
        tokens = len(slots)
        noted[0, slots[kept]] = key[:tokens][kept]
        noted[1, slots[kept]] = value[:tokens][kept]
        self._calls += 1
        if self._calls % OUTPUTS_EVERY:
            return
        row = rows[-1]
        keys, values = noted[:, row.slots].double().transpose(1, 2)
        groups = query[row.token].double().view(1, len(keys), -1, query.shape[2])
        expected = softmax.attend(groups, keys[None], values[None], None).flatten(0, 2)
        difference = float((out[row.token].double().view_as(expected) - expected).abs().max())
        scale = float(values.abs().max())
        if not difference <= TOLERANCES[out.dtype] * max(1.0, scale):  # NaN, too
            raise RuntimeError(
                f"rlkv: {CHECK}: an output of {name} is {difference:.1e} off float64"
            )
        self.outputs += 1
        self.largest = max(self.largest, difference)

    def summary(self) -> str:
        """Say in a sentence what was compared."""
        return (
            f"{self.sets:,} (request, head, query) sets compared, 0 differ; {self.outputs:,} "
            f"outputs recomputed, largest difference {self.largest:.1e}"
        )


def rows_of_tables(step: Any, size: int) -> Iterator[Row]:
    """Yield what the stock CPU kernel reads: of each sequence all up to the query's own token."""
    starts = step.query_start_loc.tolist()
    for table, length, (first, end) in zip(
        step.block_table, step.seq_lens.tolist(), pairwise(starts), strict=True
    ):
        place = torch.arange(length)
        slots = table[place // size].long() * size + place % size
        for token in range(first, end):
            yield Row(token, slots[: length - (end - 1 - token)])


def rows_of_reads(reads: list[Reads], prompts: list[slice], slots: Tensor) -> Iterator[Row]:
    """Yield what plain torch reads; whole prompts are read from the step itself."""
    for prompt in prompts:
        for token in range(prompt.start, prompt.stop):
            yield Row(token, slots[prompt.start : token + 1])
    for part in reads:
        requests, queries = part.position_RQ.shape
        mask = part.mask()
        tokens = torch.arange(len(slots))[part.tokens]
        for request in range(requests):
            for query in range(queries):
                own = part.places_RK.slots[request]
                seen = own if mask is None else own[mask[request, query]]
                yield Row(int(tokens[request * queries + query]), seen)


_current: list[ReachabilityCheck] = []  # of this process: none or one


def start_check(settings: ServingSettings, vllm_config: Any) -> ReachabilityCheck | None:
    """Return the check of an engine that is about to load its model; None: it was not asked for.

    Raises:
        ValueError: where the check does not see what is read.
    """
    if not asks_for_check():
        return None
    if settings.eviction is not None:
        raise ValueError(
            f"rlkv: {CHECK} does not know what an eviction policy has kept: leave one of the "
            "two out"
        )
    if vllm_config.model_config.enable_prompt_embeds:  # the runner hands the model no tokens then
        raise ValueError(
            f"rlkv: {CHECK} compares tokens, which prompts of embeddings do not have: leave it or "
            "--enable-prompt-embeds out"
        )
    if not current_platform.is_cpu():
        raise ValueError(f"rlkv: {CHECK} runs only on the CPU build of vLLM: leave it out")
    if vllm_config.use_v2_model_runner:  # it has no step that could be watched
        raise ValueError(
            f"rlkv: {CHECK} does not see what the second model runner reads: set "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )
    _current[:] = [ReachabilityCheck()]
    _watch_runner()
    return _current[0]


def _watch_runner() -> None:
    """Have the engine's runner note what it reads, and say at the end what was compared."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def watched(
        stock: Any, self: Any, input_ids: Tensor, positions: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if get_forward_context().attn_metadata is not None:
            _current[0].begin(self, input_ids, positions)
        return stock(self, input_ids, positions, *args, **kwargs)

    if wrap_once(GPUModelRunner, "_model_forward", watched):
        # processes that the engine forks run no functions of atexit
        Finalize(None, lambda: print(f"rlkv: {_current[0].summary()}", flush=True), exitpriority=0)
