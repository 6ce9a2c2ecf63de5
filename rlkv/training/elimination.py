"""The order in which heads can go, measured: backward elimination that measures few heads twice.

A gate says how much of a head is needed while the others are open too, not what is lost when the
head goes.  So heads are made compressible one by one, each time the one whose loss costs least.
What a head costs grows as others go, so that its last measured cost is a lower bound: only the
lowest is measured again, until a fresh one is lowest (lazy
evaluation: Minoux 1978, "Accelerated greedy algorithms for maximizing submodular set functions").
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import get_peft_model
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlkv.attention.head_gate import HeadGateConfig, set_gates
from rlkv.data.recall import MarkedText
from rlkv.gates.allocation import HeadAllocation, compression_order, num_full_heads
from rlkv.gates.head_gates import HeadGates
from rlkv.models.loading import dtype_name, load_model
from rlkv.models.prompts import choose_template
from rlkv.models.shape import ModelShape
from rlkv.training.config import (
    RESUMABLE_KEYS,
    TRUSTED_SPARSITY,
    DistillSettings,
    GateTrainingArguments,
    RLKVSettings,
    RunSettings,
    option_names,
)
from rlkv.training.distillation import (
    TOKENS_AT_ONCE,
    check_head,
    check_layers,
    distill_gates,
    log_probabilities,
    make_batch,
    read_traces,
)
from rlkv.training.run_folder import GATES_LOG, LOG, RunFolder, append_record
from rlkv.utils.files import read_log, write_jsonl
from rlkv.utils.progress import progress_bar
from rlkv.utils.runtime import digest, shadow
from rlkv.utils.store import ResultStore, open_store

Head = tuple[int, int]  # layer, KV head
# likeliest tokens of full attention that are kept; logits of 49k tokens of both models took a third
# of the time
KEPT = 128
KEY = (
    "batch",
    "full",
)  # of a measurement in a store: the number of the batch, and the full heads as 0s and 1s


@dataclass
class LayerOutputs:
    """What the layers return with these full heads, in host memory:

    ``of[batch][layer]``, made when first asked for.
    """

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
            hook = layer.register_forward_hook(
                lambda module, given, output: found.append(tree_map(Tensor.cpu, output))
            )
            hooks.callback(hook.remove)
        yield found


class LikelyTokens(NamedTuple):
    """Distributions over V tokens by their K likeliest ones: log-probabilities and token ids, ``[N,
    K]``.

    The others count as one token, which has their sum: the KL from such a distribution is at most
    the one over all tokens, and the same if K is V.  On solutions of the built-in language model it
    is 0.99 of it or more.
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
    """``mean_i log(1 + KL_i)``, ``KL_i`` the sum over a solution's tokens of ``KL(full || masked)``
    in nats.

    A few tokens decide whether a solution goes wrong, so the sum over tokens counts and not their
    mean; the logarithm keeps one lost solution from hiding what happens to the others.
    Teacher-forced.

    Args:
        model: wrapped with :class:`rlkv.attention.head_gate.HeadGateConfig`, which says sink and
            window, in eval mode on its device.
        traces: prompts with their solutions, whose tokens are the answers.
        rows: traces of one forward.
        on_forward: called after each.
        prompts_in_full: prompts are read in full, once for all masks, as with ``prefill="full"``
            when serving; else through the masks too, as with ``"local"``.
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
        on_forward: Callable[[], None] = lambda: None,
        store: ResultStore | None = None,
        prompts_in_full: bool = True,
    ) -> None:
        self.model, self.base, self.passes, self.on_forward = (
            model,
            model.get_base_model(),
            0.0,
            on_forward,
        )
        self.layers = list(self.base.get_decoder().layers)
        check_layers(self.base)
        found = store.rows if store else []
        self._store, self._known = (
            store,
            {(row["batch"], row["full"]): row["loss"] for row in found},
        )
        self.cpu_seconds, self._clock = sum(row["cpu_s"] for row in found), time.process_time()
        ordered = sorted(traces, key=lambda trace: len(trace.ids))
        pieces = [ordered[start : start + rows] for start in range(0, len(ordered), rows)]
        self.num_traces = len(traces)
        self._start: LayerOutputs | None = (
            None  # of without_each, with the masks that it was asked for since
        )
        self._asked: set[str] = set()
        self._lowest: tuple[float, LayerOutputs] | None = None  # the lowest loss among them
        decoder, device = self.base.get_decoder(), self.base.device
        with torch.no_grad(), model.disable_adapter():
            self.batches = [make_batch(decoder, piece, prompts_in_full, device) for piece in pieces]
            self.full = [self._expected(batch.states(decoder)) for batch in self.batches]

    def _sum(
        self, number: int, full_LH: Tensor, start: LayerOutputs | None = None, layer: int = 0
    ) -> tuple[float, list[Any]]:
        """Sum over the rows of a batch, and what the layers returned: nothing where the sum was
        known.

        ``start``: what the layers below ``layer`` return, which then do not compute.
        """
        key, outputs = (number, mask_text(full_LH)), list[Any]()
        if key not in self._known:
            below = start.of[number][:layer] if start else []
            set_gates(self.model, full_LH.float())
            with self._after(below), recorded(self.layers[len(below) :]) as outputs:
                self._known[key] = loss = self._measure(number)
            now = time.process_time()
            row = {
                **dict(zip(KEY, key, strict=True)),
                "loss": loss,
                "cpu_s": round(now - self._clock, 3),
            }
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
        pieces = zip(
            self.full[number],
            states_ND.split(TOKENS_AT_ONCE),
            batch.row_N.split(TOKENS_AT_ONCE),
            strict=True,
        )
        for full, mixed_ND, row_N in pieces:
            kl_B.index_add_(0, row_N, full.kl(log_probabilities(head(mixed_ND))).float())
        return kl_B.clamp(min=0).log1p().sum().item()

    def _expected(self, states_ND: Tensor) -> list[LikelyTokens]:
        """What full attention expects, in pieces."""
        head = self.base.get_output_embeddings()
        return [
            LikelyTokens.of(log_probabilities(head(piece)))
            for piece in states_ND.split(TOKENS_AT_ONCE)
        ]

    def _count(self, number: int, skipped: int = 0) -> None:
        self.passes += (
            len(self.batches[number].ids_BT) / self.num_traces * (1 - skipped / len(self.layers))
        )
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

        Layers below the head's own compute the same for all: they run once, and not at all if the
        lowest loss of the calls before was the one of ``full_LH``.
        """
        start = self._start_from(full_LH)
        losses: list[float] = []
        for layer, head in heads:
            reduced_LH = full_LH.clone()
            reduced_LH[layer, head] = False
            found = [
                self._sum(number, reduced_LH, start, layer) for number in range(len(self.batches))
            ]
            losses.append(sum(loss for loss, _ in found) / self.num_traces)
            self._asked.add(mask_text(reduced_LH))
            if all(outputs for _, outputs in found) and (
                self._lowest is None or losses[-1] < self._lowest[0]
            ):
                of = [
                    [*below[:layer], *rest]
                    for below, (_, rest) in zip(start.of, found, strict=True)
                ]
                self._lowest = losses[-1], LayerOutputs(reduced_LH, list, of)
        return losses

    def _start_from(self, full_LH: Tensor) -> LayerOutputs:
        """What the layers return with ``full_LH``.

        A pass, unless the call before was asked for it.
        """
        start, lowest = self._start, self._lowest
        if start and start.full_LH.equal(full_LH):
            return start
        if lowest and lowest[1].full_LH.equal(full_LH):
            self._start = lowest[1]
        else:
            same = int((start.full_LH != full_LH).any(dim=1).nonzero()[0]) if start else 0
            below = (
                [of[:same] for of in start.known]
                if start and start.known
                else [[] for _ in self.batches]
            )
            full_LH = full_LH.clone()
            self._start = LayerOutputs(
                full_LH, lambda: [self._outputs(n, full_LH, of) for n, of in enumerate(below)]
            )
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


