"""What a training takes, said before anything is loaded: engine, sizes that fit, memory and time.

Rates and reserves are assumptions (see :mod:`rlkv.rollout.footprint`); every step of a run prints
what it took.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from rlkv.attention.branches import MIN_BLOCK
from rlkv.attention.call import LocalSizes
from rlkv.cache.accounting import EntrySize, kv_nbytes
from rlkv.cache.plan import CacheSettings
from rlkv.data.problems import read_curriculum
from rlkv.gates.allocation import SPARSITIES, HeadAllocation
from rlkv.models.builtin import BUILT_IN
from rlkv.models.loading import dtype_name
from rlkv.rollout.footprint import (
    CARDS,
    COPIES,
    DEFAULT,
    DEFAULT_KV_GIB,
    ENGINE_GIB,
    GIB,
    MEAN_LENGTH,
    NAMES,
    USABLE,
    Card,
    Footprint,
    card_of,
    free_memory,
    parse_gpus,
    rough,
)
from rlkv.training.config import DEFAULT_ROWS, GateTrainingArguments, RLKVSettings
from rlkv.training.sharding import is_sharded, not_loading
from rlkv.vllm.plugin import choose_engine

# trl computes log-probabilities from tiles of logits: this many tokens and vocabulary entries
TILE_TOKENS = 4096
TILE_ENTRIES = 32768
CPU_TILES = 7.25  # float32 tiles that its CPU form makes besides


@dataclass(frozen=True)
class UpdateMemory:
    """Bytes besides the weights.

    Attributes:
        held: what all layers keep for the backward pass.
        layer: what the layer that is being computed takes in addition.
        logits: what the output layer takes in addition; it is never there together with ``layer``.
    """

    held: int
    layer: int
    logits: int

    @property
    def peak(self) -> int:
        return self.held + max(self.layer, self.logits)


@dataclass(frozen=True)
class UpdateShape:
    """What an update computes: ``rows`` of ``length`` tokens, ``rows_per_call`` in a forward."""

    rows: int
    length: int
    rows_per_call: int
    sizes: LocalSizes
    checkpointing: bool = False
    on_gpu: bool = False


def layer_bytes_per_token(model: Footprint, sizes: LocalSizes, on_gpu: bool) -> float:
    """Return what a layer holds of a token for its backward pass."""
    kv = model.shape.num_kv_heads
    size = model.shape.head_dim
    queries = model.shape.num_query_heads
    e = model.itemsize
    log_sums = 4 * queries
    states = (2 * queries + 2 * kv) * size * e
    common = 8 * model.hidden + 3 * model.intermediate * e + states + log_sums
    if on_gpu:
        wide = 0 if e == 4 else 8 * queries * size
        return common + queries * size * e + log_sums + wide
    block = max(sizes.window, MIN_BLOCK)
    seen = sizes.sink + sizes.window + block
    local = (2 * queries + 2 * kv * seen / block) * size * e + queries / kv * seen * e
    return common + local + (4 if e == 4 else 8) * queries * size


def update_memory(model: Footprint, update: UpdateShape) -> UpdateMemory:
    """Return the memory of one micro-batch, all of whose rows are as long as the longest."""
    tokens = update.rows * update.length
    called = min(update.rows, update.rows_per_call) * update.length
    e = model.itemsize
    of_layer = layer_bytes_per_token(model, update.sizes, update.on_gpu)
    kept = model.hidden * e if update.checkpointing else of_layer
    last_norm = 8 * model.hidden
    held = tokens * (model.shape.num_layers * kept + last_norm)
    # gradients of the MLP's inner states and of the residual stream
    layer: float = called * (2 * model.intermediate * e + 2 * model.hidden * e)
    if update.checkpointing:
        layer += called * of_layer
    tile: float = min(called, TILE_TOKENS) * TILE_ENTRIES * e
    if not update.on_gpu:
        tile += CPU_TILES * 4 * min(called, TILE_TOKENS) * min(model.vocabulary, TILE_ENTRIES)
    logits = tile + called * model.hidden * (4 + e)
    return UpdateMemory(int(held), int(layer), int(logits))


PROMPT_TOKENS = 1024  # room for a prompt, as in the paper: 8,192 less 7,168
UPDATE_SHARE = 0.2  # of a GPU's peak rate that an update reaches
CPU_FLOPS = 1e11  # operations/s of an update on a CPU
GRAPHS = ENGINE_GIB * GIB  # vLLM's graphs and activations


@dataclass(frozen=True)
class Rates:
    """Assumed tokens/s of one process: of its rollouts, and of forward and backward."""

    rollout: float
    update: float


@dataclass(frozen=True)
class Machine:
    """Where a run is planned for: ``processes`` with a ``card`` each, or on a CPU.

    Attributes:
        free: bytes that are free on each card.
    """

    processes: int
    card: Card | None
    free: int | None


@dataclass(frozen=True)
class Plan:
    """What a run takes.

    Attributes:
        settings: with the engine, rows and memory of its rollouts chosen.
        why: why the engine is not vLLM; empty if it is, or was asked for.
        footprint: None for a model whose shape is not known, and for built-in ones, which have no
            assumed rates.
        problems, tokens: of the curriculum, and of its mean output; None if it is not there or does
            not say.
        positions: tokens of the longest prompt and completion.
        lacking: GiB that the GPU is too small by; 0 if all fits.
        shards: processes that share out the trainer's weights.
    """

    settings: RLKVSettings
    args: GateTrainingArguments
    machine: Machine
    why: str
    footprint: Footprint | None
    problems: int | None
    tokens: float | None
    positions: int
    lacking: float = 0.0
    shards: int = 1

    @property
    def mean_tokens(self) -> float:
        """Tokens of a completion: as the curriculum has it, else assumed."""
        longest = self.args.max_completion_length or 0
        return MEAN_LENGTH * longest if self.tokens is None else min(self.tokens, longest)

    @property
    def _processes_of_args(self) -> int:
        # without prompts_per_step a step has as many completions for each process
        whole = self.args.prompts_per_step is not None
        return self.machine.processes if whole else self.args.world_size

    @property
    def samples(self) -> int:
        """Completions of an optimizer step over all processes."""
        return self.args.samples_per_step * self.machine.processes // self._processes_of_args

    @property
    def own_samples(self) -> int:
        """Completions of a rollout in one process."""
        return (self.args.generation_batch_size or DEFAULT_ROWS) // self._processes_of_args

    @property
    def steps(self) -> int | None:
        """Optimizer steps; None if they follow from a curriculum that is not there."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        if self.problems is None:
            return None
        prompts = self.samples // (self.args.num_generations or 1)
        of_epoch = (self.problems - self.settings.held_out) // prompts
        return math.ceil(self.args.num_train_epochs * of_epoch)

    @property
    def rates(self) -> Rates | None:
        """Rates of one process; None for a model that none are assumed for."""
        if self.footprint is None or self.settings.model in BUILT_IN:
            return None
        card = self.machine.card
        rows = self.settings.rollout_rows or 1
        flops = CPU_FLOPS if card is None else UPDATE_SHARE * card.flops
        rollout = self.footprint.rate(
            self.settings.rollout, rows, card, self.mean_tokens, mixed=True
        )
        return Rates(rollout, flops / (6 * self.footprint.parameters))

    @property
    def sampling(self) -> int:
        """Processes that sample."""
        is_served = self.settings.rollout == "vllm-server"
        return len(self.settings.servers) if is_served else self.machine.processes

    def seconds(self, rates: Rates) -> tuple[float, float]:
        """Return seconds of a step: of its rollout, and of its update if all groups have spread."""
        tokens = self.samples * self.mean_tokens
        rollout = tokens / (rates.rollout * self.sampling)
        return rollout, tokens / (rates.update * self.machine.processes)

    @property
    def own_weights(self) -> int:
        """Bytes of the trainer's weights on one GPU."""
        return 0 if self.footprint is None else self.footprint.weights // self.shards

    @property
    def engine_weights(self) -> int:
        """Bytes of vLLM's copy, which has all weights."""
        if self.footprint is None or self.settings.rollout != "vllm":
            return 0
        return self.footprint.weights

    def update(self, rows: int, checkpointing: bool) -> UpdateMemory:
        """Return the memory of an update of ``rows`` rows of the greatest length."""
        assert self.footprint is not None
        # under DDP every process makes one forward for all of its rows
        alone = self.machine.processes == 1
        shape = UpdateShape(
            rows=rows,
            length=self.positions,
            rows_per_call=min(rows, self.settings.forward_rows) if alone else rows,
            sizes=LocalSizes(self.settings.sink, self.settings.window),
            checkpointing=checkpointing,
            on_gpu=self.machine.card is not None,
        )
        return update_memory(self.footprint, shape)

    def engine(self) -> str:
        """Say what samples, with what."""
        settings = self.settings
        text = NAMES[settings.rollout]
        if self.why:
            text += f" ({self.why})"
        if settings.rollout != "vllm-server":
            text += f", {settings.rollout_rows} rows at once"
        if settings.rollout == "vllm":
            text += f" and {settings.rollout_kv_gib:.1f} GiB of KV"
        if self.lacking:
            text += f"; the GPU is too small by about {self.lacking:.0f} GiB"
        return text

    def line(self) -> str:
        """Return what a run prints before it begins."""
        line = f"rollouts through {self.engine()}"
        if self.rates is None:
            return line
        return f"{line}: {self.time(self.rates)}; every step prints the measured time that is left"

    def announced(self) -> RLKVSettings:
        """Return the chosen settings, after the main process has printed that line."""
        if self.args.process_index == 0:
            print(self.line(), flush=True)
        return self.settings

    def time(self, rates: Rates) -> str:
        """Say how long a step takes, and what the estimate rests on."""
        seconds = sum(self.seconds(rates))
        total = "" if self.steps is None else f" and {rough(self.steps * seconds)} in all"
        where = "a GPU" if self.machine.card is not None else "this CPU"
        return (
            f"about {rough(seconds)} a step{total} on {where}, if rollouts make "
            f"{rates.rollout * self.sampling:,.0f} tokens/s, updates "
            f"{rates.update * self.machine.processes:,.0f} (assumed, not measured) and a "
            f"completion takes {self.mean_tokens:,.0f} tokens"
        )


