"""Plan of a training, before anything is loaded: engine, sizes that fit, memory and time.

Rates and reserves are assumptions (see :mod:`rlkv.rollout.footprint`) that measurements of other
machines bear out; every step of a run prints what it took.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset

from rlkv.attention.branches import MIN_BLOCK
from rlkv.attention.call import LocalSizes
from rlkv.cache.accounting import KVSizes, kv_nbytes
from rlkv.cache.plan import CacheSettings
from rlkv.data.problems import hold_out, read_curriculum
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
from rlkv.training.config import DEFAULT_ROWS, GateTrainingArguments, RLKVSettings, passes
from rlkv.training.sharding import is_sharded, not_loading
from rlkv.vllm.plugin import choose_engine

PROMPT_TOKENS = 1024  # room for a prompt, as in the paper: 8,192 less 7,168
UPDATE_SHARE = 0.33  # of a GPU's peak rate that an update reaches: an H100's, 3,000 tokens and more
# operations/s of a CPU thread in an update, by bytes of an element: a model of 1.5B in bfloat16
CPU_FLOPS = {2: 4e11, 4: 8e10}
GRAPHS = ENGINE_GIB * GIB  # vLLM's graphs and activations
# trl computes log-probabilities from tiles of logits: this many tokens and vocabulary entries
TILE_TOKENS = 4096
TILE_ENTRIES = 32768
CPU_TILES = 7.25  # float32 tiles that its CPU form makes besides


# --- memory of an update


def update_memory(
    model: Footprint,
    rows: int,
    length: int,
    rows_per_call: int,
    sizes: LocalSizes,
    checkpointing: bool = False,
    on_gpu: bool = False,
) -> int:
    """Return the peak bytes of one micro-batch besides the weights.

    Args:
        rows, length: all rows are as long as the longest.
        rows_per_call: rows of one forward.
    """
    tokens = rows * length
    called = min(rows, rows_per_call) * length
    size = model.itemsize
    of_layer = _layer_bytes_per_token(model, sizes, on_gpu)
    kept = model.hidden * size if checkpointing else of_layer
    last_norm = 8 * model.hidden
    held = tokens * (model.shape.num_layers * kept + last_norm)
    # gradients of the MLP's inner states and of the residual stream
    layer: float = called * (2 * model.intermediate * size + 2 * model.hidden * size)
    if checkpointing:
        layer += called * of_layer
    tile: float = min(called, TILE_TOKENS) * TILE_ENTRIES * size
    if not on_gpu:
        tile += CPU_TILES * 4 * min(called, TILE_TOKENS) * min(model.vocabulary, TILE_ENTRIES)
    logits = tile + called * model.hidden * (4 + size)
    # the output layer and the last layer that is recomputed are never there together
    return int(held + max(layer, logits))


def _layer_bytes_per_token(model: Footprint, sizes: LocalSizes, on_gpu: bool) -> float:
    """Return what a layer holds of a token for its backward pass."""
    kv = model.shape.num_kv_heads
    width = model.shape.head_dim
    queries = model.shape.num_query_heads
    size = model.itemsize
    log_sums = 4 * queries
    states = (2 * queries + 2 * kv) * width * size
    common = 8 * model.hidden + 3 * model.intermediate * size + states + log_sums
    if on_gpu:
        wide = 0 if size == 4 else 8 * queries * width
        return common + queries * width * size + log_sums + wide
    block = max(sizes.window, MIN_BLOCK)
    seen = sizes.sink + sizes.window + block
    local = (2 * queries + 2 * kv * seen / block) * width * size + queries / kv * seen * size
    return common + local + (4 if size == 4 else 8) * queries * width


# --- the plan


@dataclass(frozen=True)
class Machine:
    """The machine a run is planned for: ``processes`` with a ``card`` each, or a CPU.

    Attributes:
        free: bytes that are free on each card.
        name: of the cards.
    """

    processes: int
    card: Card | None
    free: int | None
    name: str = ""


@dataclass(frozen=True)
class Plan:
    """Memory and time that a run takes.

    Attributes:
        settings: with the engine, rows and memory of its rollouts chosen.
        footprint: None for a model whose shape is not known.
        problems: to train on; None if the curriculum is not there.
        tokens: of its mean output; None if it is not there or does not say.
        positions: tokens of the longest prompt and completion.
        why: why the engine is not vLLM; empty if it is, or was asked for.
        lacking: GiB that the GPU is too small by; 0 if all fits.
    """

    settings: RLKVSettings
    args: GateTrainingArguments
    machine: Machine
    footprint: Footprint | None
    problems: int | None
    tokens: float | None
    positions: int
    why: str = ""
    lacking: float = 0.0

    @property
    def mean_tokens(self) -> float:
        """Tokens of a completion: as the curriculum has it, else assumed."""
        longest = self.args.max_completion_length
        return MEAN_LENGTH * longest if self.tokens is None else min(self.tokens, longest)

    @property
    def samples(self) -> int:
        """Completions of an optimizer step over all processes."""
        whole = self.args.samples_per_step
        if self.args.prompts_per_step is not None:
            return whole
        return whole // self.args.world_size * self.machine.processes

    @property
    def steps(self) -> int | None:
        """Optimizer steps; None if they follow from a curriculum that is not there."""
        args = self.args
        if args.max_steps > 0:
            return args.max_steps
        if self.problems is None:
            return None
        group = args.num_generations
        own = of_step = args.gradient_accumulation_steps  # passes, in as many processes as now
        if args.prompts_per_step is not None:
            at_once = args.per_device_train_batch_size * self.machine.processes
            of_step = passes(args.prompts_per_step, group, at_once)
        of_rollout = args.steps_per_generation
        if of_rollout == own:  # a rollout for each step, as trl has it by default
            of_rollout = of_step
        prompts = self.samples * of_rollout // of_step // group
        rollouts = self.problems // prompts
        of_epoch = math.ceil(rollouts * of_rollout * args.num_iterations / of_step)
        return math.ceil(args.num_train_epochs * of_epoch)

    @property
    def rates(self) -> tuple[float, float] | None:
        """Assumed tokens/s of rollouts and of updates; None where nothing is assumed."""
        model = self.footprint
        settings = self.settings
        if model is None or settings.model in BUILT_IN:
            return None
        card = self.machine.card
        rows = settings.rollout_rows or 1
        rollout = model.rate(settings.rollout, rows, card, self.mean_tokens)
        served = settings.rollout == "vllm-server"
        sampling = len(settings.servers) if served else self.machine.processes
        if card is not None:
            flops = UPDATE_SHARE * card.flops
        else:
            flops = CPU_FLOPS[model.itemsize] * torch.get_num_threads()
        # the weights are frozen: backward makes no gradients of theirs
        operations = 6 if self.args.gradient_checkpointing else 4
        update = flops / (operations * model.parameters)
        return rollout * sampling, update * self.machine.processes

    @property
    def seconds(self) -> list[float]:
        """Seconds of a step's share of its rollout, and of its update if all groups have spread."""
        if self.rates is None:
            return []
        tokens = self.samples * self.mean_tokens
        rollout, update = self.rates
        return [tokens / rollout / self.args.num_iterations, tokens / update]

    @property
    def own_weights(self) -> int:
        """Bytes of the trainer's weights on one GPU; vLLM's copy is always whole."""
        if self.footprint is None:
            return 0
        return self.footprint.weights // (self.machine.processes if is_sharded(self.args) else 1)

    def update(self, checkpointing: bool) -> int:
        """Return the peak bytes of a micro-batch whose rows all have the greatest length."""
        assert self.footprint is not None
        rows = self.args.per_device_train_batch_size
        # under DDP every process makes one forward for all of its rows
        alone = self.machine.processes == 1
        return update_memory(
            self.footprint,
            rows=rows,
            length=self.positions,
            rows_per_call=self.settings.forward_rows if alone else rows,
            sizes=LocalSizes(self.settings.sink, self.settings.window),
            checkpointing=checkpointing,
            on_gpu=self.machine.card is not None,
        )

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
            text += f"; the GPU is too small by about {self.lacking:.1f} GiB"
        return text

    def time(self) -> str:
        """Say how long a step takes, and what that rests on, where rates are assumed."""
        assert self.rates is not None
        rollout, update = self.rates
        step = sum(self.seconds)
        total = "" if self.steps is None else f" and {rough(self.steps * step)} in all"
        where = "a GPU" if self.machine.card is not None else "this CPU"
        return (
            f"about {rough(step)} a step{total} on {where}, if rollouts make {rollout:,.0f} "
            f"tokens/s, updates {update:,.0f} (assumed, not measured) and a completion takes "
            f"{self.mean_tokens:,.0f} tokens"
        )

    def line(self) -> str:
        """Return what a run prints before it begins."""
        line = f"rollouts through {self.engine()}"
        if self.rates is None:
            return line
        return f"{line}: {self.time()}; every step prints the measured time that is left"


