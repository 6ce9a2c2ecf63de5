"""What a training takes, said before anything is loaded: the engine, sizes that fit the GPU, memory and time.

Rates and reserves are assumptions (see :mod:`rlkv.rollout.estimate`); every step of a run prints what it took.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rlkv.attention import LocalSizes
from rlkv.data.deepscaler import read_curriculum
from rlkv.models.builtin import BUILT_IN
from rlkv.models.loading import dtype_name
from rlkv.rollout.cards import Card
from rlkv.rollout.estimate import DEFAULT_KV_GIB, ENGINE_GIB, GIB, MEAN_LENGTH, NAMES, USABLE, Footprint, rough
from rlkv.training.config import DEFAULT_ROWS, GateTrainingArguments, RLKVSettings
from rlkv.training.memory import UpdateMemory, UpdateShape, update_memory
from rlkv.training.sharding import is_sharded
from rlkv.vllm.choice import choose_engine

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
    """Where a run is planned for: ``processes`` with a ``card`` each, of which ``free`` bytes are free, or on a CPU."""

    processes: int
    card: Card | None
    free: int | None


@dataclass(frozen=True)
class Plan:
    """What a run takes.

    Attributes:
        settings: with the engine, rows and memory of its rollouts chosen.
        why: why the engine is not vLLM; empty if it is, or was asked for.
        footprint: None for a model whose shape is not known, and for built-in ones, which have no assumed rates.
        problems, tokens: of the curriculum, and of its mean output; None if it is not there or does not say.
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
        """How many processes the arguments count with: without ``prompts_per_step`` a step has as many for each."""
        return self.machine.processes if self.args.prompts_per_step is not None else self.args.world_size

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
        return math.ceil(self.args.num_train_epochs * ((self.problems - self.settings.held_out) // prompts))

    @property
    def rates(self) -> Rates | None:
        """Assumed, of one process; None for a model that none are assumed for."""
        if self.footprint is None or self.settings.model in BUILT_IN:
            return None
        card, rows = self.machine.card, self.settings.rollout_rows or 1
        flops = CPU_FLOPS if card is None else UPDATE_SHARE * card.flops
        rollout = self.footprint.rate(self.settings.rollout, rows, card, self.mean_tokens, mixed=True)
        return Rates(rollout, flops / (6 * self.footprint.parameters))

    @property
    def sampling(self) -> int:
        """Processes that sample."""
        is_served = self.settings.rollout == "vllm-server"
        return len(self.settings.servers) if is_served else self.machine.processes

    def seconds(self, rates: Rates) -> tuple[float, float]:
        """Of a step: its rollout, and its update if all groups have spread."""
        tokens = self.samples * self.mean_tokens
        return tokens / (rates.rollout * self.sampling), tokens / (rates.update * self.machine.processes)

    @property
    def own_weights(self) -> int:
        """Bytes of the trainer's weights on one GPU."""
        return 0 if self.footprint is None else self.footprint.weights // self.shards

    @property
    def engine_weights(self) -> int:
        """Bytes of vLLM's copy, which has all weights."""
        return self.footprint.weights if self.footprint is not None and self.settings.rollout == "vllm" else 0

    def update(self, rows: int, checkpointing: bool) -> UpdateMemory:
        """Memory of forward and backward of ``rows`` rows of the greatest length, besides the weights."""
        assert self.footprint is not None
        sizes, alone = LocalSizes(self.settings.sink, self.settings.window), self.machine.processes == 1
        together = min(rows, self.settings.forward_rows) if alone else rows
        on_gpu = self.machine.card is not None
        return update_memory(self.footprint, UpdateShape(rows, self.positions, together, sizes, checkpointing, on_gpu))

    def engine(self) -> str:
        """What samples, with what."""
        settings = self.settings
        memory = f" and {settings.rollout_kv_gib:.1f} GiB of KV" if settings.rollout == "vllm" else ""
        short = f"; the GPU is too small by about {self.lacking:.0f} GiB" if self.lacking else ""
        why = f" ({self.why})" if self.why else ""
        rows = "" if settings.rollout == "vllm-server" else f", {settings.rollout_rows} rows at once"
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
            f"about {rough(seconds)} a step{total} on {where}, if rollouts make {rates.rollout * self.sampling:,.0f} "
            f"tokens/s, updates {rates.update * self.machine.processes:,.0f} (assumed, not measured) and a "
            f"completion takes {self.mean_tokens:,.0f} tokens"
        )


def make_plan(
    settings: RLKVSettings, args: GateTrainingArguments, machine: Machine, prompt_tokens: int = PROMPT_TOKENS
) -> Plan:
    """Choose the engine and the sizes of the rollouts for ``machine``; ``prompt_tokens``: of the longest prompt."""
    footprint = None if settings.model in BUILT_IN else footprint_on(settings, args, machine)
    problems, tokens = _curriculum_facts(settings.curriculum)
    positions = prompt_tokens + (args.max_completion_length or 0)
    shards = machine.processes if is_sharded(args) else 1
    return _with_engine(Plan(settings, args, machine, "", footprint, problems, tokens, positions, shards=shards))


def footprint_on(settings: RLKVSettings, args: GateTrainingArguments, machine: Machine) -> Footprint | None:
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
            # its copy has all weights, its KV stays while the gates are updated, and so do its graphs
            beside = room - footprint.weights - int(ENGINE_GIB * GIB)
            if settings.rollout == "auto" and footprint.lacking(beside, plan.positions):
                rollout, why = "hf", "two copies of the weights leave no room for KV"
            else:
                room = beside
        samples = plan.own_samples
        kv_gib = max(min(room, samples * row), row) / GIB if kv_gib is None else kv_gib
        most = min(samples, DEFAULT_ROWS) if rollout == "hf" else samples
        rows = rows or footprint.rows(rollout, int(kv_gib * GIB) if rollout == "vllm" else room, plan.positions, most)
        lacking = footprint.lacking(room, plan.positions)
    kv_gib = (kv_gib or DEFAULT_KV_GIB) if rollout == "vllm" else None
    chosen = replace(settings, rollout=rollout, rollout_rows=rows or DEFAULT_ROWS, rollout_kv_gib=kv_gib)
    return replace(plan, settings=chosen, why=why, lacking=lacking)


def _curriculum_facts(path: str | None) -> tuple[int | None, float | None]:
    """``(problems, mean output tokens)`` as far as they are known."""
    if path is None or not Path(path).is_file():
        return None, None
    rows = read_curriculum(path)
    lengths = [row["output_tokens"] for row in rows if row.get("output_tokens")]
    return len(rows), sum(lengths) / len(lengths) if lengths else None