def make_plan(
    settings: RLKVSettings,
    args: GateTrainingArguments,
    machine: Machine,
    prompt_tokens: int = PROMPT_TOKENS,
) -> Plan:
    """Choose the engine and the sizes of the rollouts for ``machine``.

    Args:
        prompt_tokens: of the longest prompt.
    """
    footprint = None if settings.model in BUILT_IN else footprint_on(settings, args, machine)
    problems, tokens = _curriculum_facts(settings.curriculum)
    positions = prompt_tokens + (args.max_completion_length or 0)
    shards = machine.processes if is_sharded(args) else 1
    plan = Plan(settings, args, machine, "", footprint, problems, tokens, positions, shards=shards)
    return _with_engine(plan)


def footprint_on(
    settings: RLKVSettings, args: GateTrainingArguments, machine: Machine
) -> Footprint | None:
    """Return the footprint of the model in the dtype that it has there."""
    device = args.device if machine.card is None else torch.device("cuda")
    return Footprint.of(settings.model, dtype_name(settings.dtype, device))


def _with_engine(plan: Plan) -> Plan:
    settings = plan.settings
    args = plan.args
    model = plan.footprint
    free = plan.machine.free
    kv_gib = settings.rollout_kv_gib
    rows = settings.rollout_rows
    lacking = 0.0
    architecture = None if model is None else model.architecture
    rollout: Any
    rollout, why = choose_engine(settings.rollout, free is not None, architecture)
    if model is not None and free is not None and rollout != "vllm-server":
        update = plan.update(args.per_device_train_batch_size, args.gradient_checkpointing).peak
        room = int(USABLE * free) - plan.own_weights - update
        if rollout == "vllm":
            # its copy has all weights; its KV and graphs stay while the gates are updated
            beside = room - model.weights - int(GRAPHS)
            if settings.rollout == "auto" and model.lacking(beside, plan.positions):
                rollout = "hf"
                why = "two copies of the weights leave no room for KV"
            else:
                room = beside
        samples = plan.own_samples
        row = plan.positions * model.kv_per_token
        if kv_gib is None:
            kv_gib = max(min(room, samples * row), row) / GIB
        if rows is None:
            most = min(samples, DEFAULT_ROWS) if rollout == "hf" else samples
            kv = int(kv_gib * GIB) if rollout == "vllm" else room
            rows = model.rows(rollout, kv, plan.positions, most)
        lacking = model.lacking(room, plan.positions)
    chosen = replace(
        settings,
        rollout=rollout,
        rollout_rows=rows or DEFAULT_ROWS,
        rollout_kv_gib=(kv_gib or DEFAULT_KV_GIB) if rollout == "vllm" else None,
    )
    return replace(plan, settings=chosen, why=why, lacking=lacking)