def make_plan(
    settings: RLKVSettings,
    args: GateTrainingArguments,
    machine: Machine,
    rows: Sequence[dict[str, Any]] | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
) -> Plan:
    """Choose the engine and the sizes of the rollouts for ``machine``.

    Args:
        rows: of the curriculum; None if it is not there.
        prompt_tokens: of the longest prompt.

    Raises:
        ValueError: for a model that cannot have gates.
    """
    device = args.device if machine.card is None else torch.device("cuda")
    stated = [row.get("output_tokens") for row in rows or ()]
    lengths = [length for length in stated if isinstance(length, int | float) and length > 0]
    plan = Plan(
        settings=settings,
        args=args,
        machine=machine,
        footprint=Footprint.of(settings.model, dtype_name(settings.dtype, device)),
        problems=None if rows is None else _num_taught(rows, settings.held_out, args),
        tokens=fmean(lengths) if lengths else None,
        positions=prompt_tokens + args.max_completion_length,
    )
    model = plan.footprint
    if model is not None and not any(model.heads):
        raise ValueError(
            f"{model.shape.model_type} has no layer whose heads can have gates: use a model with "
            "full attention and grouped heads, such as Llama, Qwen3 or Gemma 3"
        )
    return _with_engine(plan)


def _num_taught(rows: Sequence[dict[str, Any]], held_out: int, args: GateTrainingArguments) -> int:
    """Count the problems to train on: neither held out nor the same as one that is."""
    if held_out == 0:
        return len(rows)
    prompts = Dataset.from_list([{"prompt": row["problem"]} for row in rows])
    return len(hold_out(prompts, held_out, args)[0])


