"""Recorded solutions of the model: their texts, their batches, and how well masks predict them.

Shapes: B solutions of a batch, P prompt tokens read in full, T tokens to read, N answer tokens,
V vocabulary, L layers, H KV heads.
"""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from peft import get_peft_model
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from rlkv.attention.head_gate import HeadGateConfig, set_gates
from rlkv.data.problems import read_curriculum
from rlkv.data.recall import MarkedText, encode
from rlkv.models.layout import Layout
from rlkv.models.loading import cache_argument, dtype_name, load_missing, refuse_own_cache
from rlkv.models.prompts import render_prompt
from rlkv.training.config import GateTrainingArguments, RLKVSettings, option_names
from rlkv.utils.runtime import shadow
from rlkv.utils.store import ResultStore

TOKENS_AT_ONCE = 512  # logits of real vocabularies are large: 512 x 128k in float32 are 256 MB
# likeliest tokens of full attention that are kept; logits of 49k tokens of both models took a third
# of the time
KEPT = 128
HELD_BACK = 2  # solutions that orders are compared on, for each that heads are measured on
# of a measurement in a store: the number of the batch, and the full heads as 0s and 1s
KEY = ("batch", "full")

READ_BY_ALL = {
    name for group in ("finder", "run", "model") for name in option_names(RLKVSettings, group=group)
}
ARGUMENTS_READ = {"output_dir", "run_name", "seed", "use_cpu", "gradient_checkpointing"}


# --- what finders without rollouts begin with


