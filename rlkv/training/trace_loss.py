"""What it costs to make heads compressible: the distance from the full model on recorded solutions.

Shapes: L layers, H KV heads, B rows, N answer tokens of a batch, D hidden size, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from rlkv.data.recall import MarkedText
from rlkv.training.distillation import TOKENS_AT_ONCE, check_layers, log_probabilities
from rlkv.training.head_gate import set_gates
from rlkv.training.trace_batches import make_batch
from rlkv.utils.shadow import shadow
from rlkv.utils.store import ResultStore

Head = tuple[int, int]  # layer, KV head
# likeliest tokens of full attention that are kept; logits of 49k tokens of both models took a third of the time
KEPT = 128
KEY = ("batch", "full")  # of a measurement in a store: the number of the batch, and the full heads as 0s and 1s


@dataclass
class LayerOutputs:
    """What the layers return with these full heads, in host memory: ``of[batch][layer]``, made when first asked for."""

    full_LH: Tensor
    make: Callable[[], list[list[Any]]]
    known: list[list[Any]] | None = None

    @property
    def of(self) -> list[list[Any]]:
        if self.known is None:
            self.known = self.make()
        return self.known


@contextmanager
def recorded(layers: Sequence[nn.Module]) -> Iterator[list[Any]]:
    """The list to which, inside, each of ``layers`` adds what it returns."""
    found: list[Any] = []
    with ExitStack() as hooks:
        for layer in layers:
            hook = layer.register_forward_hook(lambda module, given, output: found.append(tree_map(Tensor.cpu, output)))
            hooks.callback(hook.remove)
        yield found


class LikelyTokens(NamedTuple):
    """Distributions over V tokens by their K likeliest ones: log-probabilities and token ids, ``[N, K]``.

    The others count as one token, which has their sum: the KL from such a distribution is at most the one over all
    tokens, and the same if K is V.  On solutions of the built-in language model it is 0.99 of it or more.
    """

    log_NK: Tensor
    token_NK: Tensor
    is_whole: bool

    @classmethod
    def of(cls, log_NV: Tensor) -> LikelyTokens:
        """Of log-probabilities ``[N, V]``."""
        return cls(*log_NV.topk(min(KEPT, log_NV.shape[1])), log_NV.shape[1] <= KEPT)

    def kl(self, other_NV: Tensor) -> Tensor:
        """``KL(self || other)`` in nats, ``[N]``."""
        other_NK = other_NV.gather(1, self.token_NK)
        found_N = (self.log_NK.exp() * (self.log_NK - other_NK)).sum(-1)
        if self.is_whole:
            return found_N
        rest_N, other_rest_N = (rest_of(log_NK) for log_NK in (self.log_NK, other_NK))
        return found_N + rest_N * (rest_N / other_rest_N).log()


def rest_of(log_NK: Tensor) -> Tensor:
    """The probability of all other tokens, which rounding may leave at 0."""
    return (1 - log_NK.exp().sum(-1)).clamp(min=torch.finfo(log_NK.dtype).eps)


def mask_text(full_LH: Tensor) -> str:
    """The full heads as 0s and 1s."""
    return "".join(map(str, full_LH.int().flatten().tolist()))


class TraceLoss:
    """``mean_i log(1 + KL_i)``, ``KL_i`` the sum over a solution's tokens of ``KL(full || masked)`` in nats.

    A few tokens decide whether a solution goes wrong, so the sum over tokens counts and not their mean; the logarithm
    keeps one lost solution from hiding what happens to the others.  Teacher-forced.

    Args:
        model: wrapped with :class:`rlkv.training.head_gate.HeadGateConfig`, which says sink and window, in eval mode on
            its device.
        traces: prompts with their solutions, whose tokens are the answers.
        rows: traces of one forward.
        on_forward: called after each.
        prompts_in_full: prompts are read in full, once for all masks, as with ``prefill="full"`` when serving; else
            through the masks too, as with ``"local"``.
        store: where measurements are kept, and found when the same job starts again; ``passes`` counts them as before.

    Attributes:
        passes: forwards over all traces so far, in units of whole ones.
        cpu_seconds: of all threads, with those of measurements that were found.
    """

    def __init__(
        self,
        model: Any,
        traces: Sequence[MarkedText],
        rows: int,
        on_forward: Callable[[], None] = lambda: None,
        store: ResultStore | None = None,
        prompts_in_full: bool = True,
    ) -> None:
        self.model, self.base, self.passes, self.on_forward = model, model.get_base_model(), 0.0, on_forward
        self.layers = list(self.base.get_decoder().layers)
        check_layers(self.base)
        found = store.rows if store else []
        self._store, self._known = store, {(row["batch"], row["full"]): row["loss"] for row in found}
        self.cpu_seconds, self._clock = sum(row["cpu_s"] for row in found), time.process_time()
        ordered = sorted(traces, key=lambda trace: len(trace.ids))
        pieces = [ordered[start : start + rows] for start in range(0, len(ordered), rows)]
        self.num_traces = len(traces)
        self._start: LayerOutputs | None = None  # of without_each, with the masks that it was asked for since
        self._asked: set[str] = set()
        self._lowest: tuple[float, LayerOutputs] | None = None  # the lowest loss among them
        decoder, device = self.base.get_decoder(), self.base.device
        with torch.no_grad(), model.disable_adapter():
            self.batches = [make_batch(decoder, piece, prompts_in_full, device) for piece in pieces]
            self.full = [self._expected(batch.states(decoder)) for batch in self.batches]

    def _sum(
        self, number: int, full_LH: Tensor, start: LayerOutputs | None = None, layer: int = 0
    ) -> tuple[float, list[Any]]:
        """Sum over the rows of a batch, and what the layers returned: nothing where the sum was known.

        ``start``: what the layers below ``layer`` return, which then do not compute.
        """
        key, outputs = (number, mask_text(full_LH)), list[Any]()
        if key not in self._known:
            below = start.of[number][:layer] if start else []
            set_gates(self.model, full_LH.float())
            with self._after(below), recorded(self.layers[len(below) :]) as outputs:
                self._known[key] = loss = self._measure(number)
            now = time.process_time()
            row = {**dict(zip(KEY, key, strict=True)), "loss": loss, "cpu_s": round(now - self._clock, 3)}
            self.cpu_seconds, self._clock = self.cpu_seconds + now - self._clock, now
            if self._store:
                self._store.append(row)
        self._count(number, skipped=layer)
        return self._known[key], outputs

    @contextmanager
    def _after(self, below: Sequence[Any]) -> Iterator[None]:
        """Inside, the first layers return what is given for each of them."""
        # what those before the last one return is not looked at
        last = tree_map(lambda state: state.to(self.base.device), below[-1]) if below else None
        with ExitStack() as undo:
            for layer in self.layers[: len(below)]:
                shadow(layer, "forward", lambda *_, **__: last, undo)
            yield

    def _measure(self, number: int) -> float:
        batch, head = self.batches[number], self.base.get_output_embeddings()
        states_ND = batch.states(self.base.get_decoder())
        kl_B = torch.zeros(len(batch.ids_BT), device=states_ND.device)
        pieces = zip(self.full[number], states_ND.split(TOKENS_AT_ONCE), batch.row_N.split(TOKENS_AT_ONCE), strict=True)
        for full, mixed_ND, row_N in pieces:
            kl_B.index_add_(0, row_N, full.kl(log_probabilities(head(mixed_ND))).float())
        return kl_B.clamp(min=0).log1p().sum().item()

    def _expected(self, states_ND: Tensor) -> list[LikelyTokens]:
        """What full attention expects, in pieces."""
        head = self.base.get_output_embeddings()
        return [LikelyTokens.of(log_probabilities(head(piece))) for piece in states_ND.split(TOKENS_AT_ONCE)]

    def _count(self, number: int, skipped: int = 0) -> None:
        self.passes += len(self.batches[number].ids_BT) / self.num_traces * (1 - skipped / len(self.layers))
        self.on_forward()

    @torch.no_grad()
    def of(self, full_LH: Tensor) -> float:
        """The loss when only the heads of ``full_LH`` (bool ``[L, H]``) are full."""
        return sum(self.of_batches(full_LH)) / self.num_traces

    @torch.no_grad()
    def of_batches(self, full_LH: Tensor) -> list[float]:
        """The sums over the solutions of each batch, shortest texts first."""
        return [self._sum(number, full_LH)[0] for number in range(len(self.batches))]

    @torch.no_grad()
    def without_each(self, full_LH: Tensor, heads: Sequence[Head]) -> list[float]:
        """The losses when one more head is compressible, one for each of ``heads``.

        Layers below the head's own compute the same for all: they run once, and not at all if the lowest loss of the
        calls before was the one of ``full_LH``.
        """
        start = self._start_from(full_LH)
        losses: list[float] = []
        for layer, head in heads:
            reduced_LH = full_LH.clone()
            reduced_LH[layer, head] = False
            found = [self._sum(number, reduced_LH, start, layer) for number in range(len(self.batches))]
            losses.append(sum(loss for loss, _ in found) / self.num_traces)
            self._asked.add(mask_text(reduced_LH))
            if all(outputs for _, outputs in found) and (self._lowest is None or losses[-1] < self._lowest[0]):
                of = [[*below[:layer], *rest] for below, (_, rest) in zip(start.of, found, strict=True)]
                self._lowest = losses[-1], LayerOutputs(reduced_LH, list, of)
        return losses

    def _start_from(self, full_LH: Tensor) -> LayerOutputs:
        """What the layers return with ``full_LH``; a pass, unless the call before was asked for it."""
        start, lowest = self._start, self._lowest
        if start and start.full_LH.equal(full_LH):
            return start
        if lowest and lowest[1].full_LH.equal(full_LH):
            self._start = lowest[1]
        else:
            same = int((start.full_LH != full_LH).any(dim=1).nonzero()[0]) if start else 0
            below = [of[:same] for of in start.known] if start and start.known else [[] for _ in self.batches]
            full_LH = full_LH.clone()
            self._start = LayerOutputs(full_LH, lambda: [self._outputs(n, full_LH, of) for n, of in enumerate(below)])
            if mask_text(full_LH) not in self._asked:
                for number in range(len(self.batches)):
                    self._count(number, skipped=same)
        self._asked, self._lowest = set(), None
        return self._start

    def _outputs(self, number: int, full_LH: Tensor, below: Sequence[Any]) -> list[Any]:
        """What each layer returns for a batch; those of ``below`` are known."""
        set_gates(self.model, full_LH.float())
        with self._after(below), recorded(self.layers[len(below) :]) as outputs:
            self.batches[number].states(self.base.get_decoder())
        return [*below, *outputs]
