"""HeadGates: one learned number per KV head, with its model and how it was trained."""

from __future__ import annotations

import json
import reprlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkv.gates.formats import read_gates, write_gates
from rlkv.models.layout import Layout, describe_heads, gated_places
from rlkv.models.shape import ModelShape
from rlkv.utils.numbers import check_whole
from rlkv.utils.runtime import first_line

# Published gates reach 0.0106 below 0 and 0.0078 above 1, which is one optimizer step; more is
# clipped with a warning.
ROUNDING = 0.02


def _matrix(values: Any, name: str, source: str) -> Tensor:
    """Convert ``values`` to a float32 CPU matrix, clipped to [0, 1]."""
    try:
        found = torch.as_tensor(values)
        if found.is_complex() or found.is_nested:
            raise TypeError("it is complex or nested")
        matrix = found.detach().to("cpu", torch.float32, copy=True).contiguous()
    except (TypeError, ValueError, RuntimeError) as error:
        # RuntimeError: sparse or quantized tensors, or far too large ones
        raise ValueError(
            f"{source}: {name} is not a matrix of numbers ({first_line(error)})"
        ) from error
    if matrix.dim() != 2 or matrix.numel() == 0:
        raise ValueError(
            f"{source}: {name} has shape {list(matrix.shape)}, expected [num_layers, num_kv_heads]"
        )
    wrong = (~matrix.isfinite()).nonzero().tolist()
    if wrong:
        raise ValueError(
            f"{source}: {name} holds {len(wrong)} values that are NaN or infinite (the first at "
            f"layer {wrong[0][0]}, head {wrong[0][1]}), expected numbers in [0, 1]"
        )
    clipped = matrix.clamp(0, 1)
    distance = (matrix - clipped).abs()
    far = int((distance > ROUNDING).sum())
    if far:
        warnings.warn(
            f"{source}: {far} of {matrix.numel()} values of {name} lay outside [0, 1], by up to "
            f"{distance.max():.3g}, and were clipped",
            stacklevel=4,
        )
    return clipped


