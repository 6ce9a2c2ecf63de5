"""Head gates as a PEFT method: one trainable number per KV head, everything else frozen.

    model = get_peft_model(base, HeadGateConfig(sink=128, window=256))
    model.save_pretrained("gates/", save_embedding_layers=False)  # a tensor [KV heads] a layer
    PeftModel.from_pretrained(base, "gates/")  # with model.disable_adapter(): the untouched model

At its default, ``save_embedding_layers`` asks the hub for the base model's config, half a minute
without a network.  A gate cannot be merged into the weights: it chooses between two attentions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from peft import PeftConfig
from peft.mapping import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_PREFIX_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn

from rlkv.attention import IMPLEMENTATION, Gate, LocalSizes
from rlkv.attention.mixed import GATE
from rlkv.models.layout import Layout
from rlkv.models.loading import attention_of, refuse_latent_attention, try_forward
from rlkv.models.shape import ModelShape
from rlkv.utils.devices import leave_cudnn_out

# What stands before an adapter's name in the names of parameters.  peft and transformers put that
# name behind it when they load a file, and peft takes a module for a part of an adapter if its name
# contains it.
PREFIX = f"{GATE}.alpha"
BATCHING_METHODS = ("generate_batch", "init_continuous_batching")


class _PeftName(str):
    """A PEFT type outside peft's own enum, with the ``value`` that peft's messages print."""

    @property
    def value(self) -> str:
        return str(self)


HEAD_GATE = _PeftName("HEAD_GATE")


@dataclass
class HeadGateConfig(PeftConfig):
    """Settings of the gates, saved in ``adapter_config.json``.

    Args:
        sink: S, the first tokens that the local branch sees (0 or more).
        window: W, the last tokens that it sees, the current one included (1 or more).
        init_value: where every gate starts, in [0, 1].
        target_modules: names of the gated attention modules; None: every layer with full attention.
        exclude_modules: names of attention modules without gates.
        modules_to_save: not used: only gates are trained.
        num_layers: of the model that the gates are for; None: of the first they are put on.
        num_kv_heads: likewise.
    """

    sink: int = 128
    window: int = 256
    init_value: float = 1.0
    target_modules: list[str] | None = None
    exclude_modules: list[str] | None = None
    modules_to_save: list[str] | None = None
    num_layers: int | None = None
    num_kv_heads: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = HEAD_GATE
        self.task_type = self.task_type or "CAUSAL_LM"
        LocalSizes(self.sink, self.window)  # which checks them
        if not 0.0 <= self.init_value <= 1.0:
            raise ValueError(f"init_value must lie in [0, 1], got {self.init_value}")


class HeadGateLayer(nn.Module, BaseTunerLayer):
    """The gates of one attention module, one parameter ``[num_kv_heads]`` per adapter."""

    adapter_layer_names = ("alpha",)

    def __init__(self, num_kv_heads: int, device: torch.device) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.alpha = nn.ParameterDict()
        self._device = device
        self._sizes: dict[str, tuple[int, int]] = {}
        leave_cudnn_out(device)

    def add(self, adapter_name: str, config: HeadGateConfig) -> None:
        """Add an adapter's gates, float32 whatever the base model's dtype."""
        start = torch.ones(self.num_kv_heads, dtype=torch.float32, device=self._device)
        self.alpha[adapter_name] = nn.Parameter(start * config.init_value)
        self._sizes[adapter_name] = (config.sink, config.window)
        self.set_adapter(adapter_name, inference_mode=config.inference_mode)

    def current(self) -> Gate | None:
        """Return the active gate, None while adapters are disabled.

        Raises:
            ValueError: if several are active at once.
        """
        names = [name for name in self.active_adapters if name in self.alpha]
        if self.disable_adapters or not names:
            return None
        if len(names) > 1:
            raise ValueError(
                f"adapters {', '.join(names)} are active, and gates work one set at a time: choose "
                "one of them with set_adapter(...)"
            )
        return Gate(self.alpha[names[0]], *self._sizes[names[0]])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HeadGateLayer:
        """Follow the model to its device and to wider dtypes, never to bf16, where 0.999 is 1."""

        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            leave_cudnn_out(moved.device)
            if moved.is_floating_point() and moved.element_size() < tensor.element_size():
                return tensor.to(moved.device)
            return moved

        super()._apply(keep_precision, recurse)
        return self

    def unmerge(self) -> None:
        """Nothing was merged."""


def _computing_device(module: nn.Module) -> torch.device:
    """Return where a module computes; accelerate takes offloaded weights there for each call."""
    for part in module.modules():
        device = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return next(module.parameters()).device


def _refuse_continuous_batching(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        "a gated model cannot run continuous batching, which bypasses the gates: use generate()"
    )


def _refuse_bypass(module: Any, args: Any) -> None:
    """Check before every gated layer that the attention implementation is still ours."""
    if module.config.output_attentions:
        raise ValueError(
            "output_attentions=True: a model with head gates computes no attention weights to "
            "return"
        )
    found = module.config._attn_implementation
    if found != IMPLEMENTATION and getattr(module, GATE).current() is not None:
        raise ValueError(
            f"the attention implementation of a gated model was changed to {found!r}, which "
            f"bypasses the gates: set it back with set_attn_implementation({IMPLEMENTATION!r}), or "
            "unload() the gates"
        )


def full_attention_modules(model: Any) -> list[tuple[str, nn.Module]]:
    """Return ``(name, attention module)`` of every layer that can have gates, in order.

    Raises:
        ValueError: for multi-head latent attention, layers of an unknown kind, and modules that
            serve several layers.
    """
    refuse_latent_attention(model)
    layout = Layout.from_config(model.config)
    layout.check()
    return layout.modules(model)


def _why_no_gates(model: Any) -> str:
    """Say why :func:`full_attention_modules` finds none in ``model``."""
    layout = Layout.from_config(model.config)
    if not model._can_set_attn_implementation():
        return (
            f"{layout.model_type} computes attention in its own code, not through transformers' "
            "attention interface"
        )
    return (
        f"{layout.model_type} has no layer with full attention over grouped heads to put gates on "
        f"({layout.describe()})"
    )


class HeadGateModel(BaseTuner):
    """Puts gates on every full-attention module and switches to mixed attention."""

    prefix = PREFIX
    tuner_layer_cls = HeadGateLayer
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012  (peft reads it off the class)

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict) -> Any:
        model = cast(Any, self.model)
        layers = Layout.from_config(model.config).layers
        self._heads = {}
        for name, module in full_attention_modules(model):
            self._heads[name] = layers[cast(Any, module).layer_idx].kv_heads
        available = list(self._heads)
        if not available:
            raise ValueError(
                f"{_why_no_gates(self.model)}: use a model with full attention and grouped heads, "
                "such as Llama, Qwen3 or Gemma 3"
            )
        shape = ModelShape.from_config(model.config)
        own = (shape.num_layers, shape.num_kv_heads)
        asked = (peft_config.num_layers or own[0], peft_config.num_kv_heads or own[1])
        if asked != own:
            raise ValueError(
                f"these gates are for {asked[0]} layers x {asked[1]} KV heads, but "
                f"{shape.title} has {own[0]} x {own[1]}: use the gates that were trained for "
                "this model"
            )
        peft_config.num_layers = shape.num_layers
        peft_config.num_kv_heads = shape.num_kv_heads
        peft_config.target_modules = self._present(peft_config.target_modules, available)
        return peft_config

    def _present(self, targets: list[str] | None, available: list[str]) -> list[str]:
        """Return the modules ``available`` that ``targets`` name, whole or by their last parts.

        A model without a head for its vocabulary has no prefix for its decoder, so it may be
        missing on either side.
        """
        if targets is None:
            return available
        prefix = f"{cast(Any, self.model).base_model_prefix}."
        found: dict[str, None] = {}
        for target in targets:
            short = target.removeprefix(prefix)
            names = [name for name in available if name.removeprefix(prefix) == short]
            names = names or [name for name in available if name.endswith(f".{short}")]
            if not names:
                raise ValueError(
                    f"the gates are for {target}, which is not a layer with full attention of this "
                    "model: gates do not work there, so use the gates of this model, or other "
                    "target_modules"
                )
            found.update(dict.fromkeys(names))
        return list(found)

    def inject_adapter(
        self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
    ) -> None:
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        if len(self.peft_config) > 1:
            return
        try:
            # what gates cannot work with is refused before any training
            try_forward(model, use_cache=False)
        except BaseException:
            self._unload_and_optionally_merge(merge=False)
            raise

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete the gates ``adapter_name``.

        Raises:
            ValueError: if they are the only ones, which ``unload()`` takes off.
        """
        if list(self.peft_config) == [adapter_name]:
            raise ValueError(
                f"{adapter_name!r} is the only set of gates of this model: use unload() for the "
                "untouched model"
            )
        super().delete_adapter(adapter_name)

    def _prepare_model(self, peft_config: Any, model: Any) -> None:
        if not hasattr(self, "_implementation_before"):
            self._implementation_before = attention_of(model)
            model.set_attn_implementation(IMPLEMENTATION)
        # transformers only warns when it cannot switch
        if model.config._attn_implementation != IMPLEMENTATION:
            raise ValueError(
                f"{type(model).__name__} does not let its attention be exchanged: gates cannot "
                "work with it"
            )
        for name in BATCHING_METHODS:
            if hasattr(type(model), name):
                setattr(model, name, _refuse_continuous_batching)

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: Any,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        if current_key not in self._heads:
            raise ValueError(
                f"{current_key} is not a layer with full attention: gates do not work there"
            )
        if not hasattr(target, GATE):
            heads = self._heads[current_key]
            setattr(target, GATE, HeadGateLayer(heads, _computing_device(target)))
            target.rlkv_gate_guard = target.register_forward_pre_hook(_refuse_bypass)
        getattr(target, GATE).add(adapter_name, peft_config)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Refuse an adapter's file whose gates are NaN, or of other modules, which peft skips."""
        found = {name for name in state_dict if f".{PREFIX}" in name}
        for name in found:
            gates = state_dict[name]
            if not bool(gates.isfinite().all()):
                raise ValueError(
                    f"{name} holds gates that are NaN or infinite: expected numbers in [0, 1]"
                )
            clipped = gates.clamp(0, 1)
            if not torch.equal(clipped, gates):
                warnings.warn(f"{name} holds gates outside of [0, 1], clipped", stacklevel=2)
                state_dict[name] = clipped
        adapters = {name.rpartition(".")[2] for name in found}
        own = set()
        for name, module in self.named_modules():
            if isinstance(module, HeadGateLayer):
                for adapter in adapters & set(module.alpha):
                    own.add(f"{prefix}{name}.alpha.{adapter}")
        if own != found:
            raise ValueError(
                "the adapter and the model differ in the modules with gates "
                f"({min(own ^ found)} is in one of them only): use the adapter that peft saved for "
                "this model, or put the gates on by their layers, with HeadGates.load(...) and "
                "rlkv.attention.head_gate.set_gates(model, gates.alpha)"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _check_merge_allowed(self) -> NoReturn:
        raise ValueError(
            "head gates cannot be merged into the weights: use unload() for the untouched model, "
            "or rlkv.compress(...) to serve with the gates"
        )

    def _unload_and_optionally_merge(self, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
        if merge:
            self._check_merge_allowed()
        model: Any = self.model
        for module in model.modules():
            if hasattr(module, GATE):
                module.rlkv_gate_guard.remove()
                del module.rlkv_gate_guard
                delattr(module, GATE)
        for name in BATCHING_METHODS:
            model.__dict__.pop(name, None)
        model.set_attn_implementation(self._implementation_before)
        del self._implementation_before
        if hasattr(model, "peft_config"):
            del model.peft_config
        return model


def gate_parameters(model: nn.Module) -> list[tuple[int, nn.Parameter]]:
    """Return ``(layer index, active gate parameter [num_kv_heads])`` by layer.

    Raises:
        ValueError: if the model has no gates.
    """
    found: list[tuple[int, nn.Parameter]] = []
    for module in cast(Iterator[Any], model.modules()):
        holder = getattr(module, GATE, None)
        if isinstance(holder, HeadGateLayer) and holder.active_adapters[0] in holder.alpha:
            found.append((module.layer_idx, holder.alpha[holder.active_adapters[0]]))
    if not found:
        raise ValueError(
            "the model has no gates: wrap it with get_peft_model(model, HeadGateConfig(...)) first"
        )
    return sorted(found, key=lambda item: item[0])


def gates_matrix(model: nn.Module) -> Tensor:
    """Return the gates, float32 ``[num_layers, num_kv_heads]`` on the CPU.

    Places without a gate (sliding-window and linear layers) read 1.0, as they are never compressed;
    :func:`gate_counts` says which these are.
    """
    counts = gate_counts(model)
    matrix = torch.ones(len(counts), max(counts), dtype=torch.float32)
    for layer, parameter in gate_parameters(model):
        matrix[layer, : len(parameter)] = parameter.detach().float().cpu()
    return matrix


def gate_counts(model: nn.Module) -> list[int]:
    """Return how many gates each layer has, 0 for those without."""
    counts = [0] * cast(Any, model.config).get_text_config(decoder=True).num_hidden_layers
    for layer, parameter in gate_parameters(model):
        counts[layer] = len(parameter)
    return counts


def gate_values(model: nn.Module) -> Tensor:
    """Return all gates that there are, one after the other: float32 ``[N]`` on the CPU."""
    return torch.cat([gate.detach().float().cpu() for _, gate in gate_parameters(model)])


@torch.no_grad()
def set_gates(model: nn.Module, alpha_LH: Tensor) -> None:
    """Put ``[num_layers, num_kv_heads]`` numbers in [0, 1] into the gates that there are.

    Raises:
        ValueError: for a matrix of another shape than :func:`gates_matrix`, which may leave out
            layers behind the last one with gates.
    """
    layers, heads = gates_matrix(model).shape
    parameters = gate_parameters(model)
    last, _ = parameters[-1]
    if alpha_LH.shape[1] != heads or not last < len(alpha_LH) <= layers:
        found = list(alpha_LH.shape)
        raise ValueError(f"the model has gates [{layers}, {heads}], the matrix is {found}")
    for layer, parameter in parameters:
        parameter.copy_(alpha_LH[layer, : len(parameter)])


def gate_shares(alpha: Tensor) -> dict[str, float]:
    """Return the mean of the gates and shares of them, as they are logged."""
    return {
        "gates/mean": alpha.mean().item(),
        "gates/below_0.1": (alpha < 0.1).float().mean().item(),
        "gates/below_0.5": (alpha < 0.5).float().mean().item(),
        "gates/at_0": (alpha == 0).float().mean().item(),
        "gates/at_1": (alpha == 1).float().mean().item(),
    }


# peft's registration function wants a member of its enum; these tables are what it fills
cast(dict[Any, Any], PEFT_TYPE_TO_CONFIG_MAPPING)[HEAD_GATE] = HeadGateConfig
cast(dict[Any, Any], PEFT_TYPE_TO_TUNER_MAPPING)[HEAD_GATE] = HeadGateModel
cast(dict[Any, Any], PEFT_TYPE_TO_PREFIX_MAPPING)[HEAD_GATE] = PREFIX
