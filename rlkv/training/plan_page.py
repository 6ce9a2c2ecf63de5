"""The page of ``--plan``: what a run takes where it is started, or on the GPUs that ``--plan_gpus`` names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from rlkv.cache.accounting import EntrySize, kv_nbytes
from rlkv.cache.plan import CacheSettings
from rlkv.gates.allocation import SPARSITIES, HeadAllocation
from rlkv.models.builtin import BUILT_IN
from rlkv.models.loading import load_tokenizer
from rlkv.rollout.cards import CARDS, DEFAULT, card_of, parse_gpus
from rlkv.rollout.estimate import COPIES, ENGINE_GIB, GIB, USABLE, Footprint, free_memory, rough
from rlkv.training.config import GateTrainingArguments, RLKVSettings
from rlkv.training.plan import PROMPT_TOKENS, Machine, Plan, footprint_on, make_plan
from rlkv.training.problems import load_curriculum, longest_prompt
from rlkv.training.sharding import not_loading

GRAPHS = ENGINE_GIB * GIB
UNITS = ((GIB, "GiB"), (2**20, "MiB"))


def describe_plan(settings: RLKVSettings, args: GateTrainingArguments) -> str:
    """Return the page.

    Raises:
        ValueError: if ``plan_gpus`` names none that is known.
    """
    with not_loading():
        machine, name = _machine(settings, args)
        plan = make_plan(settings, args, machine, _prompt_tokens(settings, args))
        if plan.footprint is None:
            plan = replace(plan, footprint=footprint_on(settings, args, machine))
    where = "this CPU" if machine.card is None else f"{machine.processes} x {name}"
    lines = {**dict(_run(plan)), **dict(_resources(plan, where)), "gates": f"{args.output_dir}/gates.pt"}
    return "\n".join(f"{name:<11}{text}" for name, text in lines.items())


def _machine(settings: RLKVSettings, args: GateTrainingArguments) -> tuple[Machine, str]:
    """What is planned for, and the name of its GPUs: what ``plan_gpus`` names, what is here, else one of a default."""
    here = card_of(args.device)
    if settings.plan_gpus is not None:
        processes, name = parse_gpus(settings.plan_gpus)
        return Machine(processes, CARDS[name], int(CARDS[name].memory * GIB)), name
    if here is not None:
        return Machine(args.world_size, here, free_memory(args.device)), torch.cuda.get_device_name(args.device)
    if settings.model in BUILT_IN:
        return Machine(args.world_size, None, None), ""
    return Machine(args.world_size, CARDS[DEFAULT], int(CARDS[DEFAULT].memory * GIB)), DEFAULT


def _prompt_tokens(settings: RLKVSettings, args: GateTrainingArguments) -> int:
    """Of the longest prompt, where tokenizer and problems are at hand."""
    if settings.model not in BUILT_IN:
        return PROMPT_TOKENS
    try:
        return longest_prompt(load_curriculum(settings, args), load_tokenizer(settings.model))
    except ValueError:  # no curriculum yet
        return PROMPT_TOKENS


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
    yield "curriculum", curriculum + (f" (absent: {settings.filter_command()} writes it)" if absent else "")
    total = None if plan.steps is None else plan.steps * plan.samples
    of_all = f", {total:,} in all" if total else ""
    yield "steps", f"{plan.steps or 'as the curriculum has it'}, {plan.samples} completions each{of_all}"
    source = "the mean of the curriculum" if plan.tokens is not None else "assumed"
    of_all = f", {total * plan.mean_tokens / 1e6:,.1f} million in all" if total else ""
    yield (
        "tokens",
        f"at most {args.max_completion_length:,} a completion, {plan.mean_tokens:,.0f} on average ({source}){of_all}",
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
    peak = plan.own_weights + (engine + GRAPHS + rollout + update if engine else max(rollout, update))
    copy = (
        f", {_size(engine)} of vLLM's copy and {_size(GRAPHS)} for its graphs and activations (assumed)"
        if engine
        else ""
    )
    kv_words = f", up to {_size(rollout)} of KV for {settings.rollout_rows} rows" if rollout else ""
    free = "" if machine.free is None else f" of {_size(machine.free)} free"
    yield "machine", where
    yield (
        "memory",
        f"{_size(peak)}{free}: {_size(plan.own_weights)} of weights{copy}{kv_words}, {_size(update)} for the update",
    )
    words = ("without", "with") if checkpointing else ("with", "without")
    yield (
        "update",
        f"{rows} x {plan.positions:,} tokens at once, {words[1]} gradient checkpointing; {words[0]} it would take "
        f"{_size(other)}" + _largest(plan, rollout if engine else 0),
    )
    yield "serving", _serving(plan, model)
    if plan.rates is not None:
        rollout_s, update_s = plan.seconds(plan.rates)
        yield "time", f"{plan.time(plan.rates)}; of a step {rough(rollout_s)} are rollout, {rough(update_s)} update"


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
        checkpointing: max((n for n in range(1, samples + 1) if plan.update(n, checkpointing).peak <= room), default=0)
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