def _curriculum_facts(path: str | None) -> tuple[int | None, float | None]:
    """Return the number of problems and the mean output tokens, as far as they are known."""
    if path is None or not Path(path).is_file():
        return None, None
    rows = read_curriculum(path)
    lengths = [row["output_tokens"] for row in rows if row.get("output_tokens")]
    return len(rows), fmean(lengths) if lengths else None


# --- the text of --plan


def describe_plan(
    settings: RLKVSettings, args: GateTrainingArguments, prompt_tokens: int = PROMPT_TOKENS
) -> str:
    """Return what ``--plan`` prints.

    Args:
        prompt_tokens: of the longest prompt.

    Raises:
        ValueError: if ``plan_gpus`` names none that is known.
    """
    with not_loading():
        machine, name = _machine(settings, args)
        plan = make_plan(settings, args, machine, prompt_tokens)
        if plan.footprint is None:
            plan = replace(plan, footprint=footprint_on(settings, args, machine))
    lines = _run(plan)
    if plan.footprint is not None:
        lines["machine"] = "this CPU" if machine.card is None else f"{machine.processes} x {name}"
        lines |= _resources(plan, plan.footprint)
    lines["gates"] = f"{args.output_dir}/gates.pt"
    return "\n".join(f"{name:<11}{text}" for name, text in lines.items())