@dataclass(frozen=True)
class Removal:
    """One step: this head was made compressible.

    The loss is then ``loss``, after so much work in all.
    """

    layer: int
    head: int
    loss: float
    passes: float
    cpu_seconds: float


def eliminate(
    loss: TraceLoss,
    full_LH: Tensor,
    order: Sequence[Head],
    steps: int,
    budget: float,
    on_step: Callable[[Removal], None],
) -> list[Head]:
    """The heads of ``order``, least needed first: the first ``steps`` by elimination, the others by
    their last cost.

    Args:
        full_LH: bool ``[L, H]``; heads that are not full are compressible from the start.
        order: the heads that may go; of equal ones the first goes.
        budget: passes over the traces that this may take.  A measurement takes about half a pass,
            as layers below the head do not compute.  What is left after each head was measured once
            is shared out among the steps, and where less than a whole pass is left the lowest old
            cost decides.
    """
    full_LH, before = full_LH.clone(), loss.of(full_LH)
    after = loss.without_each(full_LH, order)
    cost = {head: value - before for head, value in zip(order, after, strict=True)}
    gone: list[Head] = []
    for step in range(steps):
        allowed = (budget - loss.passes) / (steps - step)
        fresh: set[Head] = set()
        while (lowest := min(cost, key=cost.__getitem__)) not in fresh and len(
            fresh
        ) + 1 <= allowed:
            cost[lowest] = loss.without_each(full_LH, [lowest])[0] - before
            fresh.add(lowest)
        head = min((other for other in cost if other in fresh or not fresh), key=cost.__getitem__)
        before += cost.pop(head)
        full_LH[head] = False
        gone.append(head)
        on_step(Removal(*head, before, loss.passes, loss.cpu_seconds))
    return [*gone, *sorted(cost, key=cost.__getitem__)]


