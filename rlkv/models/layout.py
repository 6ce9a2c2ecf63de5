"""The layers of a model: which kind of attention each has, and which carry head gates.

Gates exist where a layer keeps keys and values of the whole past for itself: with full attention,
also next to a linear layer.  All other layers stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FULL = "full attention"
FULL_AND_LINEAR = "full attention and a linear layer"
SLIDING = "sliding-window attention"
SLIDING_AND_LINEAR = "sliding-window attention and a linear layer"
CHUNKED = "chunked attention"
LINEAR = "linear attention"
LATENT = "multi-head latent attention"
SHARED = "keys and values shared with other layers"
CROSS = "cross-attention"
NONE = "no attention"
# what transformers' configs call them
_NAMED = {
    "full_attention": FULL,
    "hybrid": FULL_AND_LINEAR,
    "sliding_attention": SLIDING,
    "hybrid_sliding": SLIDING_AND_LINEAR,
    "chunked_attention": CHUNKED,
    "linear_attention": LINEAR,
    "conv": LINEAR,
    "moe": NONE,
    "mlp": NONE,
}
_KNOWN = frozenset({*_NAMED.values(), LATENT, SHARED, CROSS})
# what its cache says of a layer that the config does not name
_CACHED = {"DynamicLayer": "full_attention", "DynamicSlidingWindowLayer": "sliding_attention"}


def own_layers(config: Any) -> list[Any]:
    """Return what transformers' own cache makes of each layer of a model.

    This is the one description of its kinds of layers that all models share.  Layers at the end
    that keep nothing of their own may be missing.
    """
    from transformers import DynamicCache  # reading gates alone does not need it

    return list(DynamicCache(config=config.get_text_config(decoder=True)).layers)


@dataclass(frozen=True)
class Layer:
    """One layer: what it is (``FULL``, ``SLIDING``, ...; a name of transformers' if unknown).

    Heads and their size are those of its config, also where it keeps no keys and values.
    """

    kind: str
    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def has_gates(self) -> bool:
        return self.kind in (FULL, FULL_AND_LINEAR)


@dataclass(frozen=True)
class Layout:
    """All layers of a model, by number."""

    model_type: str
    layers: tuple[Layer, ...]

    @classmethod
    def from_config(cls, config: Any) -> Layout:
        """Read the layers off a config and off the cache that transformers makes for it.

        Raises:
            ValueError: for a model without attention heads.
        """
        text = config.get_text_config(decoder=True)
        differs = getattr(text, "is_heterogeneous", False)
        own = list(text.per_layer_config) if differs else [text]
        if getattr(own[0], "num_attention_heads", None) is None:
            raise ValueError(
                f"{text.model_type} has no attention heads (its config has no "
                "num_attention_heads): use a model with attention"
            )
        kinds = _kinds(text)
        own = own if differs else own * len(kinds)
        layers = [Layer(kind, *_sizes(of)) for kind, of in zip(kinds, own, strict=True)]
        return cls(text.model_type, tuple(layers))

    @property
    def gated(self) -> list[int]:
        """The numbers of the layers with gates."""
        return [number for number, layer in enumerate(self.layers) if layer.has_gates]

    @property
    def heads(self) -> tuple[int, ...]:
        """Number of gates of each layer."""
        return tuple(layer.kv_heads if layer.has_gates else 0 for layer in self.layers)

    @property
    def is_plain(self) -> bool:
        """True if every layer has full attention, and nothing else."""
        return {layer.kind for layer in self.layers} == {FULL}

    def check(self) -> None:
        """Raise ValueError, with its name, for a kind of layer that is not known."""
        unknown = sorted({layer.kind for layer in self.layers} - _KNOWN)
        if unknown:
            raise ValueError(
                f"{self.model_type} has layers of kind {', '.join(unknown)}, which rlkv does not "
                "know: use a model with full attention over plain keys and values, alone or next "
                "to sliding-window and linear layers, such as Llama, Qwen3 or Gemma 3"
            )

    def modules(self, model: Any) -> list[tuple[str, Any]]:
        """Return ``(name, attention module)`` of each layer with gates, as far as there are any.

        Raises:
            ValueError: if several modules have the number of one layer, or one module several.
        """
        found: dict[int, tuple[str, Any]] = {}
        for name, module in _attention_modules(model):
            number = module.layer_idx
            if number in found or number is None or number < 0:
                raise ValueError(
                    f"the attention modules of {self.model_type} do not belong to one layer each: "
                    f"{name} serves several, so its heads cannot be gated one by one"
                )
            if number < len(self.layers) and self.layers[number].has_gates:
                found[number] = (name, module)
        missing = sorted(set(self.gated) - set(found))
        if found and missing:
            raise ValueError(
                f"{self.model_type} has full attention in layers {ranges(self.gated)} by its "
                f"config, but no attention module of its own in {ranges(missing)}: its heads "
                "cannot be gated one by one"
            )
        return [found[number] for number in sorted(found)]

    def sharing_modules(self, model: Any) -> list[Any]:
        """Return the attention modules that share keys and values with other layers."""
        modules = [module for _, module in _attention_modules(model)]
        return [of for of in modules if self.layers[of.layer_idx].kind == SHARED]

    def describe(self) -> str:
        """Say which layers are of which kind: ``full attention in layers 3, 7; ...``."""
        by_kind: dict[str, list[int]] = {}
        for number, layer in enumerate(self.layers):
            by_kind.setdefault(layer.kind, []).append(number)
        parts = [f"{kind} in layers {ranges(numbers)}" for kind, numbers in by_kind.items()]
        return "; ".join(parts)


def _attention_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the decoder's modules with grouped heads, and their names; not what they consist of."""
    text = type(model.config.get_text_config(decoder=True))
    outer = "."
    for name, module in model.named_modules():
        is_attention = hasattr(module, "num_key_value_groups") and hasattr(module, "layer_idx")
        # a vision tower numbers its own layers (Gemma 4)
        is_attention = is_attention and isinstance(getattr(module, "config", None), text)
        if is_attention and not name.startswith(outer):
            outer = f"{name}."  # its parts may carry the same facts
            yield name, module


def _kinds(text: Any) -> list[str]:
    """Return the kind of each layer."""
    named = getattr(text, "layer_types", None)
    if named is None:
        classes = [type(layer).__name__ for layer in own_layers(text)]
        named = [_CACHED.get(name, name) for name in classes]
        named += ["full_attention"] * (text.num_hidden_layers - len(named))
    if len(named) < text.num_hidden_layers:
        raise ValueError(
            f"the config of {text.model_type} has {text.num_hidden_layers} layers but names the "
            f"kinds of {len(named)} (layer_types): it must name one for every layer"
        )
    named = named[: text.num_hidden_layers]  # a model that was cut to its first layers names more
    kinds = [_NAMED.get(name, name) for name in named]
    if getattr(text, "kv_lora_rank", None) is not None:
        kinds = [LATENT if kind == FULL else kind for kind in kinds]
    for number in getattr(text, "cross_attention_layers", None) or []:
        if number < len(kinds):
            kinds[number] = CROSS
    readers, owners = _sharing(text, named)
    for number in readers:
        kinds[number] = SHARED
    for number in owners:  # others need all that it keeps; a sliding layer stays what it is anyway
        if kinds[number] in (FULL, FULL_AND_LINEAR):
            kinds[number] = SHARED
    return kinds


def _sharing(text: Any, named: list[str]) -> tuple[list[int], list[int]]:
    """Return the layers that read the keys and values of earlier ones, and those earlier ones."""
    modes = getattr(text, "kv_sharing_modes", None)
    if modes is not None:
        readers = [number for number, mode in enumerate(modes) if mode not in (None, "store")]
        read = {named[number] for number in readers}  # others are stored for a draft model
        stored = [number for number, mode in enumerate(modes) if mode == "store"]
        return readers, [number for number in stored if named[number] in read]
    first = len(named) - (getattr(text, "num_kv_shared_layers", None) or 0)
    owners = []
    for kind in set(named[first:]):
        owners += [number for number in range(first) if named[number] == kind][-1:]
    return list(range(first, len(named))), owners


def _sizes(config: Any) -> tuple[int, int, int]:
    """Return the query heads of a layer, its KV heads, and the size of one."""
    query_heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or query_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    return query_heads, kv_heads, head_dim


def gated_places(heads: Sequence[int] | None, num_layers: int, num_kv_heads: int) -> Tensor:
    """Return where there are gates: bool ``[L, H]``, the first ``heads[layer]`` of a layer."""
    if heads is None:
        return torch.ones(num_layers, num_kv_heads, dtype=torch.bool)
    return torch.arange(num_kv_heads) < torch.tensor(heads)[:, None]


def describe_heads(heads: Sequence[int]) -> str:
    """Name the layers with gates, and how many of them: ``1, 3 (2 KV heads)``."""
    numbers = [layer for layer, count in enumerate(heads) if count]
    counts = sorted(set(heads) - {0})
    if not numbers:
        return "none of its layers"
    return f"{ranges(numbers)} ({' or '.join(map(str, counts))} KV heads)"


def ranges(numbers: Iterable[int]) -> str:
    """Write ascending numbers short: ``0-4, 6``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(parts)