@dataclass(eq=False)
class HeadGates:
    """Gates of every KV head of one model.

    Attributes:
        alpha: float32 ``[num_layers, num_kv_heads]`` on the CPU, in [0, 1]; 1 = needs the whole
            past.
        mean_alpha: mean of each gate over the training, which orders heads with equal gates; None:
            ``alpha``.
        model: shape of the model that they were trained for; None if the file did not say.
        sink, window: tokens that the local attention saw in training.
        deploy_sink, deploy_window: tokens that a compressible head should keep when serving.
        deploy_protect_prompt: whether it should keep the whole prompt too.
        training: JSON-able summary of the training run.
        heads: how many gates each layer has, where not all layers have as many; 0 for layers
            without full attention, in which alpha reads 1.  None: all of them.
        source: where they were read from, for error messages; neither saved nor compared.

    Raises:
        ValueError: for another shape than ``[L, H]`` (or than ``model`` says), NaN, a negative
            sink, a window below 1, a summary that JSON cannot hold. Values outside [0, 1] are
            clipped, beyond :data:`ROUNDING` with a warning.
    """

    alpha: Tensor
    mean_alpha: Tensor = None  # type: ignore[assignment]  # replaced in __post_init__
    model: ModelShape | None = None
    sink: int = 128
    window: int = 256
    deploy_sink: int = 16
    deploy_window: int = 64
    deploy_protect_prompt: bool = False
    training: dict[str, Any] = field(default_factory=dict)
    heads: Sequence[int] | None = None
    source: str = "gates"

    def __post_init__(self) -> None:
        self.alpha = _matrix(self.alpha, "alpha", self.source)
        mean_alpha = self.alpha if self.mean_alpha is None else self.mean_alpha
        self.mean_alpha = _matrix(mean_alpha, "mean_alpha", self.source)
        if self.mean_alpha.shape != self.alpha.shape:
            raise ValueError(
                f"{self.source}: mean_alpha has shape {list(self.mean_alpha.shape)}, expected that "
                f"of alpha, {list(self.alpha.shape)}"
            )
        self._check_heads()
        for name, least in (("sink", 0), ("window", 1), ("deploy_sink", 0), ("deploy_window", 1)):
            check_whole(f"{self.source}: {name}", getattr(self, name), least)
        if not isinstance(self.deploy_protect_prompt, bool):
            raise ValueError(
                f"{self.source}: deploy_protect_prompt is {self.deploy_protect_prompt!r}, "
                "expected true or false"
            )
        model = self.model
        if model is not None and (model.num_layers, model.num_kv_heads) != self.alpha.shape:
            raise ValueError(
                f"{self.source}: alpha is {self.num_layers} layers x {self.num_kv_heads} KV heads, "
                f"expected {model.num_layers} x {model.num_kv_heads} of {model.title}"
            )
        if not isinstance(self.training, dict):
            raise ValueError(
                f"{self.source}: training is {self.training!r}, expected names with values"
            )
        template = self.training.get("template")
        if not isinstance(template, str | None):
            raise ValueError(
                f"{self.source}: the prompt template of the training is {template!r}, expected a "
                "name"
            )
        # what every format gives back: tuples become lists here, not on the way through a file
        try:
            self.training = json.loads(json.dumps(self.training))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.source}: the training summary cannot be written as JSON ({error})"
            ) from error

    def _check_heads(self) -> None:
        """Raise ValueError if ``heads`` and the matrices do not belong together."""
        heads = self.heads
        if heads is None:
            return
        is_list = isinstance(heads, list | tuple) and len(heads) == self.num_layers
        most = self.num_kv_heads
        are_counts = is_list and all(type(n) is int and 0 <= n <= most for n in heads)
        if not are_counts or max(heads) == 0:
            raise ValueError(
                f"{self.source}: heads is {reprlib.repr(heads)}, expected the number of gates, "
                f"from 0 to {most}, of each of {self.num_layers} layers, and a gate in one of them"
            )
        self.heads = tuple(heads) if min(heads) < most else None
        others = ~self.gated
        if not bool((self.alpha[others] == 1).all() and (self.mean_alpha[others] == 1).all()):
            raise ValueError(
                f"{self.source}: alpha or mean_alpha is not 1 in a place where heads says that "
                "there is no gate: the file is damaged or of another model"
            )

    @property
    def gated(self) -> Tensor:
        """Mask of the places of alpha that are gates: bool ``[num_layers, num_kv_heads]``."""
        return gated_places(self.heads, *self.alpha.shape)

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers with gates."""
        return self.gated.any(dim=1).nonzero().flatten().tolist()

    @property
    def num_layers(self) -> int:
        return self.alpha.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.alpha.shape[1]

    @property
    def model_id(self) -> str:
        """The model's name, empty if the gates state none."""
        return self.model.model_id if self.model else ""

    @property
    def name(self) -> str:
        """The model's name, or else the last two parts of where the gates were read from."""
        return self.model_id or "/".join(Path(self.source).parts[-2:])

    def serving(self, **given: Any) -> dict[str, Any]:
        """Return ``sink``, ``window`` and ``protect_prompt`` for serving.

        As ``given``; the file's recommendation replaces None.
        """
        names = ("sink", "window", "protect_prompt")
        recommended = {name: getattr(self, f"deploy_{name}") for name in names}
        return recommended | {name: value for name, value in given.items() if value is not None}

    @classmethod
    def load(cls, path: str | Path) -> HeadGates:
        """Read a file, a folder, gates on the hub, or the packaged ``tiny`` or ``smol``.

        A file ends with ``.pt``, ``.safetensors`` or ``.tsv``.  A folder is read as a PEFT adapter
        if it holds ``adapter_config.json``, else ``gates.safetensors``, else ``gates.pt``, else its
        only ``.tsv``.  A ``.tsv`` gets the sizes and the model's name from a DuoAttention
        ``config.json`` next to it, or the defaults.  The hub: ``hf://owner/name[@revision]``, or
        ``owner/name`` where no such local path exists.

        Raises:
            ValueError: one sentence with the file, what was found and what was expected.
        """
        return cls(**read_gates(path), source=str(path))

    def save(self, path: str | Path) -> None:
        """Write by suffix: ``.pt``, ``.safetensors``, ``.tsv``; none, or a folder: a PEFT folder.

        Each file is replaced atomically. ``.tsv`` holds alpha alone; all other formats give back
        everything that was saved.

        Raises:
            ValueError: for another suffix, or a hub address.
        """
        write_gates(path, self.to_payload())

    def to_payload(self) -> dict[str, Any]:
        """Return the arguments that make equal gates: what the formats write."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "source"}

    def check_model(self, config: Any) -> None:
        """Raise ``ValueError`` if these gates are not for a model of this transformers ``config``.

        Compares type, layers, KV heads, query heads and head size, as far as the file states them,
        and which layers have gates.
        """
        found = ModelShape.from_config(config)
        stated = self.model or ModelShape("", "", self.num_layers, self.num_kv_heads, 0, 0)
        differing = []
        for field_ in fields(ModelShape):
            name = field_.name
            is_stated = name != "model_id" and getattr(stated, name)
            if is_stated and getattr(stated, name) != getattr(found, name):
                differing.append(name.removeprefix("num_").replace("_", " ").replace("kv", "KV"))
        if differing:
            raise ValueError(
                f"{self.source}: these gates are for {_shape(stated)}, but "
                f"{found.title} is {_shape(found)} (other {', '.join(differing)}): use the "
                "gates that were trained for this model"
            )
        own = self.heads or (self.num_kv_heads,) * self.num_layers
        expected = Layout.from_config(config).heads
        if own != expected:
            raise ValueError(
                f"{self.source}: these gates are for layers {describe_heads(own)}, but "
                f"{found.title} ({found.model_type}) has full attention in "
                f"{describe_heads(expected)}: use the gates that were trained for this model"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HeadGates):
            return NotImplemented
        pairs = zip(self.to_payload().values(), other.to_payload().values(), strict=True)
        return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)

    def __repr__(self) -> str:
        mean = self.alpha[self.gated].mean()
        return (
            f"<HeadGates {self.name}: {self.num_layers} layers x {self.num_kv_heads} KV heads, "
            f"mean {mean:.3f}, trained with sink {self.sink} + window {self.window}>"
        )


def _shape(shape: ModelShape) -> str:
    text = shape.model_type or "a model"
    text += f" with {shape.num_layers} layers x {shape.num_kv_heads} KV heads"
    if shape.num_query_heads:
        text += f", {shape.num_query_heads} query heads of {shape.head_dim}"
    return f"{shape.model_id}: {text}" if shape.model_id else text