def with_order(gates: HeadGates, order: Sequence[Head]) -> HeadGates:
    """``gates`` with the same numbers handed out so that ``compression_order`` is ``order`` (all
    heads, each once).

    ``mean_alpha`` becomes the place in the order, 0 to 1, so that equal gates keep it too.
    """
    alpha, rank = torch.empty_like(gates.alpha), torch.empty_like(gates.mean_alpha)
    last = max(1, len(order) - 1)
    for place, (head, value) in enumerate(
        zip(order, gates.alpha.flatten().sort().values, strict=True)
    ):
        alpha[head], rank[head] = value, place / last
    return replace(gates, alpha=alpha, mean_alpha=rank)


def num_removals(total: int, low: float, high: float) -> int:
    """Heads that become compressible between two sparsities; ``ValueError`` if there are none."""
    found = num_full_heads(low, total) - num_full_heads(high, total)
    if found < 1:
        raise ValueError(
            f"between the sparsities {low:g} and {high:g}, where elimination begins and ends, no "
            f"head of {total} "
            "becomes compressible: take them further apart"
        )
    return found


def rerank(
    gates: HeadGates,
    loss: TraceLoss,
    low: float,
    high: float,
    budget: float,
    on_step: Callable[[Removal], None] = lambda step: None,
) -> HeadGates:
    """``gates`` with the same numbers in another order: measured above the sparsity ``low``, theirs
    below it.

    Args:
        high: sparsity up to which heads go; those that are left are ordered by what they last cost.
        budget: as of :func:`eliminate`.

    Raises:
        ValueError: if no head becomes compressible between ``low`` and ``high``.
    """
    steps = num_removals(gates.alpha.numel(), low, high)
    start, order = HeadAllocation.from_gates(gates, low), compression_order(gates)
    before = order[: start.num_compressible]
    measured = eliminate(loss, start.full, order[len(before) :], steps, budget, on_step)
    return with_order(gates, [*before, *measured])


