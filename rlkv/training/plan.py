"""What a training takes, said before anything is loaded: the engine, sizes that fit the GPU, memory
and time.

Rates and reserves are assumptions (see :mod:`rlkv.rollout.footprint`); every step of a run prints
what it took.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

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

# trl computes log-probabilities from tiles of logits, of this many tokens and entries of the
# vocabulary
TILE_TOKENS, TILE_ENTRIES = 4096, 32768
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
    """What an update computes:

    ``rows`` of ``length`` tokens, of which ``rows_per_call`` share a forward.
    """

    rows: int
    length: int
    rows_per_call: int
    sizes: LocalSizes
    checkpointing: bool = False
    on_gpu: bool = False


def layer_bytes_per_token(model: Footprint, sizes: LocalSizes, on_gpu: bool) -> float:
    """What a layer holds of a token for its backward pass."""
    heads, size, e = model.shape.num_kv_heads, model.shape.head_dim, model.itemsize
    queries = model.shape.num_query_heads
    groups, log_sums = queries / heads, 4 * queries
    common = (
        8 * model.hidden
        + 3 * model.intermediate * e
        + (2 * queries + 2 * heads) * size * e
        + log_sums
    )
    if on_gpu:
        return common + queries * size * e + log_sums + (0 if e == 4 else 8 * queries * size)
    block = max(sizes.window, MIN_BLOCK)
    seen = sizes.sink + sizes.window + block
    local = (2 * queries + 2 * heads * seen / block) * size * e + groups * seen * e
    return common + local + (4 if e == 4 else 8) * queries * size


def update_memory(model: Footprint, update: UpdateShape) -> UpdateMemory:
    """Of one micro-batch, all of whose rows are as long as the longest."""
    tokens, called = (
        update.rows * update.length,
        min(update.rows, update.rows_per_call) * update.length,
    )
    e, of_layer = model.itemsize, layer_bytes_per_token(model, update.sizes, update.on_gpu)
    kept = model.hidden * e if update.checkpointing else of_layer
    last_norm = 8 * model.hidden
    held = tokens * (model.shape.num_layers * kept + last_norm)
    # gradients of the MLP's inner states and of the residual stream
    working = called * (2 * model.intermediate * e + 2 * model.hidden * e)
    layer = working + (called * of_layer if update.checkpointing else 0)
    tile: float = min(called, TILE_TOKENS) * TILE_ENTRIES * e
    if not update.on_gpu:
        tile += CPU_TILES * 4 * min(called, TILE_TOKENS) * min(model.vocabulary, TILE_ENTRIES)
    logits = tile + called * model.hidden * (4 + e)
    return UpdateMemory(int(held), int(layer), int(logits))


PROMPT_TOKENS = 1024  # room for a prompt, as in the paper: 8,192 less 7,168
UPDATE_SHARE = 0.2  # of a GPU's peak rate that an update reaches
CPU_FLOPS = 1e11  # operations/s of an update on a CPU


@dataclass(frozen=True)
class Rates:
    """Tokens/s of one process: of its rollouts, and of forward and backward."""

    rollout: float
    update: float


@dataclass(frozen=True)
class Machine:
    """Where a run is planned for:

    ``processes`` with a ``card`` each, of which ``free`` bytes are free, or on a CPU.
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
        assumed rates. problems, tokens: of the curriculum, and of its mean output; None if it is
        not there or does not say.
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
        """Of a completion: as the curriculum has it, else assumed."""
        longest = self.args.max_completion_length or 0
        return MEAN_LENGTH * longest if self.tokens is None else min(self.tokens, longest)

    @property
    def _processes_of_args(self) -> int:
        """How many processes the arguments count with: without ``prompts_per_step`` a step has as
        many for each.
        """
        return (
            self.machine.processes
            if self.args.prompts_per_step is not None
            else self.args.world_size
        )

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
        if self.args.max_steps > 0 or self.problems is None:
            return self.args.max_steps if self.args.max_steps > 0 else None
        prompts = self.samples // (self.args.num_generations or 1)
        return math.ceil(
            self.args.num_train_epochs * ((self.problems - self.settings.held_out) // prompts)
        )

    @property
    def rates(self) -> Rates | None:
        """Assumed, of one process; None for a model that none are assumed for."""
        if self.footprint is None or self.settings.model in BUILT_IN:
            return None
        card, rows = self.machine.card, self.settings.rollout_rows or 1
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
        """Of a step: its rollout, and its update if all groups have spread."""
        tokens = self.samples * self.mean_tokens
        return tokens / (rates.rollout * self.sampling), tokens / (
            rates.update * self.machine.processes
        )

    @property
    def own_weights(self) -> int:
        """Bytes of the trainer's weights on one GPU."""
        return 0 if self.footprint is None else self.footprint.weights // self.shards

    @property
    def engine_weights(self) -> int:
        """Bytes of vLLM's copy, which has all weights."""
        return (
            self.footprint.weights
            if self.footprint is not None and self.settings.rollout == "vllm"
            else 0
        )

    def update(self, rows: int, checkpointing: bool) -> UpdateMemory:
        """Memory of forward and backward of ``rows`` rows of the greatest length, besides the
        weights.
        """
        assert self.footprint is not None
        sizes, alone = (
            LocalSizes(self.settings.sink, self.settings.window),
            self.machine.processes == 1,
        )
        together = min(rows, self.settings.forward_rows) if alone else rows
        on_gpu = self.machine.card is not None
        return update_memory(
            self.footprint,
            UpdateShape(rows, self.positions, together, sizes, checkpointing, on_gpu),
        )

    def engine(self) -> str:
        """What samples, with what."""
        settings = self.settings
        memory = (
            f" and {settings.rollout_kv_gib:.1f} GiB of KV" if settings.rollout == "vllm" else ""
        )
        short = f"; the GPU is too small by about {self.lacking:.0f} GiB" if self.lacking else ""
        why = f" ({self.why})" if self.why else ""
        rows = (
            "" if settings.rollout == "vllm-server" else f", {settings.rollout_rows} rows at once"
        )
        return f"{NAMES[settings.rollout]}{why}{rows}{memory}{short}"

    def line(self) -> str:
        """What a run prints before it begins."""
        line = f"rollouts through {self.engine()}"
        if self.rates is None:
            return line
        return f"{line}: {self.time(self.rates)}; every step prints the measured time that is left"

    def announced(self) -> RLKVSettings:
        """The chosen settings, after that line has been printed by the main process."""
        if self.args.process_index == 0:
            print(self.line(), flush=True)
        return self.settings

    def time(self, rates: Rates) -> str:
        """The estimate, and what it rests on."""
        seconds = sum(self.seconds(rates))
        total = "" if self.steps is None else f" and {rough(self.steps * seconds)} in all"
        where = "a GPU" if self.machine.card is not None else "this CPU"
        return (
            f"about {rough(seconds)} a step{total} on {where}, if rollouts make "
            f"{rates.rollout * self.sampling:,.0f} "
            f"tokens/s, updates {rates.update * self.machine.processes:,.0f} (assumed, not "
            "measured) and a "
            f"completion takes {self.mean_tokens:,.0f} tokens"
        )


def make_plan(
    settings: RLKVSettings,
    args: GateTrainingArguments,
    machine: Machine,
    prompt_tokens: int = PROMPT_TOKENS,
) -> Plan:
    """Choose the engine and the sizes of the rollouts for ``machine``; ``prompt_tokens``: of the
    longest prompt.
    """
    footprint = None if settings.model in BUILT_IN else footprint_on(settings, args, machine)
    problems, tokens = _curriculum_facts(settings.curriculum)
    positions = prompt_tokens + (args.max_completion_length or 0)
    shards = machine.processes if is_sharded(args) else 1
    return _with_engine(
        Plan(settings, args, machine, "", footprint, problems, tokens, positions, shards=shards)
    )


def footprint_on(
    settings: RLKVSettings, args: GateTrainingArguments, machine: Machine
) -> Footprint | None:
    """Of the model in the dtype that it has there."""
    device = args.device if machine.card is None else torch.device("cuda")
    return Footprint.of(settings.model, dtype_name(settings.dtype, device))


def _with_engine(plan: Plan) -> Plan:
    settings, args, machine, footprint = plan.settings, plan.args, plan.machine, plan.footprint
    kv_gib, rows, lacking, free = settings.rollout_kv_gib, settings.rollout_rows, 0.0, machine.free
    gated = None if footprint is None else footprint.architecture
    rollout, why = choose_engine(settings.rollout, free is not None, gated)
    if footprint is not None and free is not None and rollout != "vllm-server":
        row = plan.positions * footprint.kv_per_token
        update = plan.update(args.per_device_train_batch_size, args.gradient_checkpointing).peak
        room = int(USABLE * free) - plan.own_weights - update
        if rollout == "vllm":
            # its copy has all weights, its KV stays while the gates are updated, and so do its
            # graphs
            beside = room - footprint.weights - int(ENGINE_GIB * GIB)
            if settings.rollout == "auto" and footprint.lacking(beside, plan.positions):
                rollout, why = "hf", "two copies of the weights leave no room for KV"
            else:
                room = beside
        samples = plan.own_samples
        kv_gib = max(min(room, samples * row), row) / GIB if kv_gib is None else kv_gib
        most = min(samples, DEFAULT_ROWS) if rollout == "hf" else samples
        rows = rows or footprint.rows(
            rollout, int(kv_gib * GIB) if rollout == "vllm" else room, plan.positions, most
        )
        lacking = footprint.lacking(room, plan.positions)
    kv_gib = (kv_gib or DEFAULT_KV_GIB) if rollout == "vllm" else None
    chosen = replace(
        settings, rollout=rollout, rollout_rows=rows or DEFAULT_ROWS, rollout_kv_gib=kv_gib
    )
    return replace(plan, settings=chosen, why=why, lacking=lacking)


def _curriculum_facts(path: str | None) -> tuple[int | None, float | None]:
    """``(problems, mean output tokens)`` as far as they are known."""
    if path is None or not Path(path).is_file():
        return None, None
    rows = read_curriculum(path)
    lengths = [row["output_tokens"] for row in rows if row.get("output_tokens")]
    return len(rows), sum(lengths) / len(lengths) if lengths else None


GRAPHS = ENGINE_GIB * GIB
UNITS = ((GIB, "GiB"), (2**20, "MiB"))


def describe_plan(
    settings: RLKVSettings, args: GateTrainingArguments, prompt_tokens: int = PROMPT_TOKENS
) -> str:
    """Return what ``--plan`` prints; ``prompt_tokens``: of the longest prompt.

    Raises:
        ValueError: if ``plan_gpus`` names none that is known.
    """
    with not_loading():
        machine, name = _machine(settings, args)
        plan = make_plan(settings, args, machine, prompt_tokens)
        if plan.footprint is None:
            plan = replace(plan, footprint=footprint_on(settings, args, machine))
    where = "this CPU" if machine.card is None else f"{machine.processes} x {name}"
    lines = {
        **dict(_run(plan)),
        **dict(_resources(plan, where)),
        "gates": f"{args.output_dir}/gates.pt",
    }
    return "\n".join(f"{name:<11}{text}" for name, text in lines.items())


def _machine(settings: RLKVSettings, args: GateTrainingArguments) -> tuple[Machine, str]:
    """What is planned for, and the name of its GPUs: what ``plan_gpus`` names, what is here, else
    one of a default.
    """
    here = card_of(args.device)
    if settings.plan_gpus is not None:
        processes, name = parse_gpus(settings.plan_gpus)
        return Machine(processes, CARDS[name], int(CARDS[name].memory * GIB)), name
    if here is not None:
        return Machine(args.world_size, here, free_memory(args.device)), torch.cuda.get_device_name(
            args.device
        )
    if settings.model in BUILT_IN:
        return Machine(args.world_size, None, None), ""
    return Machine(args.world_size, CARDS[DEFAULT], int(CARDS[DEFAULT].memory * GIB)), DEFAULT


def _run(plan: Plan) -> Iterator[tuple[str, str]]:
    """What the run does, whatever it runs on."""
    settings, args, model = plan.settings, plan.args, plan.footprint
    shape = ""
    if model is not None:
        layers, heads = model.shape.num_layers, model.shape.num_kv_heads
        shape = f": {layers} layers x {heads} KV heads, {model.parameters:.3g} parameters"
    yield "model", settings.model + shape
    absent = settings.curriculum is not None and plan.problems is None
    curriculum = settings.curriculum or "problems of the built-in task"
    yield (
        "curriculum",
        curriculum + (f" (absent: {settings.filter_command()} writes it)" if absent else ""),
    )
    total = None if plan.steps is None else plan.steps * plan.samples
    of_all = f", {total:,} in all" if total else ""
    yield (
        "steps",
        f"{plan.steps or 'as the curriculum has it'}, {plan.samples} completions each{of_all}",
    )
    source = "the mean of the curriculum" if plan.tokens is not None else "assumed"
    of_all = f", {total * plan.mean_tokens / 1e6:,.1f} million in all" if total else ""
    yield (
        "tokens",
        f"at most {args.max_completion_length:,} a completion, {plan.mean_tokens:,.0f} on average "
        f"({source}){of_all}",
    )
    yield "engine", plan.engine()


def _resources(plan: Plan, where: str) -> Iterator[tuple[str, str]]:
    """Memory and time."""
    model, args, settings, machine = plan.footprint, plan.args, plan.settings, plan.machine
    if model is None:
        return
    rows, checkpointing = args.per_device_train_batch_size, args.gradient_checkpointing
    kv, engine = settings.rollout_kv_gib, plan.engine_weights
    of_rows = plan.positions * model.kv_per_token * (settings.rollout_rows or 1)
    rollout = COPIES * of_rows if settings.rollout == "hf" else of_rows if kv is None else kv * GIB
    if settings.rollout == "vllm-server":
        rollout = 0  # on its own GPU
    update = plan.update(rows, checkpointing).peak
    other = plan.update(rows, not checkpointing).peak
    # vLLM keeps its KV while the gates are updated; transformers frees it
    peak = plan.own_weights + (
        engine + GRAPHS + rollout + update if engine else max(rollout, update)
    )
    copy = (
        f", {_size(engine)} of vLLM's copy and {_size(GRAPHS)} for its graphs and activations "
        "(assumed)"
        if engine
        else ""
    )
    kv_words = f", up to {_size(rollout)} of KV for {settings.rollout_rows} rows" if rollout else ""
    free = "" if machine.free is None else f" of {_size(machine.free)} free"
    yield "machine", where
    yield (
        "memory",
        f"{_size(peak)}{free}: {_size(plan.own_weights)} of weights{copy}{kv_words}, "
        f"{_size(update)} for the update",
    )
    words = ("without", "with") if checkpointing else ("with", "without")
    yield (
        "update",
        f"{rows} x {plan.positions:,} tokens at once, {words[1]} gradient checkpointing; "
        f"{words[0]} it would take "
        f"{_size(other)}" + _largest(plan, rollout if engine else 0),
    )
    yield "serving", _serving(plan, model)
    if plan.rates is not None:
        rollout_s, update_s = plan.seconds(plan.rates)
        yield (
            "time",
            f"{plan.time(plan.rates)}; of a step {rough(rollout_s)} are rollout, {rough(update_s)} "
            "update",
        )


def _largest(plan: Plan, kv: float) -> str:
    """The most rows whose update fits, with and without checkpointing."""
    free = plan.machine.free
    if free is None:
        return ""
    room = USABLE * free - plan.own_weights - kv
    if plan.engine_weights:
        room -= plan.engine_weights + GRAPHS
    samples = max(1, plan.samples // plan.machine.processes)
    most = {
        checkpointing: max(
            (n for n in range(1, samples + 1) if plan.update(n, checkpointing).peak <= room),
            default=0,
        )
        for checkpointing in (False, True)
    }
    return f"; the most rows that fit: {most[False]} without, {most[True]} with"


def _serving(plan: Plan, model: Footprint) -> str:
    """KV of one text of mean length by sparsity."""
    settings, shape = plan.settings, model.shape
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
    unit, name = UNITS[0] if number >= GIB else UNITS[1]
    return f"{number / unit:.{1 if number < 100 * unit else 0}f} {name}"
