"""Options that several commands share, each declared once, for config classes to inherit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlkv.cache import CacheSettings
    from rlkv.eviction.base import EvictionPolicy
    from rlkv.gates.head_gates import HeadGates
    from rlkv.rollout.base import SamplingParams


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, and how it is loaded."""

    model: str = "tiny"
    """a built-in name (tiny, smol, smollm2), a local folder, a GGUF file or a hub id"""
    dtype: str = "auto"
    """auto (bfloat16 on a GPU, float32 on a CPU), fast (also bfloat16 on a CPU that multiplies it),
    float32, bfloat16 or float16
    """
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the model as :func:`rlkv.models.loading.load_model` does."""
        from rlkv.models.loading import load_model

        return load_model(self.model, self.dtype, self.device)


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Sizes of compressible heads without an eviction policy, and how the prompt is read."""

    sink: int | None = None
    """first tokens that a compressible head keeps; default: what the gates file says, else 16"""
    window: int | None = None
    """last tokens that a compressible head keeps; default: what the gates file says, else 64"""
    protect_prompt: bool | None = None
    """--protect-prompt or --no-protect-prompt: if compressible heads keep the whole prompt too;
    default: what the gates file says, else not
    """
    prefill: Literal["full", "local", "published"] = "full"
    """full: every head reads the whole prompt and is compressed afterwards; local: as in training.

    Published: full but for its last 50 tokens, which are decoded, as in the evaluation of RLKV
    """

    def cache_settings(
        self,
        gates: Mapping[str, HeadGates],
        eviction: EvictionPolicy | None = None,
        evict_from: str = "compressible",
    ) -> CacheSettings:
        """Return sizes as given, else what the gates files say (all the same), else the defaults.

        In the heads of an ``eviction`` policy, which has a field of its own for it, the prompt is
        not protected here.

        Raises:
            ValueError: if a size is not given and the gates files, by name, say different ones.
        """
        from rlkv.cache import CacheSettings

        found = {}
        for name in ("sink", "window", "protect_prompt"):
            given = getattr(self, name)
            stated = {file: of.serving()[name] for file, of in gates.items()}
            if given is None and len(set(stated.values())) > 1:
                values = ", ".join(f"{file} {value}" for file, value in stated.items())
                raise ValueError(
                    f"the gates files state different values of {name} for serving ({values}): "
                    f"pass --{name.replace('_', '-')}"
                )
            default = next(iter(stated.values()), getattr(CacheSettings, name))
            found[name] = default if given is None else given
        return CacheSettings(prefill=self.prefill, **found).with_policy(eviction, evict_from)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Settings of the draws of tokens."""

    temperature: float = 0.0
    """0 is greedy decoding"""
    top_p: float = 1.0
    """nucleus sampling: share of probability that may be drawn from"""
    top_k: int = 0
    """most likely tokens that may be drawn; 0: no limit"""
    seed: int = 0
    """of all random draws"""

    def sampling_params(self, max_new_tokens: int) -> SamplingParams:
        """Return how to decode."""
        from rlkv.rollout.base import SamplingParams

        return SamplingParams(max_new_tokens, self.temperature, self.top_p, self.top_k, self.seed)


def check_least(config: Any, least: float, *names: str) -> None:
    """Raise ValueError if one of these options is given and below ``least``, or a part of it is."""
    for name in names:
        value = getattr(config, name)
        parts = value if isinstance(value, tuple) else (value,)
        option = f"--{name.replace('_', '-')}"
        if not parts:
            raise ValueError(f"{option} is empty: give numbers of at least {least}")
        for part in parts:
            if part is not None and not part >= least:
                raise ValueError(f"{option} must be at least {least}, got {part}")