MEAN = "mean"
HELD_BACK = 2  # solutions that orders are compared on, for each that heads are measured on


@contextmanager
def hard_masks(model: PreTrainedModel, gates: HeadGates, ids: Sequence[int]) -> Iterator[Any]:
    """The model with the gates' sizes for serving, inside; ``ids``: of any text."""
    check_head(model, ids[:32])
    gated: Any = get_peft_model(
        model, HeadGateConfig(sink=gates.deploy_sink, window=gates.deploy_window)
    ).eval()
    try:
        yield gated
    finally:
        gated.unload()


def mean_order(first: Sequence[Head], second: Sequence[Head]) -> list[Head]:
    """By the sum of the places in two orders of the same heads.

    Of equal ones the first in ``second`` goes first.
    """
    place = {head: number for number, head in enumerate(first)}
    return [
        head for _, head in sorted(enumerate(second), key=lambda found: found[0] + place[found[1]])
    ]


def orders(distilled: HeadGates, measured: HeadGates) -> dict[str, HeadGates]:
    """The gates to choose from, by name; the mean compresses first what both do."""
    first, second = compression_order(distilled), compression_order(measured)
    found = {MEAN: mean_order(first, second), "distilled": first}
    return {
        "measured": measured,
        **{name: with_order(measured, order) for name, order in found.items()},
    }


def between(low: float, high: float) -> tuple[float, float]:
    """The sparsities at which orders are compared: a third and two thirds of the way."""
    return low + (high - low) / 3, high - (high - low) / 3


def losses(
    found: dict[str, HeadGates], loss: TraceLoss, sparsities: Sequence[float]
) -> dict[str, Tensor]:
    """For each of the gates the mean loss of each batch, float64.

    The same heads are measured once.
    """
    known: dict[tuple[bool, ...], Tensor] = {}

    def at(full_LH: Tensor) -> Tensor:
        key = tuple(full_LH.flatten().tolist())
        if key not in known:
            known[key] = torch.tensor(loss.of_batches(full_LH), dtype=torch.float64)
        return known[key]

    return {
        name: torch.stack(
            [at(HeadAllocation.from_gates(gates, sparsity).full) for sparsity in sparsities]
        ).mean(dim=0)
        for name, gates in found.items()
    }


def best(found: dict[str, Tensor]) -> str:
    """The mean, unless another order is better by more than the standard error of the difference
    over the solutions.
    """
    shown = {MEAN: -1.0}
    for name, loss_N in found.items():
        less_N = found[MEAN] - loss_N
        if len(less_N) > 1 and less_N.mean() > less_N.std() / len(less_N) ** 0.5:
            shown[name] = less_N.mean().item()
    return max(shown, key=shown.__getitem__)


def choose_order(
    model: PreTrainedModel,
    traces: Sequence[MarkedText],
    distilled: HeadGates,
    measured: HeadGates,
    span: tuple[float, float],
    prefill: str,
) -> HeadGates:
    """The gates in the order that :func:`best` finds on other solutions, one at a time.

    Noted in ``training["order"]``, its time in ``training["choice_cpu_seconds"]``.
    """
    started, found = time.process_time(), orders(distilled, measured)
    with hard_masks(model, measured, traces[0].ids) as gated:
        loss = TraceLoss(gated, traces, 1, prompts_in_full=prefill == "full")
        measured_N = losses(found, loss, between(*span))
    name, by_name = (
        best(measured_N),
        {of: loss_N.mean().item() for of, loss_N in measured_N.items()},
    )
    seconds = round(time.process_time() - started, 3)
    told = ", ".join(f"{of} {value:.3g}" for of, value in by_name.items())
    print(f"loss of orders on {len(traces)} other solutions: {told}; kept: {name}", flush=True)
    chosen = found[name]
    chosen.training |= {"order": name, "order_losses": by_name, "choice_cpu_seconds": seconds}
    return chosen


