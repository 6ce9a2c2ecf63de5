"""The order in which heads can go, measured: backward elimination that measures few heads twice.

A gate says how much of a head is needed while the others are open too, not what is lost when the
head goes.  So heads are made compressible one by one, each time the one whose loss costs least.
What a head costs grows as others go, so that its last measured cost is a lower bound: only the
lowest is measured again, until a fresh one is lowest (lazy evaluation: Minoux 1978, "Accelerated
greedy algorithms for maximizing submodular set functions").
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlkv.data.recall import MarkedText
from rlkv.gates.allocation import HeadAllocation, compression_order, num_full_heads
from rlkv.gates.head_gates import HeadGates
from rlkv.models.layout import Layout, gated_places
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
from rlkv.training.distillation import distill_traces
from rlkv.training.logs import LOG, FinderLog
from rlkv.training.run_folder import RunFolder
from rlkv.training.solutions import (
    KEPT,
    KEY,
    READ_BY_ALL,
    TraceLoss,
    check_head,
    check_masks,
    draw_traces,
    hard_masks,
    load_solutions,
    warn_of_unread,
)
from rlkv.utils.files import read_log, write_jsonl
from rlkv.utils.progress import progress_bar
from rlkv.utils.runtime import digest
from rlkv.utils.store import open_store

Head = tuple[int, int]  # layer, KV head
# called with each head that was made compressible (layer and head, the loss then, passes and
# cpu_seconds so far) and the heads that are left
OnStep = Callable[[Mapping[str, Any], Tensor], None]
MEASURED = "measured.jsonl"
DISTILLED = "distilled"  # the folder of the distillation, in that of the run
SOLUTIONS = 6  # of a step of the distillation
FASTEST = 0.25  # its learning rate: gates that reach 0 at once tell of no order
MEAN = "mean"
CURVES = (("traces/kept", "exp(-loss): solutions that stay as they are"),)

READ = READ_BY_ALL | option_names(RLKVSettings, group="elimination")


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
    settings, model, recorded = load_solutions(settings, args, model, tokenizer)
    traces, others = draw_traces(recorded, settings.elimination_traces, args.seed)
    check_head(model, traces[0].ids)
    check_masks(model, traces[0], settings.elimination_prefill)
    shape = ModelShape.from_config(model.config)
    heads = Layout.from_config(model.config).heads
    gated = gated_places(heads, shape.num_layers, shape.num_kv_heads)
    order = [(layer, head) for layer, head in gated.nonzero().tolist()]
    low = TRUSTED_SPARSITY if settings.elimination_distillation else 0.0
    high = settings.elimination_sparsity
    num_removals(len(order), low, high)
    config = {name: value for name, value in asdict(settings).items() if name in READ}
    config |= {"low": low, "seed": args.seed, "output_dir": args.output_dir}
    config["data_digest"] = digest([text.ids for text in traces])
    run = RunFolder(Path(str(args.output_dir)), settings, config)
    # no measurement depends on what may change when it is resumed, but rows number the batches
    kept = (config.keys() - RESUMABLE_KEYS) | {"forward_rows"}
    noted = {name: config[name] for name in sorted(kept)} | {"likeliest": KEPT}
    if run.config["model_files"] is not None:
        noted["model_files"] = run.config["model_files"]
    prefill = settings.elimination_prefill
    with open_store(run.path / MEASURED, noted, KEY) as store:
        run.write_config()
        warn_of_unread(settings, args, READ)
        seconds = 0.0
        if settings.elimination_distillation:
            order, seconds = distilled_order(settings, args, run.path / DISTILLED, recorded, model)
        log = RemovalLog(run, args.run_name, seconds, heads)
        with hard_masks(model, settings.deploy_sink, settings.deploy_window) as masked:
            loss = TraceLoss(masked, traces, settings.forward_rows, prefill, store)
            budget = settings.elimination_budget
            measured, facts = eliminate(loss, order, low, high, budget, log.append)
            del loss  # it holds what layers returned for all solutions
            if settings.elimination_distillation and others:
                measured, choice = choose_order(masked, others, order, measured, low, high, prefill)
                log.add_seconds(choice["choice_cpu_seconds"])
                facts |= choice
    facts |= {"prefill": prefill, "traces": len(traces), "distillation_cpu_seconds": seconds}
    alpha = torch.ones(gated.shape)
    alpha[gated] = torch.linspace(0, 1, len(order))
    gates = HeadGates(
        alpha,
        model=shape,
        heads=heads,
        sink=settings.deploy_sink,
        window=settings.deploy_window,
        deploy_sink=settings.deploy_sink,
        deploy_window=settings.deploy_window,
        training={**run.published(), "method": "elimination", **facts},
    )
    gates = with_order(gates, measured)
    run.export(gates, CURVES)
    return gates


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
    return compression_order(gates), round(seconds, 3)


# --- lazy backward elimination


def rerank_on_traces(
    model: PreTrainedModel,
    traces: Sequence[MarkedText],
    gates: HeadGates,
    low: float,
    high: float,
    budget: float = 3.0,
    rows: int = 16,
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
        prefill: ``"full"`` or ``"local"``, how prompts are read when serving.

    Raises:
        ValueError: for a model without gates, or an empty span.
    """
    num_removals(int(gates.gated.sum()), low, high)
    check_head(model, traces[0].ids)
    check_masks(model, traces[0], prefill)
    with hard_masks(model, gates.deploy_sink, gates.deploy_window) as gated:
        loss = TraceLoss(gated, traces, rows, prefill)
        order, facts = eliminate(loss, compression_order(gates), low, high, budget)
    found = with_order(gates, order)
    found.training["reranked"] = {**facts, "prefill": prefill, "traces": len(traces)}
    return found


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


