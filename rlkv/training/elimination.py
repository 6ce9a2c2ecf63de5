"""The order in which heads can go, measured: backward elimination that measures few heads twice.

A gate says how much of a head is needed while the others are open too, not what is lost when the
head goes.  So heads are made compressible one by one, each time the one whose loss costs least.
What a head costs grows as others go, so that its last measured cost is a lower bound: only the
lowest is measured again, until a fresh one is lowest (lazy evaluation: Minoux 1978, "Accelerated
greedy algorithms for maximizing submodular set functions").
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields, replace
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
    distill_traces,
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
# called with each head that was made compressible (layer and head, the loss then, passes and
# cpu_seconds so far) and the heads that are left
OnStep = Callable[[dict[str, Any], Tensor], None]
# of a measurement in a store: the number of the batch, and the full heads as 0s and 1s
KEY = ("batch", "full")
# likeliest tokens of full attention that are kept; logits of 49k tokens of both models took a third
# of the time
KEPT = 128
MEASURED = "measured.jsonl"
DISTILLED = "distilled"  # the folder of the distillation, in that of the run
SOLUTIONS = 6  # of a step of the distillation
FASTEST = 0.25  # its learning rate: gates that reach 0 at once tell of no order
HELD_BACK = 2  # solutions that orders are compared on, for each that heads are measured on
MEAN = "mean"
CURVES = (("traces/kept", "exp(-loss): solutions that stay as they are"),)

# options that elimination reads; of the others a run says that they are not
READ_GROUPS = ("finder", "run", "model", "elimination")
READ = {option.name for option in fields(RLKVSettings) if option.metadata["group"] in READ_GROUPS}
GRPO_OPTIONS = [
    "max_steps",
    "learning_rate",
    "prompts_per_step",
    "num_generations",
    "recipe",
    "temperature",
]


def eliminate_heads(
    settings: RLKVSettings,
    args: GateTrainingArguments,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> HeadGates:
    """Order all heads by elimination, and export the order to the folder of the run.

    A short distillation orders the heads that are needed least, the others are measured on recorded
    solutions, and other solutions say which order is kept.  A head's gate is its place in the
    order, 0 to 1.  ``measured.jsonl`` keeps what was measured: a run that was stopped goes on from
    there, also to another sparsity or another budget.

    Args:
        model, tokenizer: instead of the ones that ``settings.model`` names.

    Raises:
        ValueError: for data, a model or a folder that do not fit.
    """
    settings = settings.with_curriculum()
    if settings.curriculum is None:
        raise ValueError(
            "no solutions to measure heads on: pass --curriculum FILE, which rlkv-filter writes, "
            "or train by GRPO with --finder rlkv"
        )
    if args.world_size > 1:
        raise ValueError(
            f"--finder elimination takes one process, not {args.world_size}: start it without a "
            "launcher, or take --finder rlkv"
        )
    dtype = dtype_name(settings.dtype, args.device)
    if model is None or tokenizer is None:
        model, tokenizer = load_model(settings.model, dtype=dtype, device=str(args.device))
    template = str(settings.template)  # which with_curriculum has chosen
    recorded = read_traces(settings.curriculum, tokenizer, template)
    traces, others = draw_traces(recorded, settings.elimination_traces, args.seed)
    low = TRUSTED_SPARSITY if settings.elimination_distillation else 0.0
    high = settings.elimination_sparsity
    prefill = settings.elimination_prefill
    config = {name: value for name, value in asdict(settings).items() if name in READ}
    config |= {
        "dtype": dtype,
        "low": low,
        "seed": args.seed,
        "output_dir": args.output_dir,
        "data_digest": digest([text.ids for text in traces]),
    }
    run = RunFolder(Path(args.output_dir or "outputs/gates"), settings, config)
    # no measurement depends on what may change when it is resumed, but rows number the batches
    kept = (config.keys() - RESUMABLE_KEYS) | {"forward_rows"}
    measured = {**{name: config[name] for name in sorted(kept)}, "likeliest": KEPT}
    start = unordered_gates(model, settings)
    # both refuse before the distillation
    num_removals(start.alpha.numel(), low, high)
    check_layers(model)
    with open_store(run.path / MEASURED, measured, KEY) as store:
        run.write_config()
        warn_of_unread(settings, args)
        seconds = 0.0
        if settings.elimination_distillation:
            order, seconds = distilled_order(settings, args, run.path / DISTILLED, recorded, model)
            start = with_order(start, order)
        log = RemovalLog(run, args.run_name, seconds)
        gates = rerank_on_traces(
            model,
            traces,
            start,
            low,
            high,
            budget=settings.elimination_budget,
            rows=settings.forward_rows,
            on_step=log.append,
            store=store,
            prefill=prefill,
        )
    facts = {**gates.training.pop("reranked"), "distillation_cpu_seconds": round(seconds, 3)}
    if settings.elimination_distillation and others:
        gates = choose_order(model, others, start, gates, low, high, prefill)
        facts |= gates.training
        log.add_seconds(facts["choice_cpu_seconds"])
    gates.training = {**run.published(), "method": "elimination", **facts}
    run.export(gates, CURVES)
    return gates


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
    rest = sorted(set(range(len(recorded))) - set(chosen))
    more = min(len(rest), HELD_BACK * number)
    others = random.Random(f"rlkv-held-back-{seed}").sample(rest, more)
    return [recorded[at] for at in chosen], [recorded[at] for at in others]


def unordered_gates(model: PreTrainedModel, settings: RLKVSettings) -> HeadGates:
    """Spread gates evenly over 0 to 1, in the order of the heads' numbers."""
    shape = ModelShape.from_config(model.config)
    size = (shape.num_layers, shape.num_kv_heads)
    return HeadGates(
        torch.linspace(0, 1, math.prod(size)).view(size),
        model=shape,
        sink=settings.deploy_sink,
        window=settings.deploy_window,
        deploy_sink=settings.deploy_sink,
        deploy_window=settings.deploy_window,
    )