def load_solutions(
    settings: RLKVSettings,
    args: GateTrainingArguments,
    model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[RLKVSettings, PreTrainedModel, list[MarkedText]]:
    """Load the model, unless it is given, and the curriculum's solutions.

    Returns:
        The settings with the template and dtype that they come to, the model, and the solutions.

    Raises:
        ValueError: without a curriculum, for several processes, or data or a model that do not fit.
    """
    settings = settings.with_curriculum()
    if settings.curriculum is None:
        raise ValueError(
            "no solutions to measure heads on: pass --curriculum FILE, which rlkv-filter writes, "
            "or train by GRPO with --finder rlkv"
        )
    if args.world_size > 1:
        raise ValueError(
            f"--finder {settings.finder} takes one process, not {args.world_size}: start it "
            "without a launcher, or take --finder rlkv"
        )
    settings = replace(settings, dtype=dtype_name(settings.dtype, args.device))
    model, tokenizer = load_missing(
        settings.model, settings.dtype, str(args.device), model, tokenizer
    )
    # with_curriculum has chosen the template
    recorded = read_traces(str(settings.curriculum), tokenizer, str(settings.template))
    return settings, model, recorded


def warn_of_unread(settings: RLKVSettings, args: GateTrainingArguments, read: set[str]) -> None:
    """Name the options that were set and only GRPO reads; ``read`` are the finder's own."""
    unread = [option.name for option in fields(settings) if option.name not in read]
    found = [name for name in unread if getattr(settings, name) != getattr(RLKVSettings, name)]
    found += sorted(args.given - ARGUMENTS_READ) + sorted(args.noted()["trl"])
    if found:
        names = ", ".join(found)
        print(
            f"finder {settings.finder}, which does not read {names} (--finder rlkv does)",
            flush=True,
        )


# --- texts


def read_traces(
    path: str,
    tokenizer: Any,
    template: str,
    max_length: int = sys.maxsize,
    least: int = 1,
) -> list[MarkedText]:
    """Read the curriculum's problems with their recorded outputs, whose tokens are the answers.

    The end token counts too.  Texts of more than ``max_length`` tokens are cut there; those with
    fewer than ``least`` output tokens are left out.

    Raises:
        ValueError: for an unreadable file, rows without outputs, or if nothing is left.
    """
    traces = []
    rows = read_curriculum(path, ("problem", "answer", "output"))
    for number, row in enumerate(rows, start=1):
        if not isinstance(row["output"], str) or not row["output"].strip():
            raise ValueError(
                f"{path}: the output of row {number} is empty: filter again with this model"
            )
        prompt = encode(tokenizer, render_prompt(tokenizer, row["problem"], template))
        output = encode(tokenizer, row["output"])
        ids = (*prompt, *output, tokenizer.eos_token_id)[:max_length]
        if len(ids) - len(prompt) >= least:
            traces.append(MarkedText(ids, tuple(range(len(prompt), len(ids)))))
    if not traces:
        raise ValueError(
            f"{path}: no row has {least} output tokens within max_length={max_length} tokens"
        )
    return traces


def draw_traces(
    recorded: Sequence[MarkedText], number: int, seed: int
) -> tuple[list[MarkedText], list[MarkedText]]:
    """Draw ``number`` of the recorded solutions, and up to ``HELD_BACK`` times as many others.

    Raises:
        ValueError: if there are fewer than ``number``.
    """
    if number > len(recorded):
        raise ValueError(
            f"{number} solutions are asked for, but the curriculum has only {len(recorded)}: ask "
            "for fewer"
        )
    chosen = random.Random(f"rlkv-elimination-{seed}").sample(range(len(recorded)), number)
    drawn = {recorded[at] for at in chosen}
    rest = [at for at, text in enumerate(recorded) if text not in drawn]
    more = min(len(rest), HELD_BACK * number)
    others = random.Random(f"rlkv-held-back-{seed}").sample(rest, more)
    return [recorded[at] for at in chosen], [recorded[at] for at in others]


# --- models that are refused


def check_dropout(config: Any) -> None:
    """Raise ``ValueError`` for dropout that is not a module and cannot be switched off."""
    for name in ("attention_dropout", "residual_dropout", "embedding_dropout"):
        if value := getattr(config.get_text_config(), name, 0):
            raise ValueError(
                f"{name} is {value}, but gates are trained without dropout: set it to 0 in the "
                "model's config.json"
            )


def check_head(model: Any, ids: Sequence[int]) -> None:
    """Raise ``ValueError`` if logits are not the output embeddings of the last hidden states."""
    if model.get_decoder() is model:
        raise ValueError(
            f"{type(model).__name__} does not name its decoder, so that the KL of next tokens "
            "cannot be computed from its last states: take --finder rlkv or attention"
        )
    ids_BT = torch.tensor([list(ids[:32])], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=ids_BT, use_cache=False).logits
        states = model.get_decoder()(input_ids=ids_BT, use_cache=False)[0]
        again = model.get_output_embeddings()(states)
    if not torch.allclose(logits.float(), again.float(), rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"{type(model).__name__} changes its logits after the output embeddings (scaled or "
            "capped), which the KL of next tokens does not know: take rlkv-distill --data recall, "
            "which needs no logits"
        )


def check_masks(model: Any, text: MarkedText, prefill: str) -> None:
    """Raise ``ValueError`` unless the model can have gates, and prompts can be read as asked."""
    with hard_masks(model, sink=1, window=1):
        pass
    if prefill == "full" and not Layout.from_config(model.config).is_plain:
        _check_prompts(model, text)


def _check_prompts(model: Any, text: MarkedText) -> None:
    """Refuse hybrids whose linear layers take their states up for single tokens only.

    For several tokens at once it then changes nothing what these states hold.
    """
    instead = (
        "its prompts cannot be read in full: take --elimination-prefill local, rlkv-distill "
        "--prefill local or --finder rlkv"
    )
    refuse_own_cache(model, instead)
    decoder = model.get_decoder()
    batch = make_batch(decoder, [text], "full")
    states = []
    for layer in () if batch.past is None else batch.past.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            states += [state for state in layer.recurrent_states.values() if state is not None]
    if not states:
        return
    with torch.no_grad():
        before = batch.states(decoder)
        for state in states:
            state.zero_()
        goes_on = not torch.equal(batch.states(decoder), before)
    if not goes_on:
        raise ValueError(
            f"{model.config.model_type} does not go on from a cached prompt by several tokens at "
            f"once: {instead}"
        )


# --- batches


def by_length(texts: Sequence[MarkedText], rows: int) -> Iterator[list[MarkedText]]:
    """Yield ``rows`` texts at a time, the shortest first."""
    ordered = sorted(texts, key=lambda text: len(text.ids))
    for start in range(0, len(ordered), rows):
        yield ordered[start : start + rows]


class PromptLayer(DynamicLayer):
    """Keys and values of prompts, ``[B, H, P, D]``, which stay as they are."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys: Tensor = keys
        self.values: Tensor = values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the prompts' states and the new ones after them, which are not kept."""
        keys = torch.cat([self.keys, key_states], dim=2)
        return keys, torch.cat([self.values, value_states], dim=2)


class TraceBatch(NamedTuple):
    """Texts whose prompts, with prompts in full, are in ``past`` and padded on the left.

    Attributes:
        ids_BT, position_BT: the tokens to read, and where they stand in their texts; int64 ``[B,
            T]``.
        mask_BK: real tokens, int64 ``[B, P + T]``.
        row_N, position_N, answer_N: the states that predict answers, and those answers; int64
            ``[N]``.
        past: what was read in full; None if P is 0.
    """

    ids_BT: Tensor
    position_BT: Tensor
    mask_BK: Tensor
    row_N: Tensor
    position_N: Tensor
    answer_N: Tensor
    past: Cache | None

    def _past(self) -> Cache | None:
        """Return what was read in full; sliding windows and linear states are copies to go on."""
        if self.past is None:
            return None
        layers = []
        for layer in self.past.layers:
            layers.append(layer if isinstance(layer, PromptLayer) else copy.deepcopy(layer))
        return Cache(layers=layers)

    def states(self, decoder: Any) -> Tensor:
        """Return last hidden states ``[N, D]`` of the positions that predict the answers."""
        states_BTD = decoder(
            input_ids=self.ids_BT,
            position_ids=self.position_BT,
            attention_mask=self.mask_BK,
            use_cache=False,
            **{cache_argument(): self._past()},
        )[0]
        return states_BTD[self.row_N, self.position_N]


@torch.no_grad()
def make_batch(decoder: Any, texts: Sequence[MarkedText], prefill: str) -> TraceBatch:
    """Make a batch on the device of ``decoder``.

    With ``prefill="full"`` ``decoder``, without its gates, reads prompts in full.  A prompt ends
    before the first answer, whose prediction is then not the masks'.
    """
    cuts = [text.answers[0] if prefill == "full" else 0 for text in texts]
    split = max(cuts)
    longest = max(len(text.ids) - cut for text, cut in zip(texts, cuts, strict=True))
    # padding of token 0 on both sides, where no token sees it
    ids = torch.zeros(len(texts), split + longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    places = []
    for row, (text, cut) in enumerate(zip(texts, cuts, strict=True)):
        columns = slice(split - cut, split - cut + len(text.ids))
        ids[row, columns] = torch.tensor(text.ids)
        mask[row, columns] = 1
        places += [(row, answer - 1 - cut) for answer in text.answers if answer > cut]
    ids = ids.to(decoder.device)
    mask = mask.to(decoder.device)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    row_N, position_N = torch.tensor(places, device=decoder.device).T
    past = None
    if split:
        output = decoder(
            input_ids=ids[:, :split],
            position_ids=position[:, :split],
            attention_mask=mask[:, :split],
            use_cache=True,
        )
        layers = []
        for layer in output[cache_argument()].layers:
            is_plain = type(layer) is DynamicLayer
            layers.append(PromptLayer(layer.keys, layer.values) if is_plain else layer)
        past = Cache(layers=layers)
    return TraceBatch(
        ids_BT=ids[:, split:],
        position_BT=position[:, split:],
        mask_BK=mask,
        row_N=row_N,
        position_N=position_N,
        answer_N=ids[row_N, split + position_N + 1],
        past=past,
    )


# --- the loss of masks


def log_probabilities(logits_NV: Tensor) -> Tensor:
    """Return log-probabilities in float32 or wider."""
    return logits_NV.to(torch.promote_types(torch.float32, logits_NV.dtype)).log_softmax(-1)


class LikelyTokens(NamedTuple):
    """Distributions over V tokens by their K likeliest ones: log-probabilities and ids, ``[N, K]``.

    The others count as one token, which has their sum: the KL from such a distribution is at most
    the one over all tokens, and the same if K is V.  On solutions of the built-in language model it
    is 0.99 of it or more.
    """

    log_NK: Tensor
    token_NK: Tensor

    @classmethod
    def of(cls, log_NV: Tensor) -> LikelyTokens:
        """Keep the likeliest tokens of log-probabilities ``[N, V]``."""
        return cls(*log_NV.topk(min(KEPT, log_NV.shape[1])))

    def kl(self, other_NV: Tensor) -> Tensor:
        """Return ``KL(self || other)`` in nats, ``[N]``."""
        other_NK = other_NV.gather(1, self.token_NK)
        found_N = (self.log_NK.exp() * (self.log_NK - other_NK)).sum(-1)
        if other_NV.shape[1] == self.log_NK.shape[1]:
            return found_N
        rest_N = _rest_of(self.log_NK)
        return found_N + rest_N * (rest_N / _rest_of(other_NK)).log()


def _rest_of(log_NK: Tensor) -> Tensor:
    """Return the probability of all other tokens, which rounding may leave at 0."""
    return (1 - log_NK.exp().sum(-1)).clamp(min=torch.finfo(log_NK.dtype).eps)


@contextmanager
def hard_masks(model: PreTrainedModel, sink: int, window: int) -> Iterator[Any]:
    """Give the model gates with the sizes for serving, for a while."""
    gated: Any = get_peft_model(model, HeadGateConfig(sink=sink, window=window)).eval()
    try:
        yield gated
    finally:
        gated.unload()


class TraceLoss:
    """The loss ``mean_i log(1 + KL_i)`` of masks on solutions, teacher-forced.

    ``KL_i`` is the sum over a solution's tokens of ``KL(full || masked)``, in nats.  A few tokens
    decide whether a solution goes wrong, so the sum counts and not the mean; the logarithm keeps
    one lost solution from hiding what happens to the others.

    Layers below the first whose heads differ from those of the mask before do not compute again,
    which halves the work of an elimination.

    Args:
        model: of :func:`hard_masks`.
        traces: prompts with their solutions, whose tokens are the answers.
        rows: traces of one forward.
        prefill: ``"full"``: prompts are read in full, once for all masks; ``"local"``: through the
            masks too.
        store: where measurements are kept, and found when the same job starts again; ``passes``
            counts them as before.

    Attributes:
        passes: forwards over all traces so far, in units of whole ones.
        cpu_seconds: of all threads, with those of measurements that were found.
    """

    def __init__(
        self,
        model: Any,
        traces: Sequence[MarkedText],
        rows: int,
        prefill: str = "full",
        store: ResultStore | None = None,
    ) -> None:
        self.model = model
        self.decoder = model.get_base_model().get_decoder()
        self.head = model.get_base_model().get_output_embeddings()
        self.num_traces = len(traces)
        self.passes = 0.0
        self._store = store
        found = [] if store is None else store.rows
        self._known = {(row["batch"], row["full"]): row["loss"] for row in found}
        self.cpu_seconds = sum(row["cpu_s"] for row in found)
        self._clock = time.process_time()
        self.batches = []
        self.full = []  # what full attention expects of each batch, in pieces
        with torch.no_grad(), model.disable_adapter():
            for texts in by_length(traces, rows):
                batch = make_batch(self.decoder, texts, prefill)
                expected = []
                for states in batch.states(self.decoder).split(TOKENS_AT_ONCE):
                    expected.append(LikelyTokens.of(log_probabilities(self.head(states))))
                self.batches.append(batch)
                self.full.append(expected)
        # the mask before, and what its first layers returned for each batch, in host memory
        self._last_LH: Tensor | None = None
        self._outputs: list[list[Any]] = [[] for _ in self.batches]

    def of(self, full_LH: Tensor) -> float:
        """Return the loss when only the heads of ``full_LH`` (bool ``[L, H]``) are full."""
        return sum(self.of_batches(full_LH)) / self.num_traces

    @torch.no_grad()
    def of_batches(self, full_LH: Tensor) -> list[float]:
        """Return the sums over the solutions of each batch, shortest texts first."""
        same = 0  # how many of the first layers have the heads of the mask before
        if self._last_LH is not None:
            differing = (self._last_LH != full_LH).any(dim=1).nonzero()
            same = int(differing[0]) if len(differing) else len(full_LH)
        self._last_LH = full_LH.clone()
        set_gates(self.model, full_LH.float())
        heads = "".join(map(str, full_LH.int().flatten().tolist()))
        sums = []
        for number, batch in enumerate(self.batches):
            del self._outputs[number][same:]
            if (number, heads) not in self._known:
                loss = self._known[number, heads] = self._measure(number)
                seconds = time.process_time() - self._clock
                self._clock += seconds
                self.cpu_seconds += seconds
                if self._store is not None:
                    row = {"batch": number, "full": heads, "loss": loss}
                    self._store.append({**row, "cpu_s": round(seconds, 3)})
            sums.append(self._known[number, heads])
            # what was found counts as if it had been measured: a resumed run makes the same steps
            share = len(batch.ids_BT) / self.num_traces
            self.passes += share * (1 - same / len(self.decoder.layers))
        return sums

    def _measure(self, number: int) -> float:
        """Return the sum over a batch; layers whose outputs are known compute nothing."""
        batch = self.batches[number]
        outputs = self._outputs[number]
        device = self.model.device
        # what those before the last one return is not looked at
        last = tree_map(lambda state: state.to(device), outputs[-1]) if outputs else None

        def record(module: nn.Module, given: Any, output: Any) -> None:
            outputs.append(tree_map(Tensor.cpu, output))

        with ExitStack() as undo:
            for at, layer in enumerate(self.decoder.layers):
                if at < len(outputs):
                    shadow(layer, "forward", lambda *_, **__: last, undo)
                else:
                    undo.callback(layer.register_forward_hook(record).remove)
            states_ND = batch.states(self.decoder)
        kl_B = torch.zeros(len(batch.ids_BT), device=device)
        mixed = states_ND.split(TOKENS_AT_ONCE)
        rows = batch.row_N.split(TOKENS_AT_ONCE)
        for full, mixed_ND, row_N in zip(self.full[number], mixed, rows, strict=True):
            kl_N = full.kl(log_probabilities(self.head(mixed_ND)))
            kl_B.index_add_(0, row_N, kl_N.float())
        return kl_B.clamp(min=0).log1p().sum().item()
