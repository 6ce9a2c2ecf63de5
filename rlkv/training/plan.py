"""What a training takes, said before anything is loaded: the engine, sizes that fit the GPU, time; and ``--plan``.

The rates and reserves are assumptions (see :mod:`rlkv.rollout.estimate`); every step of a run prints what was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from rlkv.data.deepscaler import read_curriculum
from rlkv.models.builtin import BUILT_IN
from rlkv.models.loading import resolve_dtype
from rlkv.rollout.estimate import DEFAULT_KV_GIB, GIB, MEAN_LENGTH, NAMES, Footprint, free_memory, rough
from rlkv.training.config import DEFAULT_ROWS, GateTrainingArguments, RLKVSettings
from rlkv.vllm.choice import choose_engine

PROMPT_TOKENS = 1024  # room for a prompt, as in the paper: 8,192 less 7,168
TRAINER_GIB = 16.0  # forward and backward of one row of 8,192 tokens, with gradient checkpointing
GPU_FLOPS, CPU_FLOPS = 2e14, 1e11  # floating-point operations/s of the update: 6 per parameter and token
PLANNED_GPU = 80 * GIB  # what --plan counts with where there is no GPU


@dataclass(frozen=True)
class Plan:
    """What a run takes.

    Attributes:
        settings: with the engine, rows and memory of its rollouts chosen.
        why: why the engine is not vLLM; empty if it is, or was asked for.
        footprint: None for a model whose shape is not known, and for built-in ones, for which the rates mean nothing.
        problems, tokens: of the curriculum, and of its mean output; None if it is not there or does not say.
        lacking: GiB that the GPU is too small by; 0 if all fits.
    """

    settings: RLKVSettings
    args: GateTrainingArguments
    why: str
    footprint: Footprint | None
    has_gpu: bool
    problems: int | None
    tokens: float | None
    lacking: float

    @property
    def completions(self) -> int:
        """Of one optimizer step."""
        args = self.args
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size

    @property
    def mean_tokens(self) -> float:
        """Of a completion: as the curriculum has it, else assumed."""
        longest = self.args.max_completion_length or 0
        return MEAN_LENGTH * longest if self.tokens is None else min(self.tokens, longest)

    @property
    def steps(self) -> int | None:
        """Optimizer steps; None if they follow from a curriculum that is not there."""
        if self.args.max_steps > 0 or self.problems is None:
            return self.args.max_steps if self.args.max_steps > 0 else None
        prompts = self.completions // (self.args.num_generations or 1)
        return math.ceil(self.args.num_train_epochs * (self.problems // prompts))

    @property
    def rate(self) -> float:
        """Assumed tokens/s of the rollouts of all processes."""
        assert self.footprint is not None
        engine, processes = self.settings.rollout, self.args.world_size
        rate = self.footprint.rate(engine, self.settings.rollout_rows or 1, self.has_gpu, mixed=True)
        return rate * processes if engine == "hf" else rate

    @property
    def step_seconds(self) -> float:
        """Assumed time of a step, rollout and update."""
        assert self.footprint is not None
        tokens, flops = (
            self.completions * self.mean_tokens,
            (GPU_FLOPS if self.has_gpu else CPU_FLOPS) * self.args.world_size,
        )
        return tokens / self.rate + 6 * self.footprint.parameters * tokens / flops

    def engine(self) -> str:
        """What samples, with what."""
        settings = self.settings
        memory = f" and {settings.rollout_kv_gib:.1f} GiB of KV" if settings.rollout == "vllm" else ""
        short = f"; the GPU is too small by about {self.lacking:.0f} GiB" if self.lacking else ""
        why = f" ({self.why})" if self.why else ""
        return f"{NAMES[settings.rollout]}{why}, {settings.rollout_rows} rows at once{memory}{short}"

    def line(self) -> str:
        """What a run prints before it begins."""
        line = f"rollouts through {self.engine()}"
        if self.footprint is None:
            return line
        return f"{line}: {self.time()}; every step prints the measured time that is left"

    def announced(self) -> RLKVSettings:
        """The chosen settings, after that line has been printed by the main process."""
        if self.args.process_index == 0:
            print(self.line(), flush=True)
        return self.settings

    def time(self) -> str:
        """The estimate, and what it assumes."""
        total = "" if self.steps is None else f" and {rough(self.steps * self.step_seconds)} in all"
        where = "a GPU" if self.has_gpu else "this CPU"
        return (
            f"about {rough(self.step_seconds)} a step{total} on {where}, if rollouts make {self.rate:,.0f} tokens/s "
            f"and a completion takes {self.mean_tokens:,.0f} tokens (assumed, not measured)"
        )


def make_plan(settings: RLKVSettings, args: GateTrainingArguments, free: int | None) -> Plan:
    """For a GPU with ``free`` bytes; None: for a CPU."""
    kv_gib, rows, lacking = settings.rollout_kv_gib, settings.rollout_rows, 0.0
    dtype = str(resolve_dtype(settings.dtype, args.device)).removeprefix("torch.")
    footprint = None if settings.model in BUILT_IN else Footprint.of(settings.model, dtype)
    gated = None if footprint is None else footprint.architecture
    rollout, why = choose_engine(settings.rollout, free is not None, args.world_size, gated)
    if footprint is not None and free is not None and rollout != "vllm-server":
        positions = PROMPT_TOKENS + (args.max_completion_length or 0)
        row = positions * footprint.kv_per_token
        room = footprint.kv_room(free, TRAINER_GIB, copies=1 if rollout == "hf" else 2)  # vLLM brings its own weights
        if settings.rollout == "auto" and rollout == "vllm" and footprint.lacking(room, positions):
            rollout, why = "hf", "two copies of the weights leave no room for KV"
            room = footprint.kv_room(free, TRAINER_GIB)
        kv_gib = max(room, row) / GIB if kv_gib is None else kv_gib
        samples = (args.generation_batch_size or DEFAULT_ROWS) // args.world_size
        most = min(samples, DEFAULT_ROWS) if rollout == "hf" else samples
        rows = rows or footprint.rows(rollout, int(kv_gib * GIB) if rollout == "vllm" else room, positions, most)
        lacking = footprint.lacking(room, positions)
    kv_gib = (kv_gib or DEFAULT_KV_GIB) if rollout == "vllm" else None
    chosen = replace(settings, rollout=rollout, rollout_rows=rows or DEFAULT_ROWS, rollout_kv_gib=kv_gib)
    problems, tokens = _curriculum_facts(settings.curriculum)
    return Plan(chosen, args, why, footprint, free is not None, problems, tokens, lacking)


def _curriculum_facts(path: str | None) -> tuple[int | None, float | None]:
    """``(problems, mean output tokens)`` as far as they are known."""
    if path is None or not Path(path).is_file():
        return None, None
    rows = read_curriculum(path)
    lengths = [row["output_tokens"] for row in rows if row.get("output_tokens")]
    return len(rows), sum(lengths) / len(lengths) if lengths else None


def describe_plan(settings: RLKVSettings, args: GateTrainingArguments) -> str:
    """The page of ``--plan``, for the GPU that is here or else for one of 80 GiB."""
    free = free_memory(args.device)
    plan = make_plan(settings, args, free or PLANNED_GPU)
    settings, footprint = plan.settings, plan.footprint
    total = None if plan.steps is None else plan.steps * plan.completions
    source = "the mean of the curriculum" if plan.tokens is not None else "assumed"
    curriculum = settings.curriculum or "problems of the built-in task"
    absent = settings.curriculum is not None and plan.problems is None
    lines = {
        "model": settings.model,
        "curriculum": curriculum + (f" (absent: {settings.filter_command()} writes it)" if absent else ""),
        "steps": f"{plan.steps or 'as the curriculum has it'}, {plan.completions} completions each"
        + (f", {total:,} in all" if total else ""),
        "tokens": f"at most {args.max_completion_length:,} a completion, {plan.mean_tokens:,.0f} on average ({source})"
        + (f", {total * plan.mean_tokens / 1e6:,.1f} million in all" if total else ""),
        "engine": plan.engine(),
    }
    if footprint is not None:
        shape, row = footprint.shape, (PROMPT_TOKENS + (args.max_completion_length or 0)) * footprint.kv_per_token
        lines["model"] += f": {shape.num_layers} layers x {shape.num_kv_heads} KV heads, {footprint.parameters:.3g} "
        lines["model"] += "parameters"
        copies = ", a second copy for vLLM" if settings.rollout == "vllm" else ""
        lines["memory"] = (
            f"{footprint.weights / GIB:.1f} GiB of weights{copies}; {TRAINER_GIB:.0f} GiB for the update (assumed); "
            f"{row / GIB:.2f} GiB of KV for the longest row"
        )
        lines["GPU"] = f"{free / GIB:.0f} GiB free" if free else f"none here: planned for {PLANNED_GPU / GIB:.0f} GiB"
        lines["time"] = plan.time()
    lines["gates"] = f"{args.output_dir}/gates.pt"
    return "\n".join(f"{name:<11}{text}" for name, text in lines.items())
