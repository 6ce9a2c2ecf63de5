"""A frozen base model that does not fit one card: shared out over the processes by FSDP2 or
DeepSpeed ZeRO-3.

Launchers shard all parameters and what the optimizer knows of them.  Here the base alone is large,
and frozen: its library shards it, and the gates, a few hundred numbers, stay whole in every
process, where DDP keeps them equal.  So gates are read, clamped, logged and saved as on one
process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from peft import PeftModel
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.integrations import deepspeed

from rlkv.attention.mixed import GATE

# shards a frozen model without gates, in place; what it returns is to be called after every
# backward pass
Shard = Callable[[PreTrainedModel, Accelerator], Callable[[], None]]


def is_sharded(args: Any) -> bool:
    """Whether the launcher asks for a base model that is shared out.

    Before :func:`take_sharding`.
    """
    by_deepspeed = args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3
    return by_deepspeed or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


@contextmanager
def not_loading() -> Iterator[None]:
    """Inside, models are made without ZeRO-3, which would share out those that are only looked at."""
    asked = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = asked


def load_as(dtype: str) -> None:
    """Let ZeRO-3, which shares weights out as they are loaded, keep the dtype: by default it makes
    them float32.
    """
    if deepspeed.is_deepspeed_zero3_enabled():
        config = deepspeed.deepspeed_config()
        config |= {
            name: {"enabled": dtype == full}
            for name, full in (("bf16", "bfloat16"), ("fp16", "float16"))
        }


def take_sharding(args: Any) -> Shard | None:
    """What the launcher asked for, taken away from it: to trl and accelerate the run is one of DDP.

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
    return lambda base, accelerator: _shard_zero3(
        base, accelerator, plugin.deepspeed_config["zero_optimization"]
    )


def shard_base(model: PeftModel, accelerator: Accelerator, shard: Shard) -> Callable[[], None]:
    """Share the frozen weights out, so that DDP looks at the gates alone.

    Returns what to call after a backward.
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

    known = {
        name: value for name, value in options.items() if value != "auto"
    }  # else its own defaults
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": known,
    }  # a number that only optimizers need
    engine = initialize(model=base, config=config)[0]
    base.to(
        accelerator.device
    )  # buffers; DeepSpeed leaves them where weights were shared out as they were loaded

    frozen = list(base.parameters())

    def release() -> None:  # what its own optimizer would do; else embedding and head stay whole
        engine.optimizer.release_backward_leftovers()
        for parameter in frozen:
            parameter.ds_active_sub_modules.clear()
            if parameter.ds_status.name == "AVAILABLE" and not parameter.ds_persist:
                parameter.partition()

    return release  # it also keeps the engine, which would take its hooks along


def nothing() -> None:
    """No weights are to be released."""


@contextmanager
def in_step(model: PreTrainedModel) -> Iterator[None]:
    """Sampling with a sharded model, whose every forward is one of all processes: they end
    together.

    A process whose rows have ended goes on with forwards of one token until the last process has
    its rows.
    """
    hook = model.register_forward_pre_hook(lambda *_: _check(any_process(True)), prepend=True)
    try:
        yield
    finally:
        hook.remove()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        while any_process(False):
            model(input_ids=token, attention_mask=torch.ones_like(token), use_cache=False)


def _check(others: bool) -> None:
    """A hook must return None."""
    assert others


def any_process(told: bool) -> bool:
    """Whether ``told`` holds in any of the processes, which all call this."""
    if not (dist.is_available() and dist.is_initialized()):
        return told
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    flag = torch.tensor([float(told)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())