def full_heads(order: Sequence[Head], sparsity: float) -> Tensor:
    """Return which heads are full, bool ``[L, H]``, up to the last layer with gates.

    order: all heads with a gate, least needed first.
    """
    heads = [0] * (max(order)[0] + 1)
    for layer, _ in order:
        heads[layer] += 1
    return HeadAllocation.from_order(order, len(heads), max(heads), sparsity, heads).full


def eliminate(
    loss: TraceLoss,
    order: Sequence[Head],
    low: float,
    high: float,
    budget: float,
    on_step: OnStep = lambda step, full_LH: None,
) -> tuple[list[Head], dict[str, Any]]:
    """Return all heads, least needed first, and what it took.

    The first stay those of ``order`` up to the sparsity ``low``.  Those up to ``high`` are found by
    elimination, the others ordered by their last cost.

    Args:
        order: all heads; of equal ones the first goes.
        budget: passes over the traces that this may take, per head.  What is left after each head
            was measured once is shared out among the steps, and where less than a whole pass is
            left the lowest old cost decides.
    """
    steps = num_removals(len(order), low, high)
    most = min(budget, steps + 2) * len(order)  # no search takes more
    full_LH = full_heads(order, low)
    gone = [head for head in order if not full_LH[head]]
    left = order[len(gone) :]
    before = loss.of(full_LH)
    with progress_bar("elimination, at most", "forwards", math.ceil(most)) as bar:

        def cost_of(head: Head) -> float:
            reduced_LH = full_LH.clone()
            reduced_LH[head] = False
            more = loss.of(reduced_LH) - before
            bar.update(int(loss.passes))
            return more

        # the last layers first: all layers below them return what they did
        first = {head: cost_of(head) for head in sorted(left, reverse=True)}
        cost = {head: first[head] for head in left}
        for step in range(steps):
            allowed = (most - loss.passes) / (steps - step)
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
            record = {"layer": head[0], "head": head[1], "loss": before, "measured": head in fresh}
            record |= {"passes": loss.passes, "cpu_seconds": loss.cpu_seconds}
            on_step(record, full_LH)
        bar.update(bar.done, total=bar.done)
    facts = {
        "low": low,
        "high": high,
        "passes": round(loss.passes, 2),
        "cpu_seconds": round(loss.cpu_seconds, 3),
    }
    return [*gone, *sorted(cost, key=cost.__getitem__)], facts


# --- the choice between orders


def with_order(gates: HeadGates, order: Sequence[Head]) -> HeadGates:
    """Hand the gates' numbers out so that ``compression_order`` is ``order``, of all heads.

    ``mean_alpha`` becomes the place in the order, 0 to 1, so that equal gates keep it too.
    """
    alpha = torch.ones_like(gates.alpha)
    rank = torch.ones_like(gates.mean_alpha)
    values = gates.alpha[gates.gated].sort().values
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
    gated: Any,
    traces: Sequence[MarkedText],
    distilled: list[Head],
    measured: list[Head],
    low: float,
    high: float,
    prefill: str,
) -> tuple[list[Head], dict[str, Any]]:
    """Return the order that :func:`best` finds on other solutions, and what is told of it.

    Orders are compared at a third and two thirds of the way from ``low`` to ``high``, a solution at
    a time.
    """
    started = time.process_time()
    orders = {"measured": measured, MEAN: mean_order(distilled, measured), "distilled": distilled}
    third = (high - low) / 3
    loss = TraceLoss(gated, traces, 1, prefill)
    losses = {}
    for name, order in orders.items():
        total_N = torch.zeros(len(traces), dtype=torch.float64)
        for sparsity in (low + third, high - third):
            full_LH = full_heads(order, sparsity)
            total_N += torch.tensor(loss.of_batches(full_LH), dtype=torch.float64)
        losses[name] = total_N / 2
    kept = best(losses)
    means = {name: loss_N.mean().item() for name, loss_N in losses.items()}
    told = ", ".join(f"{name} {mean:.3g}" for name, mean in means.items())
    print(f"loss of orders on {len(traces)} other solutions: {told}; kept: {kept}", flush=True)
    seconds = round(time.process_time() - started, 3)
    return orders[kept], {"order": kept, "order_losses": means, "choice_cpu_seconds": seconds}


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


# --- the log of a run


class RemovalLog(FinderLog):
    """Writes a record per removed head, with what it took since the one before.

    ``measured`` is false where the budget left no forward for the step: the loss is then the one
    before and what the head cost when it was last measured.  ``gates.jsonl`` has 1 for the heads
    that are left and 0 for the others.  The first record's time has the ``seconds`` of the
    distillation before.
    """

    def __init__(
        self, run: RunFolder, name: str | None, seconds: float, heads: Sequence[int]
    ) -> None:
        super().__init__(run, name, heads)
        self._cpu_seconds = -seconds

    def append(self, record: Mapping[str, Any], alpha_LH: Tensor) -> None:
        """Log a head that went; ``alpha_LH`` may end at the last layer with gates."""
        seconds = record["cpu_seconds"] - self._cpu_seconds
        self._cpu_seconds = record["cpu_seconds"]
        found = {"traces/kept": math.exp(-record["loss"]), "time/step_cpu_s": seconds}
        left_LH = torch.ones(len(self.heads), max(self.heads))
        left_LH[: len(alpha_LH)] = alpha_LH.float()
        super().append({**record, **found}, left_LH)

    def add_seconds(self, seconds: float) -> None:
        """Add to the time of the last record what came after it."""
        self.records[-1]["time/step_cpu_s"] += seconds
        write_jsonl(self.run.path / LOG, self.records)
