"""Which engine decodes, how many rows fit the card, and about how long it takes: said before a long job begins.

The rates and reserves in capitals are assumptions for planning, not measurements; a job shows its measured pace as soon
as it has one.  Units: bytes, seconds, tokens; a row is a text that is being decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from rlkv.models.builtin import BUILT_IN
from rlkv.models.hub import connection_error
from rlkv.models.loading import is_path, model_source, resolve_device, resolve_dtype
from rlkv.models.published import PUBLISHED
from rlkv.models.shape import ModelShape

GIB = 2**30
NAMES = {"hf": "transformers", "vllm": "vLLM", "vllm-server": "the vLLM server"}

USABLE = 0.9  # share of a card's free memory
ENGINE_GIB = 6.0  # activations, buffers and graphs of a decoding engine
MOST_ROWS = {"hf": 64, "vllm": 256}
DEFAULT_KV_GIB = 4.0  # where no card says what fits
MEAN_LENGTH = 0.5  # mean tokens of a completion, as a share of the longest

HF_STEP_SECONDS = 1e-3  # a decoding step of transformers on a GPU, per layer: launches bound it, not the rows
HF_MIXED = 3.0  # times that with mixed attention
VLLM_RATE = 1.6e13  # tokens/s times parameters on a GPU: 2,000 tokens/s for 8e9
CPU_RATE = 5e10  # the same on a CPU, whichever engine: 6 tokens/s for 8e9


@dataclass(frozen=True)
class Footprint:
    """What a model takes: ``weights`` in bytes, and the bytes of KV of one token in all heads."""

    shape: ModelShape
    parameters: int
    weights: int
    kv_per_token: int

    @classmethod
    def of(cls, model: str, dtype: str = "auto") -> Footprint | None:
        """Of a published model, a folder, a built-in name or a hub id; None if the hub would have to answer."""
        config = _config(model)
        if config is None:
            return None
        with torch.device("meta"):
            parameters = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
        shape, size = ModelShape.from_config(config, model), resolve_dtype(dtype, resolve_device()).itemsize
        kv = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * size
        return cls(shape, parameters, parameters * size, kv)

    def kv_room(self, free: int, reserve_gib: float = ENGINE_GIB, copies: int = 1) -> int:
        """Bytes of a GPU that are left for KV, with ``copies`` of the weights there; negative if it is too small."""
        return int(USABLE * free - copies * self.weights - reserve_gib * GIB)

    def rows(self, engine: str, kv: int, positions: int, most: int | None = None) -> int:
        """Rows of up to ``positions`` tokens that ``kv`` bytes hold, at least 1.

        vLLM: texts of mean length, as rows that do not fit wait.  transformers: twice the longest, as the cache is
        copied when rows leave.
        """
        share = MEAN_LENGTH if engine == "vllm" else 2.0
        fitting = int(kv / (share * positions * self.kv_per_token))
        return max(1, min(fitting, MOST_ROWS[engine] if most is None else most))

    def rate(self, engine: str, rows: int, has_gpu: bool, mixed: bool = False) -> float:
        """Assumed tokens/s of all rows together."""
        if not has_gpu:
            return CPU_RATE / self.parameters
        if engine != "hf":
            return VLLM_RATE / self.parameters
        return rows / (self.shape.num_layers * HF_STEP_SECONDS * (HF_MIXED if mixed else 1.0))


def _config(model: str) -> PretrainedConfig | None:
    if model in PUBLISHED:
        values = dict(PUBLISHED[model][1])
        return AutoConfig.for_model(values.pop("model_type"), **values)
    is_local = model in BUILT_IN or is_path(model)
    away = not is_local and connection_error(model, "config.json") is not None
    try:
        return AutoConfig.from_pretrained(model_source(model), local_files_only=away)
    except (OSError, ValueError):  # loading the model says what is wrong with it
        return None


def free_memory() -> int | None:
    """Free bytes of the GPU; None without one."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


def choose_engine(asked: str, processes: int = 1) -> tuple[str, str]:
    """``(engine, why)``: for ``auto`` vLLM where it can be used, else transformers and why; else what was asked for.

    Args:
        processes: of a training; an engine inside the trainer serves one.
    """
    if asked != "auto":
        return asked, ""
    if find_spec("vllm") is None:
        return "hf", "vLLM is not installed: pip install 'rlkv[vllm]'"
    if processes > 1:
        return "hf", f"vLLM in the trainer takes one process, not {processes}: see --rollout vllm-server"
    return "vllm", ""


def rough(seconds: float) -> str:
    """An estimate in the unit that suits it: ``3.4 days``, ``5.2 h``, ``12 min``."""
    for unit, length in (("days", 86400), ("h", 3600)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else "a minute"