def _machine(settings: RLKVSettings, args: GateTrainingArguments) -> tuple[Machine, str]:
    """Return what is planned for, and the name of its GPUs.

    That is what ``plan_gpus`` names, what is here, else one of a default.
    """
    if settings.plan_gpus is not None:
        processes, name = parse_gpus(settings.plan_gpus)
        return Machine(processes, CARDS[name], int(CARDS[name].memory * GIB)), name
    here = card_of(args.device)
    if here is not None:
        name = torch.cuda.get_device_name(args.device)
        return Machine(args.world_size, here, free_memory(args.device)), name
    if settings.model in BUILT_IN:
        return Machine(args.world_size, None, None), ""
    return Machine(args.world_size, CARDS[DEFAULT], int(CARDS[DEFAULT].memory * GIB)), DEFAULT


def _run(plan: Plan) -> dict[str, str]:
    """Say what the run does, whatever it runs on."""
    settings = plan.settings
    model = settings.model
    if plan.footprint is not None:
        shape = plan.footprint.shape
        heads = f"{shape.num_layers} layers x {shape.num_kv_heads} KV heads"
        model += f": {heads}, {plan.footprint.parameters:.3g} parameters"
    curriculum = settings.curriculum or "problems of the built-in task"
    if settings.curriculum is not None and plan.problems is None:
        curriculum += f" (absent: {settings.filter_command()} writes it)"
    steps = f"{plan.steps or 'as the curriculum has it'}, {plan.samples} completions each"
    source = "the mean of the curriculum" if plan.tokens is not None else "assumed"
    tokens = (
        f"at most {plan.args.max_completion_length:,} a completion, {plan.mean_tokens:,.0f} on "
        f"average ({source})"
    )
    if plan.steps:
        total = plan.steps * plan.samples
        steps += f", {total:,} in all"
        tokens += f", {total * plan.mean_tokens / 1e6:,.1f} million in all"
    return {
        "model": model,
        "curriculum": curriculum,
        "steps": steps,
        "tokens": tokens,
        "engine": plan.engine(),
    }