def _with_engine(plan: Plan) -> Plan:
    settings = plan.settings
    args = plan.args
    model = None if settings.model in BUILT_IN else plan.footprint  # small ones fit
    free = plan.machine.free
    kv_gib = settings.rollout_kv_gib
    rows = settings.rollout_rows
    lacking = 0.0
    rollout: Any
    architecture = None if model is None else model.architecture
    rollout, why = choose_engine(settings.rollout, free is not None, architecture)
    if model is not None and free is not None and rollout != "vllm-server":
        room = int(USABLE * free) - plan.own_weights - plan.update(args.gradient_checkpointing)
        if rollout == "vllm":
            # its copy has all weights; its KV and graphs stay while the gates are updated
            left = room - model.weights - int(GRAPHS)
            if settings.rollout == "auto" and model.lacking(left, plan.positions):
                rollout = "hf"
                why = "two copies of the weights leave no room for KV"
            else:
                room = left
        whole = args.prompts_per_step is not None
        processes = plan.machine.processes if whole else args.world_size
        samples = args.generation_batch_size // processes  # of a rollout here
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
        rollout_eager=settings.rollout_eager and rollout == "vllm",
    )
    return replace(plan, settings=chosen, why=why, lacking=lacking)


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
    curriculum = settings.curriculum
    is_there = curriculum is not None and Path(curriculum).is_file()
    rows = read_curriculum(curriculum) if curriculum is not None and is_there else None
    with not_loading():
        plan = make_plan(settings, args, _machine(settings, args), rows, prompt_tokens)
    if curriculum is None and settings.model == "tiny":
        curriculum = "problems of the built-in task"
    elif curriculum is None:
        curriculum = (
            f"none: pass --curriculum FILE, which rlkv-filter --model {settings.model} writes"
        )
    elif rows is None:
        curriculum += f" (absent: {settings.filter_command()} writes it)"
    model = settings.model
    number = "as the curriculum has it" if plan.steps is None else plan.steps
    steps = f"{number}, {plan.samples} completions each"
    source = "the mean of the curriculum" if plan.tokens is not None else "assumed"
    tokens = (
        f"at most {args.max_completion_length:,} a completion, {plan.mean_tokens:,.0f} on "
        f"average ({source})"
    )
    if plan.steps:
        total = plan.steps * plan.samples
        steps += f", {total:,} in all"
        tokens += f", {total * plan.mean_tokens / 1e6:,.1f} million in all"
    resources = {}
    if plan.footprint is not None:
        shape = plan.footprint.shape
        heads = f"{shape.num_layers} layers x {shape.num_kv_heads} KV heads"
        model += f": {heads}, {plan.footprint.parameters:.3g} parameters"
        resources = _resources(plan, plan.footprint)
    lines = {
        "model": model,
        "curriculum": curriculum,
        "steps": steps,
        "tokens": tokens,
        "engine": plan.engine(),
        **resources,
    }
    if plan.rates is not None:
        rollout, update = map(rough, plan.seconds)
        lines["time"] = f"{plan.time()}; of a step {rollout} are rollout, {update} update"
    lines["gates"] = f"{args.output_dir}/gates.pt"
    return "\n".join(f"{name:<11}{text}" for name, text in lines.items())


