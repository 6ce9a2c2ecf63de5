"""Elimination on recorded solutions: of gates that exist, and as a way to find heads."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlkv.data.recall import MarkedText
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.loading import dtype_name, load_model
from rlkv.models.prompts import choose_template
from rlkv.models.shape import ModelShape
from rlkv.training.config import TRUSTED_SPARSITY, GateTrainingArguments, RLKVSettings
from rlkv.training.distill_data import read_traces
from rlkv.training.distillation import check_layers
from rlkv.training.elimination import Removal, num_removals, rerank
from rlkv.training.elimination_choice import HELD_BACK, choose_order, hard_masks
from rlkv.training.elimination_start import COPIED, distilled_order, unordered_gates
from rlkv.training.logs import GATES_LOG, LOG, append_record
from rlkv.training.run_folder import RESUMABLE_KEYS, RunFolder
from rlkv.training.trace_loss import KEPT, KEY, TraceLoss
from rlkv.utils.jsonl import read_log, write_jsonl
from rlkv.utils.progress import progress_bar
from rlkv.utils.provenance import digest
from rlkv.utils.store import ResultStore, open_store

SETTINGS = {"finder", "model", "dtype", "template", "curriculum", "deploy_sink", "deploy_window", "forward_rows"}
SETTINGS |= {"elimination_traces", "elimination_sparsity", "elimination_budget", "elimination_prefill"}
SETTINGS |= {"elimination_distillation"}
GRPO_OPTIONS = ("max_steps", "learning_rate", "prompts_per_step", "num_generations", "recipe", "temperature")
MEASURED = "measured.jsonl"
# of what else is set it reads nothing
READ = SETTINGS | COPIED | {"init_gates", "output_dir", "wandb", "wandb_project", "gates_link"}
UNMEASURED = RESUMABLE_KEYS - {"forward_rows"}  # no measurement depends on them; rows number the batches
CURVES = (("traces/kept", "exp(-loss): solutions that stay as they are"),)


def draw_traces(path: str | Path, tokenizer: Any, template: str, number: int, seed: int) -> list[MarkedText]:
    """``number`` of a curriculum's problems with their recorded solutions; ``ValueError`` if it has fewer."""
    return draw_apart(path, tokenizer, template, number, seed)[0]


def draw_apart(
    path: str | Path, tokenizer: Any, template: str, number: int, seed: int
) -> tuple[list[MarkedText], list[MarkedText]]:
    """:func:`draw_traces`, and up to ``HELD_BACK`` times as many others."""
    recorded = read_traces(str(path), tokenizer, template, max_length=sys.maxsize)
    if number > len(recorded):
        raise ValueError(f"{number} solutions are asked for, but {path} has only {len(recorded)}: ask for fewer")
    chosen = random.Random(f"rlkv-elimination-{seed}").sample(range(len(recorded)), number)
    others = sorted(set(range(len(recorded))) - set(chosen))
    others = random.Random(f"rlkv-held-back-{seed}").sample(others, min(len(others), HELD_BACK * number))
    return [recorded[at] for at in chosen], [recorded[at] for at in others]


def unread_options(settings: RLKVSettings, args: GateTrainingArguments) -> list[str]:
    """Options of GRPO that were set, which elimination does not read."""
    found = [f.name for f in fields(settings) if f.name not in READ and getattr(settings, f.name) != f.default]
    return found + [name for name in GRPO_OPTIONS if getattr(args, name) != getattr(GateTrainingArguments, name)]


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
    """:func:`rlkv.training.elimination.rerank` on solutions, with the sizes that ``gates`` are to be served with.

    What it took is noted in ``training["reranked"]``: ``passes`` over the traces and ``cpu_seconds`` of all threads.

    Args:
        model: in eval mode, on its device; it is unchanged afterwards.
        budget: most passes over the traces, per head of the model.
        rows: traces of one forward.
        store: as of :class:`rlkv.training.trace_loss.TraceLoss`.
        prefill: ``"full"`` or ``"local"``, how prompts are read when serving.

    Raises:
        ValueError: for gates of another model, layers without full attention, or an empty span.
    """
    gates.check_model(model.config)
    total = gates.alpha.numel()
    steps = num_removals(total, low, high)
    gone: list[Removal] = []

    def show() -> None:
        note = f"{len(gone)} of {steps} heads gone" + (f", loss {gone[-1].loss:.3g}" if gone else "")
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
    facts = {"low": low, "high": high, "prefill": prefill, "traces": len(traces), "passes": round(loss.passes, 2)}
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
    (:mod:`rlkv.training.elimination_start`), and other solutions say which order is kept
    (:mod:`rlkv.training.elimination_choice`).  A head's gate is its place in the order, 0 to 1.  ``measured.jsonl``
    keeps what was measured: a run that was stopped goes on from there, also to another sparsity or another budget.

    Args:
        model, tokenizer: instead of the ones that ``settings.model`` names.

    Raises:
        ValueError: for data, a model or a folder that do not fit.
    """
    settings = settings.with_curriculum()
    if settings.curriculum is None:
        raise ValueError(
            "no solutions to measure heads on: pass --curriculum FILE, which rlkv-filter writes, or train by GRPO with "
            "--finder rlkv"
        )
    if args.world_size > 1:
        raise ValueError(
            f"--finder elimination takes one process, not {args.world_size}: start it without a launcher, or take "
            "--finder rlkv"
        )
    if model is None or tokenizer is None:
        dtype = dtype_name(settings.dtype, args.device)
        model, tokenizer = load_model(settings.model, dtype=dtype, device=str(args.device))
    template, number = choose_template(settings.template, model=settings.model), settings.elimination_traces
    traces, others = draw_apart(settings.curriculum, tokenizer, template, number, args.seed)
    config = {name: value for name, value in asdict(settings).items() if name in SETTINGS}
    config["dtype"] = dtype_name(settings.dtype, args.device)
    low = TRUSTED_SPARSITY if settings.elimination_distillation else 0.0
    config |= {
        "low": low,
        "seed": args.seed,
        "output_dir": args.output_dir,
        "data_digest": digest([text.ids for text in traces]),
    }
    run = RunFolder(Path(args.output_dir or "outputs/gates"), settings, config)
    measured = {name: value for name, value in config.items() if name not in UNMEASURED} | {"likeliest": KEPT}
    start = unordered_gates(ModelShape.from_config(model.config), settings)
    num_removals(start.alpha.numel(), low, settings.elimination_sparsity)  # both refuse before the distillation
    check_layers(model)
    with open_store(run.path / MEASURED, measured, KEY) as store:
        run.write_config()
        if unread := unread_options(settings, args):
            print(f"finder elimination, which does not read {', '.join(unread)} (--finder rlkv does)", flush=True)
        start, seconds = distilled_order(start, settings, args, model, tokenizer, run.path)
        log = RemovalLog(run, args, HeadAllocation.from_gates(start, low).full.float(), seconds)
        span, work = (low, settings.elimination_sparsity), (settings.elimination_budget, settings.forward_rows)
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

    ``gates.jsonl`` has 1 for the heads that are left and 0 for the others.  The first record's time has the
    ``seconds`` of the distillation before.  W&B gets the records too.
    """

    def __init__(self, run: RunFolder, args: GateTrainingArguments, full_LH: Tensor, seconds: float) -> None:
        self.folder, self.full, self.steps, self._cpu_seconds = run.path, full_LH, 0, -seconds
        self.wandb = run.open_wandb()
        if self.wandb:
            self.wandb.on_train_begin(args, None, None)
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
            self.wandb.run.log({f"elimination/{name.replace('/', '_')}": value for name, value in record.items()})