SOLUTIONS = 6  # of a step of the distillation
DISTILLED = "distilled"  # its folder, in that of the run
FASTEST = 0.25  # learning rate: gates that reach 0 at once tell of no order


def unordered_gates(shape: ModelShape, settings: RLKVSettings) -> HeadGates:
    """Gates that are spread evenly over 0 to 1, in the order of the heads' numbers."""
    alpha = torch.linspace(0, 1, shape.num_layers * shape.num_kv_heads).view(
        shape.num_layers, shape.num_kv_heads
    )
    sizes = settings.deploy_sink, settings.deploy_window
    return HeadGates(alpha, None, shape, *sizes, *sizes)  # type: ignore[arg-type]


def distillation_settings(
    settings: RLKVSettings, args: GateTrainingArguments, folder: Path
) -> DistillSettings:
    """Of the distillation before an elimination: its steps suffice for a gate that goes from 1 to
    0.

    A solution at a time, which needs the least memory, and on a CPU the least time, as nothing is
    padded.
    """
    shared = {name: getattr(settings, name) for name in option_names(RunSettings)}
    shared |= {"wandb": "disabled", "gates_link": None, "image_steps": 0}
    shared |= {"sink": settings.deploy_sink, "window": settings.deploy_window}
    return DistillSettings(
        **shared,
        data="traces",
        prefill="local",
        max_length=sys.maxsize,
        steps=settings.elimination_distillation,
        learning_rate=min(FASTEST, 2 / settings.elimination_distillation),
        batch_size=SOLUTIONS,
        gradient_checkpointing=args.gradient_checkpointing,
        save_steps=5,
        seed=args.seed,
        device=str(args.device),
        output_dir=str(folder),
    )