def _machine(settings: RLKVSettings, args: GateTrainingArguments) -> Machine:
    """Return what ``plan_gpus`` names, else what is here, else one GPU of a default."""
    processes = args.world_size
    name = DEFAULT
    if settings.plan_gpus is not None:
        processes, name = parse_gpus(settings.plan_gpus)
    elif (here := card_of(args.device)) is not None:
        name = torch.cuda.get_device_name(args.device)
        return Machine(processes, here, free_memory(args.device), name)
    elif settings.model in BUILT_IN:
        return Machine(processes, None, None)
    return Machine(processes, CARDS[name], int(CARDS[name].memory * GIB), name)


def _resources(plan: Plan, model: Footprint) -> dict[str, str]:
    """Say what it runs on, and how much memory the run takes there, and its gates in use."""
    machine = plan.machine
    settings = plan.settings
    checkpointing = plan.args.gradient_checkpointing
    if settings.rollout == "vllm-server":
        kv: float = 0  # on its own GPU
    elif settings.rollout_kv_gib is not None:
        kv = settings.rollout_kv_gib * GIB
    else:
        kv = COPIES * plan.positions * model.kv_per_token * (settings.rollout_rows or 1)
    update = plan.update(checkpointing)
    parts = [f"{_size(plan.own_weights)} of weights"]
    peak = plan.own_weights + max(kv, update)
    if settings.rollout == "vllm":
        # vLLM keeps its KV while the gates are updated; transformers frees it
        peak = plan.own_weights + model.weights + GRAPHS + kv + update
        reserve = f"{_size(GRAPHS)} for its graphs and activations (assumed)"
        parts.append(f"{_size(model.weights)} of vLLM's copy and {reserve}")
    if kv:
        parts.append(f"up to {_size(kv)} of KV for {settings.rollout_rows} rows")
    parts.append(f"{_size(update)} for the update")
    of_free = "" if machine.free is None else f" of {_size(machine.free)} free"
    now, then = ("with", "without") if checkpointing else ("without", "with")
    return {
        "machine": f"{machine.processes} x {machine.name}" if machine.card else "this CPU",
        "memory": f"{_size(peak)}{of_free}: {', '.join(parts)}",
        "update": (
            f"{plan.args.per_device_train_batch_size} x {plan.positions:,} tokens at once, {now} "
            f"gradient checkpointing; {then} it would take {_size(plan.update(not checkpointing))}"
        ),
        "serving": _serving(plan, model),
    }


def _serving(plan: Plan, model: Footprint) -> str:
    """Say the KV of one text of mean length by sparsity."""
    settings = plan.settings
    shape = model.shape
    tokens = plan.positions - plan.args.max_completion_length + round(plan.mean_tokens)
    group_size = shape.num_query_heads // shape.num_kv_heads
    size = KVSizes(shape.head_dim, group_size, model.itemsize, heads=model.heads)
    places = (shape.num_layers, shape.num_kv_heads)
    kept = CacheSettings(settings.deploy_sink, settings.deploy_window)
    found = []
    for sparsity in (0.0, *SPARSITIES):
        full = HeadAllocation.random(*places, sparsity, seed=0, heads=model.heads).full
        used, _ = kv_nbytes(kept, full, size, torch.tensor([1]), torch.tensor([tokens]))
        found.append(f"{_size(int(used))} at {sparsity:g}")
    gated = " in the layers with gates" if min(model.heads) < shape.num_kv_heads else ""
    return f"KV of a text of {tokens:,} tokens{gated}: {', '.join(found)}"


def _size(number: float) -> str:
    unit, name = (GIB, "GiB") if number >= GIB else (2**20, "MiB")
    return f"{number / unit:.{1 if number < 100 * unit else 0}f} {name}"
