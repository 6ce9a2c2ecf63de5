"""Rows of a rollout and a base too large for one GPU, shared out over the processes of a run.

Launchers shard all parameters and what the optimizer knows of them.  Here the base alone is large,
and frozen: FSDP2 or DeepSpeed ZeRO-3 shards it, and the gates, a few hundred numbers, stay whole in
every process, where DDP keeps them equal.  So gates are read, clamped, logged and saved as on one
process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from peft import PeftModel
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.integrations import deepspeed
from trl.trainer.utils import RepeatSampler

from rlkv.attention.mixed import GATE

# shards a frozen model without gates, in place; what it returns is to be called after every
# backward pass
Shard = Callable[[PreTrainedModel, Accelerator], Callable[[], None]]


# --- rows of a rollout


@dataclass(frozen=True)
class Shares:
    """Division of the rows of a rollout for sampling.

    Attributes:
        rows: of all processes.
        slots: of each process, at least its share.
    """

    rows: int
    slots: int
    processes: int

    def of(self, rank: int) -> range:
        """Return the rows of a process; shares differ by one row at most.

        The first process, which logs texts, has a row.
        """
        return range(self._before(rank), self._before(rank + 1))

    def _before(self, rank: int) -> int:
        return -(-self.rows * rank // self.processes)

    def filled(self) -> list[int]:
        """Return the slots of the rows, by row, where the slots of all processes are one list."""
        slots: list[int] = []
        for rank in range(self.processes):
            first = rank * self.slots
            slots.extend(range(first, first + len(self.of(rank))))
        return slots


class RowSampler(RepeatSampler):
    """trl's sampler of prompts, in slots, with an order that depends on (seed, epoch) alone.

    Args:
        uses: how often each rollout is asked for: once per forward and backward pass.
        epoch: returns the current one.
    """

    def __init__(self, shares: Shares, uses: int, epoch: Callable[[], int], **options: Any) -> None:
        super().__init__(**options)
        self.shares = shares
        self.uses = uses
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed((self.seed or 0) * 1_000_003 + self._epoch())
        prompts = super().__iter__()
        while rows := list(islice(prompts, self.shares.rows)):
            slots = rows[:1] * (self.shares.slots * self.shares.processes)
            for slot, index in zip(self.shares.filled(), rows, strict=True):
                slots[slot] = index
            for _ in range(self.uses):
                yield from slots

    def __len__(self) -> int:
        rollouts = super().__len__() // self.shares.rows
        return rollouts * self.shares.slots * self.shares.processes * self.uses


def gather_rows(accelerator: Any, tensors: dict[str, Tensor], shares: Shares) -> dict[str, Tensor]:
    """Gather the rows of all processes, by number, from tensors ``[slots, ...]`` of this one."""
    filled = torch.tensor(shares.filled(), device=accelerator.device)
    gathered = {}
    for name, values in tensors.items():
        if values.dim() == 2:
            left = name.startswith("prompt")  # prompts are padded on the left
            values = accelerator.pad_across_processes(values, dim=1, pad_first=left)
        gathered[name] = accelerator.gather(values)[filled]
    return gathered


def make_micro_batches(
    rows: dict[str, Tensor], parts: Sequence[Tensor], number: int, processes: int, rank: int
) -> list[dict[str, Tensor]]:
    """Deal out the rows that have a gradient, by length, and leave out those of advantage 0.

    Ranks work on rows of about the same length at the same time.  A process without a row takes the
    shortest one, with advantage 0, because every process takes part in every backward pass.

    Args:
        rows: of a whole rollout, with advantages and masks.
        parts: the rows of each optimizer step.
        number: micro-batches of a part.

    Returns:
        The micro-batches of process ``rank``, ``number`` for each part: some of the rows,
        ``mean_reward`` of all rows of the part, and as scalars how many rows and tokens of it fall
        to a micro-batch on average.
    """
    length_N = rows["prompt_mask"].sum(1) + rows["completion_mask"].sum(1)
    batches = []
    for part in parts:
        whole = {
            "mean_reward": rows["mean_reward"][part],
            "num_samples": torch.tensor(len(part) / (number * processes), device=part.device),
            "num_tokens": rows["completion_mask"][part].sum() / (number * processes),
        }
        teaching = part[rows["advantages"][part] != 0]
        teaching = teaching[length_N[teaching].argsort(descending=True, stable=True)]
        shortest = part[length_N[part].argmin()][None]
        for i in range(number):
            end = len(teaching) * (i + 1) // number
            mine = teaching[len(teaching) * i // number : end][rank::processes]
            chosen = mine if len(mine) else shortest
            batch = {name: values[chosen] for name, values in rows.items()}
            if not len(mine):
                batch["advantages"] = torch.zeros_like(batch["advantages"])
            batches.append(batch | whole)
    return batches


# --- a frozen base


def is_sharded(args: Any) -> bool:
    """Tell whether the launcher asks for sharding; to be called before :func:`take_sharding`."""
    by_deepspeed = args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3
    return by_deepspeed or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


@contextmanager
def not_loading() -> Iterator[None]:
    """Make models without ZeRO-3, which would share out those that are only looked at."""
    asked = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = asked


def load_as(dtype: str) -> None:
    """Let ZeRO-3, which shares weights out as they are loaded, keep the dtype, not float32."""
    if deepspeed.is_deepspeed_zero3_enabled():
        config = deepspeed.deepspeed_config()
        config["bf16"] = {"enabled": dtype == "bfloat16"}
        config["fp16"] = {"enabled": dtype == "float16"}


def take_sharding(args: Any) -> Shard | None:
    """Take what the launcher asked for away from it: to trl and accelerate the run is one of DDP.

    None: no sharding.

    Raises:
        ValueError: for FSDP of the first version.
    """
    if not is_sharded(args):
        return None
    if os.environ.pop("ACCELERATE_USE_FSDP", "false").lower() == "true":
        if os.environ.get("FSDP_VERSION", "1") != "2":
            raise ValueError(
                "FSDP shards in its version 2 only: set fsdp_version: 2 in the launcher's config"
            )
        return _shard_fsdp2
    plugin = args.deepspeed_plugin
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    args.deepspeed = args.deepspeed_plugin = None
    on_cpu = args.device.type == "cpu"
    args.distributed_state.distributed_type = (
        DistributedType.MULTI_CPU if on_cpu else DistributedType.MULTI_GPU
    )

    def shard(base: Any, accelerator: Accelerator) -> Callable[[], None]:
        # read after the trainer is made: as it is at the start it gives other gradients
        return _shard_zero3(base, accelerator, plugin.deepspeed_config["zero_optimization"])

    return shard


def shard_base(model: PeftModel, accelerator: Accelerator, shard: Shard) -> Callable[[], None]:
    """Share the frozen weights out, so that DDP looks at the gates alone.

    Returns what to call after a backward pass.
    """
    modules: list[Any] = [module for module in model.modules() if hasattr(module, GATE)]
    gates = [getattr(module, GATE) for module in modules]
    for module in modules:
        delattr(module, GATE)
    base: Any = model.get_base_model()
    release = shard(base, accelerator)
    for module, gate in zip(modules, gates, strict=True):
        setattr(module, GATE, gate.to(accelerator.device))
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)
    return release


def _shard_fsdp2(base: PreTrainedModel, accelerator: Accelerator) -> Callable[[], None]:
    plugin = FullyShardedDataParallelPlugin()  # as the launcher's variables say
    if plugin.activation_checkpointing:
        raise ValueError(
            "fsdp_activation_checkpointing is not supported: use --gradient-checkpointing instead"
        )
    accelerator.state.fsdp_plugin = plugin
    fsdp2_prepare_model(accelerator, base)
    del accelerator.state.fsdp_plugin
    return nothing


def _shard_zero3(
    base: Any, accelerator: Accelerator, options: dict[str, Any]
) -> Callable[[], None]:
    from deepspeed import initialize

    config = {
        "train_micro_batch_size_per_gpu": 1,  # a number that only optimizers need
        # without "auto", which stands for its own defaults
        "zero_optimization": {name: value for name, value in options.items() if value != "auto"},
    }
    engine = initialize(model=base, config=config)[0]
    # buffers, which DeepSpeed leaves where weights were shared out as they were loaded
    base.to(accelerator.device)
    frozen = list(base.parameters())

    def release() -> None:
        # what its own optimizer would do; else embedding and head stay whole
        engine.optimizer.release_backward_leftovers()
        for parameter in frozen:
            parameter.ds_active_sub_modules.clear()
            if parameter.ds_status.name == "AVAILABLE" and not parameter.ds_persist:
                parameter.partition()

    return release  # it also keeps the engine, which would take its hooks along


def nothing() -> None:
    """Release no weights: none are shared out, or FSDP2 does it."""


@contextmanager
def in_step(model: PreTrainedModel) -> Iterator[None]:
    """Sample with a sharded model, whose every forward is one of all processes: they end together.

    A process whose rows have ended goes on with forwards of one token until the last process has
    its rows.
    """

    def others_go_on(*_: Any) -> None:
        assert any_process(True)

    hook = model.register_forward_pre_hook(others_go_on, prepend=True)
    try:
        yield
    finally:
        hook.remove()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        while any_process(False):
            model(input_ids=token, attention_mask=torch.ones_like(token), use_cache=False)


def any_process(told: bool) -> bool:
    """Tell whether ``told`` holds in any of the processes, which all call this."""
    if not (dist.is_available() and dist.is_initialized()):
        return told
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    flag = torch.tensor([float(told)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())