def _resources(plan: Plan, model: Footprint) -> dict[str, str]:
    """Say how much memory and time the run takes."""
    args = plan.args
    settings = plan.settings
    rows = args.per_device_train_batch_size
    checkpointing = args.gradient_checkpointing
    engine = plan.engine_weights
    kv = _kv_of_rollouts(plan, model)
    update = plan.update(rows, checkpointing).peak
    other = plan.update(rows, not checkpointing).peak
    # vLLM keeps its KV while the gates are updated; transformers frees it
    peak = plan.own_weights + (engine + GRAPHS + kv + update if engine else max(kv, update))
    memory = _size(peak)
    if plan.machine.free is not None:
        memory += f" of {_size(plan.machine.free)} free"
    memory += f": {_size(plan.own_weights)} of weights"
    if engine:
        reserve = f"{_size(GRAPHS)} for its graphs and activations (assumed)"
        memory += f", {_size(engine)} of vLLM's copy and {reserve}"
    if kv:
        memory += f", up to {_size(kv)} of KV for {settings.rollout_rows} rows"
    now, then = ("with", "without") if checkpointing else ("without", "with")
    lines = {
        "memory": f"{memory}, {_size(update)} for the update",
        "update": (
            f"{rows} x {plan.positions:,} tokens at once, {now} gradient checkpointing; {then} it "
            f"would take {_size(other)}" + _largest(plan, kv if engine else 0)
        ),
        "serving": _serving(plan, model),
    }
    if plan.rates is not None:
        rollout, update_seconds = plan.seconds(plan.rates)
        lines["time"] = (
            f"{plan.time(plan.rates)}; of a step {rough(rollout)} are rollout, "
            f"{rough(update_seconds)} update"
        )
    return lines


def _kv_of_rollouts(plan: Plan, model: Footprint) -> float:
    """Return the bytes of KV on a GPU that trains."""
    settings = plan.settings
    if settings.rollout == "vllm-server":
        return 0  # on its own GPU
    if settings.rollout_kv_gib is not None:
        return settings.rollout_kv_gib * GIB
    of_rows = plan.positions * model.kv_per_token * (settings.rollout_rows or 1)
    return COPIES * of_rows


def _largest(plan: Plan, kv: float) -> str:
    """Say the most rows whose update fits, with and without checkpointing."""
    free = plan.machine.free
    if free is None:
        return ""
    room = USABLE * free - plan.own_weights - kv
    if plan.engine_weights:
        room -= plan.engine_weights + GRAPHS
    samples = max(1, plan.samples // plan.machine.processes)
    most = []
    for checkpointing in (False, True):
        rows = 0
        while rows < samples and plan.update(rows + 1, checkpointing).peak <= room:
            rows += 1
        most.append(rows)
    return f"; the most rows that fit: {most[0]} without, {most[1]} with"


def _serving(plan: Plan, model: Footprint) -> str:
    """Say the KV of one text of mean length by sparsity."""
    settings = plan.settings
    shape = model.shape
    tokens = plan.positions - (plan.args.max_completion_length or 0) + round(plan.mean_tokens)
    size = EntrySize(shape.head_dim, shape.num_query_heads // shape.num_kv_heads, model.itemsize)
    kept = CacheSettings(settings.deploy_sink, settings.deploy_window)
    found = []
    for sparsity in (0.0, *SPARSITIES):
        full = HeadAllocation.random(shape.num_layers, shape.num_kv_heads, sparsity, seed=0).full
        used, _ = kv_nbytes(kept, full, size, torch.tensor([1]), torch.tensor([tokens]))
        found.append(f"{_size(int(used))} at {sparsity:g}")
    return f"KV of a text of {tokens:,} tokens: {', '.join(found)}"


def _size(number: float) -> str:
    unit, name = (GIB, "GiB") if number >= GIB else (2**20, "MiB")
    return f"{number / unit:.{1 if number < 100 * unit else 0}f} {name}"