def distilled_order(
    start: HeadGates,
    settings: RLKVSettings,
    args: GateTrainingArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> tuple[HeadGates, float]:
    """The numbers of ``start`` in the order of a distillation, where one is asked for, and its CPU
    seconds.

    The distillation is a run of its own in ``folder``, which resumes.
    """
    if not settings.elimination_distillation:
        return start, 0.0
    distilled = distill_gates(
        distillation_settings(settings, args, folder / DISTILLED), model, tokenizer
    )
    seconds = sum(record["time/step_cpu_s"] for record in read_log(folder / DISTILLED / LOG))
    return with_order(start, compression_order(distilled)), seconds


GRPO_OPTIONS = (
    "max_steps",
    "learning_rate",
    "prompts_per_step",
    "num_generations",
    "recipe",
    "temperature",
)
MEASURED = "measured.jsonl"
READ = {of.name for of in fields(RLKVSettings) if "elimination" in of.metadata["finders"]}
CURVES = (("traces/kept", "exp(-loss): solutions that stay as they are"),)


def draw_traces(
    path: str | Path, tokenizer: Any, template: str, number: int, seed: int
) -> list[MarkedText]:
    """``number`` of a curriculum's problems with their recorded solutions.

    ``ValueError`` if it has fewer.
    """
    return draw_apart(path, tokenizer, template, number, seed)[0]


def draw_apart(
    path: str | Path, tokenizer: Any, template: str, number: int, seed: int
) -> tuple[list[MarkedText], list[MarkedText]]:
    """:func:`draw_traces`, and up to ``HELD_BACK`` times as many others."""
    recorded = read_traces(str(path), tokenizer, template, max_length=sys.maxsize)
    if number > len(recorded):
        raise ValueError(
            f"{number} solutions are asked for, but {path} has only {len(recorded)}: ask for fewer"
        )
    chosen = random.Random(f"rlkv-elimination-{seed}").sample(range(len(recorded)), number)
    others = sorted(set(range(len(recorded))) - set(chosen))
    others = random.Random(f"rlkv-held-back-{seed}").sample(
        others, min(len(others), HELD_BACK * number)
    )
    return [recorded[at] for at in chosen], [recorded[at] for at in others]


def unread_options(settings: RLKVSettings, args: GateTrainingArguments) -> list[str]:
    """Options of GRPO that were set, which elimination does not read."""
    found = [
        f.name
        for f in fields(settings)
        if f.name not in READ and getattr(settings, f.name) != f.default
    ]
    return found + [
        name for name in GRPO_OPTIONS if getattr(args, name) != getattr(GateTrainingArguments, name)
    ]


def rerank_on_traces(
    model: PreTrainedModel,
    traces: Sequence[MarkedText],
    gates: HeadGates,
    low: float,
    high: float,
    budget: float = 3.0,
    rows: int = 16,
    on_step: Callable[[Removal], None] = lambda step: None,
    store: ResultStore | None = None,
    prefill: str = "full",
) -> HeadGates:
    """:func:`rlkv.training.elimination.rerank` on solutions, with the sizes that ``gates`` are to
    be served with.

    What it took is noted in ``training["reranked"]``: ``passes`` over the traces and
    ``cpu_seconds`` of all threads.

    Args:
        model: in eval mode, on its device; it is unchanged afterwards.
        budget: most passes over the traces, per head of the model.
        rows: traces of one forward.
        store: as of :class:`rlkv.training.elimination.TraceLoss`.
        prefill: ``"full"`` or ``"local"``, how prompts are read when serving.

    Raises:
        ValueError: for gates of another model, layers without full attention, or an empty span.
    """
    gates.check_model(model.config)
    total = gates.alpha.numel()
    steps = num_removals(total, low, high)
    gone: list[Removal] = []

    def show() -> None:
        note = f"{len(gone)} of {steps} heads gone" + (
            f", loss {gone[-1].loss:.3g}" if gone else ""
        )
        bar.update(int(loss.passes), note=note)

    def go(step: Removal) -> None:
        gone.append(step)
        on_step(step)

    with (
        hard_masks(model, gates, traces[0].ids) as gated,
        progress_bar("elimination, at most", "forwards", math.ceil(budget * total)) as bar,
    ):
        loss = TraceLoss(gated, traces, rows, show, store, prompts_in_full=prefill == "full")
        found = rerank(gates, loss, low, high, budget * total, go)
        bar.update(bar.done, total=bar.done)
    facts = {
        "low": low,
        "high": high,
        "prefill": prefill,
        "traces": len(traces),
        "passes": round(loss.passes, 2),
    }
    found.training["reranked"] = {**facts, "cpu_seconds": round(loss.cpu_seconds, 3)}
    return found


def eliminate_heads(
    settings: RLKVSettings,
    args: GateTrainingArguments,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> HeadGates:
    """The finder ``elimination``: the order of all heads, exported to the folder.

    A short distillation orders the heads that are needed least, the others are measured
    (:mod:`rlkv.training.elimination`), and other solutions say which order is kept
    (:mod:`rlkv.training.elimination`).  A head's gate is its place in the order, 0 to 1.
    ``measured.jsonl`` keeps what was measured: a run that was stopped goes on from there, also to
    another sparsity or another budget.

    Args:
        model, tokenizer: instead of the ones that ``settings.model`` names.

    Raises:
        ValueError: for data, a model or a folder that do not fit.
    """
    settings = settings.with_curriculum()
    if settings.curriculum is None:
        raise ValueError(
            "no solutions to measure heads on: pass --curriculum FILE, which rlkv-filter writes, "
            "or train by GRPO with "
            "--finder rlkv"
        )
    if args.world_size > 1:
        raise ValueError(
            f"--finder elimination takes one process, not {args.world_size}: start it without a "
            "launcher, or take "
            "--finder rlkv"
        )
    if model is None or tokenizer is None:
        dtype = dtype_name(settings.dtype, args.device)
        model, tokenizer = load_model(settings.model, dtype=dtype, device=str(args.device))
    template, number = (
        choose_template(settings.template, model=settings.model),
        settings.elimination_traces,
    )
    traces, others = draw_apart(settings.curriculum, tokenizer, template, number, args.seed)
    config = {name: value for name, value in asdict(settings).items() if name in READ}
    config["dtype"] = dtype_name(settings.dtype, args.device)
    low = TRUSTED_SPARSITY if settings.elimination_distillation else 0.0
    config |= {
        "low": low,
        "seed": args.seed,
        "output_dir": args.output_dir,
        "data_digest": digest([text.ids for text in traces]),
    }
    run = RunFolder(Path(args.output_dir or "outputs/gates"), settings, config)
    # no measurement depends on what may change when it is resumed, but rows number the batches
    kept = (config.keys() - RESUMABLE_KEYS) | {"forward_rows"}
    measured = {name: config[name] for name in sorted(kept)} | {"likeliest": KEPT}
    start = unordered_gates(ModelShape.from_config(model.config), settings)
    num_removals(
        start.alpha.numel(), low, settings.elimination_sparsity
    )  # both refuse before the distillation
    check_layers(model)
    with open_store(run.path / MEASURED, measured, KEY) as store:
        run.write_config()
        if unread := unread_options(settings, args):
            print(
                f"finder elimination, which does not read {', '.join(unread)} (--finder rlkv does)",
                flush=True,
            )
        start, seconds = distilled_order(start, settings, args, model, tokenizer, run.path)
        log = RemovalLog(run, args, HeadAllocation.from_gates(start, low).full.float(), seconds)
        span, work = (
            (low, settings.elimination_sparsity),
            (settings.elimination_budget, settings.forward_rows),
        )
        prefill = settings.elimination_prefill
        gates = rerank_on_traces(model, traces, start, *span, *work, log.append, store, prefill)
    facts = {**gates.training.pop("reranked"), "distillation_cpu_seconds": round(seconds, 3)}
    if settings.elimination_distillation and others:
        gates = choose_order(model, others, start, gates, span, prefill)
        facts |= gates.training
        log.add_seconds(facts["choice_cpu_seconds"])
    gates.training = {**run.published(), "method": "elimination", **facts}
    run.export(gates, CURVES)
    return gates


class RemovalLog:
    """``log.jsonl``: a record per removed head, with what it took since the record before it.

    ``gates.jsonl`` has 1 for the heads that are left and 0 for the others.  The first record's time
    has the ``seconds`` of the distillation before.  W&B gets the records too.
    """

    def __init__(
        self, run: RunFolder, args: GateTrainingArguments, full_LH: Tensor, seconds: float
    ) -> None:
        self.folder, self.full, self.steps, self._cpu_seconds = run.path, full_LH, 0, -seconds
        self.wandb = run.open_wandb()
        if self.wandb:
            self.wandb.start(args.run_name)
        for name in (LOG, GATES_LOG):
            (self.folder / name).unlink(missing_ok=True)

    def add_seconds(self, seconds: float) -> None:
        """To the last record, of what came after it."""
        records = read_log(self.folder / LOG)
        records[-1]["time/step_cpu_s"] += seconds
        write_jsonl(self.folder / LOG, records)

    def append(self, step: Removal) -> None:
        self.steps += 1
        self.full[step.layer, step.head] = 0
        took, self._cpu_seconds = step.cpu_seconds - self._cpu_seconds, step.cpu_seconds
        record = {**asdict(step), "traces/kept": math.exp(-step.loss), "time/step_cpu_s": took}
        append_record(self.folder / LOG, self.steps, record)
        append_record(self.folder / GATES_LOG, self.steps, {"alpha": self.full.tolist()})
        if self.wandb:
            self.wandb.run.log(
                {f"elimination/{name.replace('/', '_')}": value for name, value in record.items()}
            )
