"""Memory of a model: which rows fit the GPU, and about how long a job takes, before it begins.

The rates and reserves in capitals are assumptions for planning, unless a comment says what they
were measured on; a job shows its measured pace as soon as it has one.  Units: bytes, seconds,
tokens; a row is a text that is being decoded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from rlkv.models.layout import Layout
from rlkv.models.loading import load_config, resolve_device, resolve_dtype
from rlkv.models.shape import PUBLISHED, ModelShape


@dataclass(frozen=True)
class Card:
    """A GPU: GiB of memory, bfloat16 operations/s without sparsity, and bytes/s of memory."""

    memory: float
    flops: float
    bandwidth: float


CARDS = {
    "a10g": Card(24, 70e12, 0.60e12),
    "rtx4090": Card(24, 165e12, 1.01e12),
    "l40s": Card(48, 362e12, 0.86e12),
    "a100-40": Card(40, 312e12, 1.56e12),
    "a100": Card(80, 312e12, 2.04e12),
    "h100": Card(80, 989e12, 3.35e12),
    "h200": Card(141, 989e12, 4.80e12),
    "b200": Card(180, 2250e12, 7.70e12),
}
DEFAULT = "h100"


def parse_gpus(text: str) -> tuple[int, str]:
    """Return number and name of ``8xh100`` or ``h100``; ValueError for another form or name."""
    found = re.fullmatch(r"(?:([1-9]\d*)x)?([\w-]+)", text.lower())
    if found is None or found[2] not in CARDS:
        raise ValueError(
            f"plan_gpus is {text!r}: name a GPU, and how many, such as 8xh100; known are "
            f"{', '.join(CARDS)}"
        )
    return int(found[1] or 1), found[2]


def card_of(device: torch.device) -> Card | None:
    """Return what is known of a GPU, which else counts as an A100; None for a CPU."""
    if device.type != "cuda":
        return None
    name = re.sub(r"[\s-]", "", torch.cuda.get_device_name(device).lower())
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    known = [card for key, card in CARDS.items() if key.partition("-")[0] in name]
    nearest = min(known or [CARDS["a100"]], key=lambda card: abs(card.memory - memory))
    return Card(memory, nearest.flops, nearest.bandwidth)


GIB = 2**30
NAMES = {"hf": "transformers", "vllm": "vLLM", "vllm-server": "the vLLM server"}
USABLE = 0.9  # share of the free memory of a GPU
ENGINE_GIB = 6.0  # activations, buffers and graphs of a decoding engine
MOST_ROWS = {"hf": 64, "vllm": 256}
COPIES = 2  # of transformers' cache at once, when rows leave
DEFAULT_KV_GIB = 4.0  # where no GPU says what fits
MEAN_LENGTH = 0.5  # mean tokens of a completion, as a share of the longest
# a decoding step of transformers on a GPU, per layer, in addition to reading the weights: that of
# graphs with mixed attention, 16 rows of an 8B model and 32 of a 1.5B model on an H200
HF_STEP_SECONDS = 3e-4
DECODE_SHARE = 0.3  # of a GPU's bandwidth that vLLM reaches as it reads weights and KV
# tokens/s times parameters of a CPU thread in bfloat16: 32 rows of a model of 1.5B in vLLM
CPU_RATE = 7.5e10


@dataclass(frozen=True)
class Footprint:
    """Bytes that a model takes.

    Attributes:
        weights: bytes.
        heads: how many heads of each layer can be compressed, as ``HeadAllocation.heads``.
        kv_per_token: bytes of KV of one token in all layers as if each had full attention, which is
            more than a hybrid holds.
        hidden, intermediate, vocabulary: widths of its states, of what an MLP holds of a token, of
            its logits.
        itemsize: bytes of an element.
    """

    architecture: str
    shape: ModelShape
    heads: tuple[int, ...]
    parameters: int
    weights: int
    kv_per_token: int
    hidden: int
    intermediate: int
    vocabulary: int
    itemsize: int

    @classmethod
    def of(cls, model: str, dtype: str = "auto", device: str = "auto") -> Footprint | None:
        """Return the footprint of a model, or None if only the hub knows its shape.

        Args:
            model: a published model, a folder, a built-in name or a hub id.
            device: where it decodes, which the dtype ``auto`` depends on.
        """
        config = _config(model)
        if config is None:
            return None
        itemsize = resolve_dtype(dtype, resolve_device(device)).itemsize
        return cls.of_config(config, model, itemsize)

    @classmethod
    def of_config(cls, config: PretrainedConfig, model: str, size: int) -> Footprint:
        """Return the footprint of a model with weights of ``size`` bytes each.

        Those of a quantised checkpoint have its bits, but for embeddings and the head.
        """
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config)
        parameters = sum(weight.numel() for weight in built.parameters())
        shape = ModelShape.from_config(config, model)
        text = config.get_text_config()
        plain = parameters
        if bits := _bits(config):
            ends = 1 if config.tie_word_embeddings else 2
            plain = min(parameters, ends * text.vocab_size * text.hidden_size)
        return cls(
            architecture=type(built).__name__,
            shape=shape,
            heads=Layout.from_config(config).heads,
            parameters=parameters,
            weights=plain * size + (parameters - plain) * bits // 8,
            kv_per_token=2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * size,
            hidden=text.hidden_size,
            intermediate=_mlp_width(text),
            vocabulary=text.vocab_size,
            itemsize=size,
        )

    def kv_room(self, free: int) -> int:
        """Return the bytes of a GPU that are left for KV; negative if it is too small."""
        return int(USABLE * free - self.weights - ENGINE_GIB * GIB)

    def lacking(self, room: int, positions: int) -> float:
        """Return the GiB that ``room`` bytes lack for a row of ``positions`` tokens."""
        return max(0, positions * self.kv_per_token - room) / GIB

    def vllm_kv_gib(self, free: int, positions: int) -> float:
        """Return the GiB of KV that vLLM alone has on a GPU.

        Raises:
            ValueError: if they hold no row of ``positions`` tokens.
        """
        room = self.kv_room(free)
        if lacking := self.lacking(room, positions):
            raise ValueError(
                f"the GPU is too small for {self.shape.title} in vLLM by about {lacking:.1f} "
                f"GiB ({free / GIB:.1f} GiB are free): free it, decode shorter texts or take "
                "--engine hf"
            )
        return room / GIB

    def rows(self, engine: str, kv: int, positions: int, most: int | None = None) -> int:
        """Return how many rows of up to ``positions`` tokens ``kv`` bytes hold, at least 1.

        vLLM counts texts of mean length, as rows that do not fit wait, transformers the longest.
        """
        share = MEAN_LENGTH if engine == "vllm" else COPIES
        fitting = int(kv / (share * positions * self.kv_per_token))
        return max(1, min(fitting, MOST_ROWS[engine] if most is None else most))

    def rate(self, engine: str, rows: int, card: Card | None, tokens: float) -> float:
        """Return the assumed tokens/s of ``rows`` rows.

        Args:
            card: None on a CPU.
            tokens: that a row holds on average.
        """
        if card is None:
            return CPU_RATE * torch.get_num_threads() * 2 / (self.itemsize * self.parameters)
        if engine == "hf":
            launches = self.shape.num_layers * HF_STEP_SECONDS
            return rows / (launches + self.weights / card.bandwidth)
        read = self.weights + rows * tokens * self.kv_per_token
        return rows * card.bandwidth * DECODE_SHARE / read


def _config(model: str) -> PretrainedConfig | None:
    if model in PUBLISHED:
        values = dict(PUBLISHED[model][1])
        return AutoConfig.for_model(values.pop("model_type"), **values)
    try:
        return load_config(model)
    except ValueError:  # loading the model says what is wrong with it
        return None


def _bits(config: PretrainedConfig) -> int:
    """Return the bits of a weight of a quantised checkpoint, 8 where it does not say; 0: plain."""
    found = getattr(config, "quantization_config", None)
    if not found:
        return 0
    stated: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    if stated.get("load_in_4bit") or stated.get("quant_method") == "mxfp4":
        return 4
    for group in (stated.get("config_groups") or {}).values():  # of compressed-tensors
        return int((group.get("weights") or {}).get("num_bits") or 8)
    return int(stated.get("bits") or 8)


def _mlp_width(config: Any) -> int:
    """Return the width of all experts that a token takes."""
    experts = getattr(config, "num_experts_per_tok", None)
    of_expert = getattr(config, "moe_intermediate_size", None)
    dense: int = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return (experts * (of_expert or dense)) if experts else dense


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a GPU; None for a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def fitting_kv_gib(model: str, dtype: str, positions: int) -> float:
    """Return the GiB of KV that vLLM has on this machine: what its GPU has left.

    Raises:
        ValueError: if they hold no row of ``positions`` tokens.
    """
    free = free_memory(resolve_device())
    footprint = None if free is None else Footprint.of(model, dtype)
    if free is None or footprint is None:
        return DEFAULT_KV_GIB
    return footprint.vllm_kv_gib(free, positions)


def rough(seconds: float) -> str:
    """Write an estimate in the unit that suits it, such as ``3.4 days`` or ``40 s``."""
    for unit, length in (("days", 86400), ("h", 3600)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.0f} s"