def warn_of_unread(settings: RLKVSettings, args: GateTrainingArguments) -> None:
    """Name options of GRPO that were set, which elimination does not read."""
    unread = [option.name for option in fields(settings) if option.name not in READ]
    found = [name for name in unread if getattr(settings, name) != getattr(RLKVSettings, name)]
    for name in GRPO_OPTIONS:
        if getattr(args, name) != getattr(GateTrainingArguments, name):
            found.append(name)
    if found:
        names = ", ".join(found)
        print(f"finder elimination, which does not read {names} (--finder rlkv does)", flush=True)


def distilled_order(
    settings: RLKVSettings,
    args: GateTrainingArguments,
    folder: Path,
    recorded: list[MarkedText],
    model: PreTrainedModel,
) -> tuple[list[Head], float]:
    """Order the heads by a short distillation, a run of its own, and return its CPU seconds too.

    Its steps suffice for a gate that goes from 1 to 0.  It reads a solution at a time, which needs
    the least memory, and on a CPU the least time, as nothing is padded.
    """
    shared = {name: getattr(settings, name) for name in option_names(RunSettings)}
    shared |= {"wandb": "disabled", "gates_link": None, "image_steps": 0}
    shared |= {"sink": settings.deploy_sink, "window": settings.deploy_window}
    short = DistillSettings(
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
    gates = distill_traces(short, recorded, model)
    seconds = sum(record["time/step_cpu_s"] for record in read_log(folder / LOG))
    return compression_order(gates), seconds


# --- lazy backward elimination


def rerank_on_traces(
    model: PreTrainedModel,
    traces: Sequence[MarkedText],
    gates: HeadGates,
    low: float,
    high: float,
    budget: float = 3.0,
    rows: int = 16,
    on_step: OnStep = lambda step, full_LH: None,
    store: ResultStore | None = None,
    prefill: str = "full",
) -> HeadGates:
    """Give ``gates`` another order: measured above the sparsity ``low``, theirs below it.

    Heads that are left at ``high`` are ordered by what they last cost.  What it took is noted in
    ``training["reranked"]``: ``passes`` over the traces and ``cpu_seconds`` of all threads.

    Args:
        model: in eval mode, on its device; it is unchanged afterwards.
        gates: of this model, with the sizes that they are to be served with.
        budget: most passes over the traces, per head of the model.
        rows: traces of one forward.
        store: as of :class:`TraceLoss`.
        prefill: ``"full"`` or ``"local"``, how prompts are read when serving.

    Raises:
        ValueError: for layers without full attention, or an empty span.
    """
    order = compression_order(gates)
    steps = num_removals(len(order), low, high)
    allocation = HeadAllocation.from_gates(gates, low)
    trusted = allocation.num_compressible
    most = budget * len(order)

    def show() -> None:
        bar.update(int(loss.passes))

    with (
        hard_masks(model, gates, traces[0].ids) as gated,
        progress_bar("elimination, at most", "forwards", math.ceil(most)) as bar,
    ):
        loss = TraceLoss(gated, traces, rows, prefill, store, show)
        measured = eliminate(loss, allocation.full, order[trusted:], steps, most, on_step)
        bar.update(bar.done, total=bar.done)
    found = with_order(gates, [*order[:trusted], *measured])
    found.training["reranked"] = {
        "low": low,
        "high": high,
        "prefill": prefill,
        "traces": len(traces),
        "passes": round(loss.passes, 2),
        "cpu_seconds": round(loss.cpu_seconds, 3),
    }
    return found


@contextmanager
def hard_masks(model: PreTrainedModel, gates: HeadGates, ids: Sequence[int]) -> Iterator[Any]:
    """Give the model gates with the sizes for serving, for a while; ``ids``: of any text."""
    check_layers(model)
    check_head(model, ids[:32])
    config = HeadGateConfig(sink=gates.deploy_sink, window=gates.deploy_window)
    gated: Any = get_peft_model(model, config).eval()
    try:
        yield gated
    finally:
        gated.unload()


def num_removals(total: int, low: float, high: float) -> int:
    """Return how many heads become compressible between two sparsities.

    Raises:
        ValueError: if there are none.
    """
    found = num_full_heads(low, total) - num_full_heads(high, total)
    if found < 1:
        raise ValueError(
            f"between the sparsities {low:g} and {high:g}, where elimination begins and ends, no "
            f"head of {total} becomes compressible: take them further apart"
        )
    return found


def eliminate(
    loss: TraceLoss,
    full_LH: Tensor,
    order: Sequence[Head],
    steps: int,
    budget: float,
    on_step: OnStep,
) -> list[Head]:
    """Return the heads of ``order``, least needed first.

    The first ``steps`` are found by elimination, the others ordered by their last cost.

    Args:
        full_LH: bool ``[L, H]``; heads that are not full are compressible from the start.
        order: the heads that may go; of equal ones the first goes.
        budget: passes over the traces that this may take.  What is left after each head was
            measured once is shared out among the steps, and where less than a whole pass is left
            the lowest old cost decides.
    """
    full_LH = full_LH.clone()
    before = loss.of(full_LH)

    def cost_of(head: Head) -> float:
        reduced_LH = full_LH.clone()
        reduced_LH[head] = False
        return loss.of(reduced_LH) - before

    # the last layers first: all layers below them return what they did
    first = {head: cost_of(head) for head in sorted(order, reverse=True)}
    cost = {head: first[head] for head in order}
    gone: list[Head] = []
    for step in range(steps):
        allowed = (budget - loss.passes) / (steps - step)
        fresh: set[Head] = set()
        lowest = min(cost, key=cost.__getitem__)
        while lowest not in fresh and len(fresh) + 1 <= allowed:
            cost[lowest] = cost_of(lowest)
            fresh.add(lowest)
            lowest = min(cost, key=cost.__getitem__)
        # where the budget ended the search, a fresh cost counts more than a lower old one
        among = [head for head in cost if head in fresh] or list(cost)
        head = min(among, key=cost.__getitem__)
        before += cost.pop(head)
        full_LH[head] = False
        gone.append(head)
        record = {"layer": head[0], "head": head[1], "loss": before}
        record |= {"passes": loss.passes, "cpu_seconds": loss.cpu_seconds}
        on_step(record, full_LH)
    return [*gone, *sorted(cost, key=cost.__getitem__)]


# --- the choice between orders


def with_order(gates: HeadGates, order: Sequence[Head]) -> HeadGates:
    """Hand the gates' numbers out so that ``compression_order`` is ``order``, of all heads.

    ``mean_alpha`` becomes the place in the order, 0 to 1, so that equal gates keep it too.
    """
    alpha = torch.empty_like(gates.alpha)
    rank = torch.empty_like(gates.mean_alpha)
    values = gates.alpha.flatten().sort().values
    for place, head in enumerate(order):
        alpha[head] = values[place]
        rank[head] = place / max(1, len(order) - 1)
    return replace(gates, alpha=alpha, mean_alpha=rank)


def mean_order(first: Sequence[Head], second: Sequence[Head]) -> list[Head]:
    """Order heads by the sum of their places in two orders.

    What both compress first it compresses first; of equal ones the first in ``second`` goes first.
    """
    places = {head: first.index(head) + place for place, head in enumerate(second)}
    return sorted(second, key=places.__getitem__)


def choose_order(
    model: PreTrainedModel,
    traces: Sequence[MarkedText],
    distilled: HeadGates,
    measured: HeadGates,
    low: float,
    high: float,
    prefill: str,
) -> HeadGates:
    """Return ``measured`` in the order that :func:`best` finds on other solutions.

    Orders are compared at a third and two thirds of the way from ``low`` to ``high``, a solution at
    a time.  Noted in ``training["order"]``, the time in ``training["choice_cpu_seconds"]``.
    """
    started = time.process_time()
    first = compression_order(distilled)
    second = compression_order(measured)
    orders = {"measured": second, MEAN: mean_order(first, second), "distilled": first}
    third = (high - low) / 3
    losses: dict[str, Tensor] = {}
    with hard_masks(model, measured, traces[0].ids) as gated:
        loss = TraceLoss(gated, traces, 1, prefill)
        for name, order in orders.items():
            total_N = torch.zeros(len(traces), dtype=torch.float64)
            for sparsity in (low + third, high - third):
                layers, heads = measured.alpha.shape
                full_LH = HeadAllocation.from_order(order, layers, heads, sparsity).full
                total_N += torch.tensor(loss.of_batches(full_LH), dtype=torch.float64)
            losses[name] = total_N / 2
    kept = best(losses)
    means = {name: loss_N.mean().item() for name, loss_N in losses.items()}
    told = ", ".join(f"{name} {mean:.3g}" for name, mean in means.items())
    print(f"loss of orders on {len(traces)} other solutions: {told}; kept: {kept}", flush=True)
    chosen = with_order(measured, orders[kept])
    chosen.training |= {
        "order": kept,
        "order_losses": means,
        "choice_cpu_seconds": round(time.process_time() - started, 3),
    }
    return chosen


def best(losses: dict[str, Tensor]) -> str:
    """Name the mean, unless another order's losses on the solutions are clearly lower.

    They are if the difference is more than its standard error over the solutions.
    """
    lower = {MEAN: 0.0}
    for name, loss_N in losses.items():
        less_N = losses[MEAN] - loss_N
        if len(less_N) > 1 and less_N.mean() > less_N.std() / len(less_N) ** 0.5:
            lower[name] = less_N.mean().item()
    return max(lower, key=lower.__getitem__)


# --- the loss of masks on solutions


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
        rest_N = rest_of(self.log_NK)
        return found_N + rest_N * (rest_N / rest_of(other_NK)).log()


def rest_of(log_NK: Tensor) -> Tensor:
    """Return the probability of all other tokens, which rounding may leave at 0."""
    return (1 - log_NK.exp().sum(-1)).clamp(min=torch.finfo(log_NK.dtype).eps)


class TraceLoss:
    """The loss ``mean_i log(1 + KL_i)`` of masks on solutions, teacher-forced.

    ``KL_i`` is the sum over a solution's tokens of ``KL(full || masked)``, in nats.  A few tokens
    decide whether a solution goes wrong, so the sum counts and not the mean; the logarithm keeps
    one lost solution from hiding what happens to the others.

    Layers below the first whose heads differ from those of the mask before do not compute again,
    which halves the work of an elimination.

    Args:
        model: wrapped with :class:`rlkv.attention.head_gate.HeadGateConfig`, which says sink and
            window, in eval mode on its device, all of whose layers have full attention.
        traces: prompts with their solutions, whose tokens are the answers.
        rows: traces of one forward.
        prefill: ``"full"``: prompts are read in full, once for all masks; ``"local"``: through the
            masks too.
        store: where measurements are kept, and found when the same job starts again; ``passes``
            counts them as before.
        on_forward: called after each forward.

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
        on_forward: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.on_forward = on_forward
        self.device = model.device
        self.decoder = model.get_base_model().get_decoder()
        self.head = model.get_base_model().get_output_embeddings()
        self.num_traces = len(traces)
        self.passes = 0.0
        self._store = store
        found = [] if store is None else store.rows
        self._known = {(row["batch"], row["full"]): row["loss"] for row in found}
        self.cpu_seconds = sum(row["cpu_s"] for row in found)
        self._clock = time.process_time()
        ordered = sorted(traces, key=lambda trace: len(trace.ids))
        self.batches = []
        self.full = []  # what full attention expects of each batch, in pieces
        with torch.no_grad(), model.disable_adapter():
            for start in range(0, len(ordered), rows):
                piece = ordered[start : start + rows]
                batch = make_batch(self.decoder, piece, prefill, self.device)
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
        same = 0
        if self._last_LH is not None:
            differing = (self._last_LH != full_LH).any(dim=1).nonzero()
            same = int(differing[0]) if len(differing) else len(full_LH)
        self._last_LH = full_LH.clone()
        return [self._sum(number, full_LH, same) for number in range(len(self.batches))]

    def _sum(self, number: int, full_LH: Tensor, same: int) -> float:
        """Return the sum over the rows of a batch, measured if it is not known.

        ``same``: how many of the first layers have the heads of the mask before.
        """
        outputs = self._outputs[number][:same]
        heads = "".join(map(str, full_LH.int().flatten().tolist()))
        if (number, heads) not in self._known:
            set_gates(self.model, full_LH.float())
            with self._layers(outputs) as outputs:
                loss = self._measure(number)
            self._known[number, heads] = loss
            now = time.process_time()
            seconds = now - self._clock
            self._clock = now
            self.cpu_seconds += seconds
            if self._store is not None:
                row = {"batch": number, "full": heads, "loss": loss, "cpu_s": round(seconds, 3)}
                self._store.append(row)
        self._outputs[number] = outputs
        # what was found counts as if it had been measured: a resumed run makes the same steps
        share = len(self.batches[number].ids_BT) / self.num_traces
        self.passes += share * (1 - same / len(self.decoder.layers))
        self.on_forward()
        return self._known[number, heads]

    @contextmanager
    def _layers(self, below: Sequence[Any]) -> Iterator[list[Any]]:
        """Let the first layers return ``below`` without computing, and list what all return."""
        outputs = list(below)
        # what those before the last one return is not looked at
        last = tree_map(lambda state: state.to(self.device), below[-1]) if below else None

        def record(module: nn.Module, given: Any, output: Any) -> None:
            outputs.append(tree_map(Tensor.cpu, output))

        with ExitStack() as undo:
            for number, layer in enumerate(self.decoder.layers):
                if number < len(below):
                    shadow(layer, "forward", lambda *_, **__: last, undo)
                else:
                    undo.callback(layer.register_forward_hook(record).remove)
            yield outputs

    def _measure(self, number: int) -> float:
        batch = self.batches[number]
        states_ND = batch.states(self.decoder)
        kl_B = torch.zeros(len(batch.ids_BT), device=states_ND.device)
        mixed = states_ND.split(TOKENS_AT_ONCE)
        rows = batch.row_N.split(TOKENS_AT_ONCE)
        for full, mixed_ND, row_N in zip(self.full[number], mixed, rows, strict=True):
            kl_N = full.kl(log_probabilities(self.head(mixed_ND)))
            kl_B.index_add_(0, row_N, kl_N.float())
        return kl_B.clamp(min=0).log1p().sum().item()


# --- the log of a run


class RemovalLog:
    """Writes ``log.jsonl``: a record per removed head, with what it took since the one before.

    ``gates.jsonl`` has 1 for the heads that are left and 0 for the others.  The first record's time
    has the ``seconds`` of the distillation before.  W&B gets the records too.
    """

    def __init__(self, run: RunFolder, name: str | None, seconds: float) -> None:
        self.folder = run.path
        self.steps = 0
        self._cpu_seconds = -seconds
        self.wandb = run.wandb
        if self.wandb:
            self.wandb.start(name)
        for name in (LOG, GATES_LOG):
            (self.folder / name).unlink(missing_ok=True)

    def append(self, step: dict[str, Any], full_LH: Tensor) -> None:
        """Log a head that went."""
        self.steps += 1
        record = {
            **step,
            "traces/kept": math.exp(-step["loss"]),
            "time/step_cpu_s": step["cpu_seconds"] - self._cpu_seconds,
        }
        self._cpu_seconds = step["cpu_seconds"]
        append_record(self.folder / LOG, self.steps, record)
        append_record(self.folder / GATES_LOG, self.steps, {"alpha": full_LH.float().tolist()})
        if self.wandb:
            logged = {f"elimination/{name.replace('/', '_')}": record[name] for name in record}
            self.wandb.run.log(logged)

    def add_seconds(self, seconds: float) -> None:
        """Add to the time of the last record what came after it."""
        records = read_log(self.folder / LOG)
        records[-1]["time/step_cpu_s"] += seconds
        write_jsonl(self.folder / LOG, records)
