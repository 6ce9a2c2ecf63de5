"""A small random Llama twice: on the device in its dtype, and on the CPU in float64 with the same
weights.

What is allowed is a multiple of the error of the *unpatched* model on the device: rounding is then
the same on both sides, and the multiple small.  Shapes: B rows, T tokens, V tokens of the
vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, LlamaForCausalLM, PreTrainedModel

from rlkv.benchmarks.agreement import relative_error
from rlkv.benchmarks.check.one import Findings, Setting
from rlkv.benchmarks.common import LlamaSizes

FACTOR = 2.0  # 0.97 to 1.05 were measured on a CPU in bfloat16
LEAST = 1e-5  # of what is allowed: in float32 the order of additions decides
SINK, WINDOW = 4, 16
ON_GPU = LlamaSizes(
    layers=3, hidden=256, intermediate=512, query_heads=8, kv_heads=2, head_dim=128, vocabulary=512
)
ON_CPU = LlamaSizes(
    layers=2, hidden=64, intermediate=96, query_heads=8, kv_heads=2, head_dim=16, vocabulary=128
)


@dataclass(frozen=True)
class Texts:
    """Token ids and real tokens ``[B, T]``, int64 and bool.

    The first ``prompt`` columns are read in one call.
    """

    ids: Tensor
    real: Tensor
    prompt: int

    @classmethod
    def draw(cls, sizes: LlamaSizes, length: int, prompt: int, padding: tuple[int, ...]) -> Texts:
        """Random ones, with so many columns of ``padding`` on the left of each row."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, sizes.vocabulary, (len(padding), length), generator=generator)
        return cls(ids, torch.arange(length) >= torch.tensor(padding)[:, None], prompt)

    def call(self, begin: int, end: int, device: torch.device) -> dict[str, Tensor]:
        """What a model takes to read the columns from ``begin`` to ``end`` after those before."""
        positions = (self.real.long().cumsum(-1) - 1).clamp(min=0)
        mask = self.real[:, :end].long()
        call = {
            "input_ids": self.ids[:, begin:end],
            "attention_mask": mask,
            "position_ids": positions[:, begin:end],
        }
        return {name: tensor.to(device) for name, tensor in call.items()}


@dataclass(frozen=True)
class Twins:
    """``own``: on the device; ``exact``: on the CPU in float64, with its weights."""

    own: PreTrainedModel
    exact: PreTrainedModel
    sizes: LlamaSizes

    @classmethod
    def make(cls, setting: Setting) -> Twins:
        sizes = ON_GPU if setting.on_gpu else ON_CPU
        config = sizes.llama(1024)
        config.initializer_range = 0.05  # attention is far from uniform
        torch.manual_seed(0)
        own: Any = LlamaForCausalLM(config)
        own = own.to(setting.dtype).eval()
        exact: Any = copy.deepcopy(own).double()
        return cls(own.to(setting.device), exact, sizes)

    def texts(self) -> list[Texts]:
        """One row alone, and three rows of which two are padded."""
        length, prompt = (200, 150) if self.own.device.type == "cuda" else (60, 40)
        return [Texts.draw(self.sizes, length, prompt, padding) for padding in ((0,), (0, 9, 31))]


@torch.inference_mode()
def read_at_once(model: Any, texts: Texts, mask: Tensor | None = None) -> Tensor:
    """Logits ``[B, T, V]`` of one call; ``mask``: bool ``[B, 1, T, T]`` instead of the padding."""
    call = texts.call(0, texts.ids.shape[1], model.device)
    if mask is not None:
        call["attention_mask"] = mask
    return model(**call, use_cache=False).logits


@torch.inference_mode()
def read_by_tokens(model: Any, texts: Texts, cache: Cache) -> Tensor:
    """Logits ``[B, T, V]`` of a call with the prompt and calls of one token, on top of ``cache``."""
    ends = [0, *range(texts.prompt, texts.ids.shape[1] + 1)]
    calls = [texts.call(begin, end, model.device) for begin, end in pairwise(ends)]
    return torch.cat(
        [model(**call, past_key_values=cache, use_cache=True).logits for call in calls], dim=1
    )


def error_of(logits: Tensor, wanted: Tensor, texts: Texts) -> float:
    """Relative error over the real tokens."""
    return relative_error(logits.cpu()[texts.real], wanted[texts.real])


def compare(found: Findings, name: str, error: float, stock: float) -> None:
    """Note the error of what ``name`` says, and a problem if it is more than allowed for the
    ``stock`` error.
    """
    allowed = max(FACTOR * stock, LEAST)
    found.details.append({"compared": name, "error": error, "allowed": allowed})
    # not even an infinite stock error allows one that is infinite
    found.require(
        error <= allowed < torch.inf, f"{name}: relative error {error:.2g}, allowed {allowed:.2g}"
    )


def summarise(found: Findings) -> None:
    """The largest of the errors that were noted, and the least allowed one."""
    found.figures["compared"] = len(found.details)
    found.figures["largest error"] = max(row["error"] for row in found.details)
    found.figures["least allowed"] = min(row["allowed"] for row in found.details)
