"""What the user asked the plugin to do: ``--additional-config '{"rlkv": {...}}'``, or two environment variables.

``RLKV_GATES`` and ``RLKV_SPARSITY`` are for launchers whose arguments cannot be changed.  A request is resolved once,
with the engine's configuration: no other process needs the gates file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlkv.cache.plan import CacheSettings
    from rlkv.eviction import EvictionPolicy
    from rlkv.gates.allocation import HeadAllocation

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")  # with rollouts
SERVED = (
    *ARCHITECTURES,
    *("GemmaForCausalLM", "Glm4ForCausalLM", "GraniteForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM"),
)
MIXED = "RLKVMixed"  # before the name of the architecture: the same model with mixed attention, for rollouts
KEY = "rlkv"  # of the engine's additional_config
MIXED_KEY = "rlkv_mixed"  # likewise, for rollouts: {"sink": S, "window": W}
DRAW_KEY = "rlkv_draw"  # of a request's extra_args
VARIABLES = {"gates": "RLKV_GATES", "sparsity": "RLKV_SPARSITY"}
EVICTIONS = ("rkv", "snapkv")  # their scores need the keys and the last queries, and are computed head by head


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """Head reallocation: which heads are full, and what the others keep.

    Attributes:
        gates: a gates file, folder or hub address, as :meth:`rlkv.HeadGates.load` takes it; with ``sparsity``.
        sparsity: share of KV heads that are compressible, in [0, 1].
        full: instead of gates: one text for each layer with 1 for a full and 0 for a compressible head.
        sink, window: tokens that a compressible head keeps; default: what the gates file states for deployment.
        scope: ``global`` or ``layer``, as in :meth:`rlkv.HeadAllocation.from_gates`.
        prefill: ``local``: prompt tokens see what a compressible head keeps, like generated ones. ``full``: they see
            everything before them (sinks and window only).
        reference_tokens: the length of a request for which memory is planned and reported.
        reference_prompt: the length of its prompt, where prompts are protected.
        eviction: instead of sinks and a window: name and fields of a policy, as :func:`rlkv.eviction.make_policy`
            takes them, such as ``{"name": "rkv", "budget": 256}``.
        protect_prompt: compressible heads also keep every token of the prompt (sinks and window only); default: what
            the gates file states for deployment.
    """

    gates: str | None = None
    sparsity: float | None = None
    full: tuple[str, ...] | None = None
    sink: int | None = None
    window: int | None = None
    scope: str = "global"
    prefill: str = "local"
    reference_tokens: int = 3000
    reference_prompt: int = 256
    eviction: Mapping[str, Any] | None = None
    protect_prompt: bool | None = None

    def __post_init__(self) -> None:
        if self.full is None:
            number = isinstance(self.sparsity, int | float) and not isinstance(self.sparsity, bool)
            if not number or not 0 <= self.sparsity <= 1:  # type: ignore[operator]
                raise ValueError(f"rlkv: sparsity must be a number in [0, 1], got {self.sparsity!r}")
            if not isinstance(self.gates, str) or not self.gates:
                raise ValueError(f"rlkv: gates must be the path of a gates file, got {self.gates!r}")
        for name, least in (("sink", 0), ("window", 1), ("reference_tokens", 1), ("reference_prompt", 1)):
            value = getattr(self, name)
            optional = value is None and name in ("sink", "window")
            if not optional and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"rlkv: {name} must be an integer of at least {least}, got {value!r}")
        if self.prefill == "published":
            raise ValueError(
                "rlkv: prefill 'published' is not served by the vLLM plugin, whose steps read a prompt in one way: use "
                "'full' or 'local', or rlkv-infer with its own backend, which has all three"
            )
        for name, choices in (("scope", ("global", "layer")), ("prefill", ("local", "full"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"rlkv: {name} must be {' or '.join(choices)}, got {getattr(self, name)!r}")
        if self.protect_prompt not in (None, False, True):
            raise ValueError(f"rlkv: protect_prompt must be true or false, got {self.protect_prompt!r}")
        if (policy := self.policy()) is not None:
            self._check_eviction(policy)

    def _check_eviction(self, policy: EvictionPolicy) -> None:
        if self.sink is not None or self.window is not None or self.protect_prompt:
            raise ValueError(
                "rlkv: sink, window and protect_prompt do not apply with eviction: use the policy's own fields"
            )
        if self.prefill == "full":
            raise ValueError(
                "rlkv: prefill 'full' is not served together with eviction by the vLLM plugin, because a prompt's "
                "entries would not fit into the buffer: use 'local', or rlkv-infer with its own backend, which has both"
            )
        if policy.name not in EVICTIONS:
            raise ValueError(
                f"rlkv: eviction {policy.name!r} is not served by the vLLM plugin: choose from {', '.join(EVICTIONS)}, "
                "or rlkv-infer with its own backend, which has all policies"
            )
        for wrong, field, why in (
            (policy.budget is None, "ratio", "a head would hold more the longer the text gets"),
            (policy.protect_prompt, "protect_prompt", "when a head evicts would depend on each request's prompt"),
        ):
            if wrong:
                raise ValueError(
                    f"rlkv: eviction with {field} is not served by the vLLM plugin, because {why}: give it a budget "
                    "alone, or use rlkv-infer with its own backend"
                )

    @classmethod
    def of(cls, allocation: HeadAllocation, cache: CacheSettings) -> ServingSettings:
        """Resolved settings: this allocation, and what its compressible heads keep."""
        full = tuple("".join("01"[kept] for kept in row) for row in allocation.full.tolist())
        if cache.eviction is not None:
            return cls(full=full, prefill=cache.prefill, eviction=cache.eviction.describe())
        protect = cache.protect_prompt or None
        return cls(full=full, sink=cache.sink, window=cache.window, prefill=cache.prefill, protect_prompt=protect)

    def resolved(self, config: Any, ranks: int = 1) -> ServingSettings:
        """With the allocation, sink and window instead of gates; ``config`` is the model's (transformers).

        ``ranks``: of tensor parallelism, to which full heads are dealt evenly.
        """
        if self.full is not None:
            return self
        from rlkv.cache.plan import CacheSettings
        from rlkv.gates.allocation import HeadAllocation
        from rlkv.gates.head_gates import HeadGates

        assert self.gates is not None
        assert self.sparsity is not None
        if ranks > 1 and self.scope == "layer":
            raise ValueError("rlkv: scope 'layer' is not served with tensor parallelism: leave it out, or use one rank")
        gates = HeadGates.load(self.gates)
        gates.check_model(config)
        allocation = HeadAllocation.from_gates(gates, self.sparsity, self.scope).rounded_up(gates, ranks)
        sizes = gates.serving(sink=self.sink, window=self.window, protect_prompt=self.protect_prompt)
        cache = CacheSettings(prefill=self.prefill, **sizes).with_policy(self.policy())
        resolved = self.of(allocation, cache)
        return replace(resolved, reference_tokens=self.reference_tokens, reference_prompt=self.reference_prompt)

    @property
    def whole_prompts(self) -> bool:
        """Whether prompts must be read in one step; tokens of a protected prompt see all before them in any chunks."""
        return self.prefill == "full" and not self.protect_prompt

    def reference(self, longest: int) -> tuple[int, int]:
        """Tokens of the request for which memory is planned, and how many are in a protected prompt."""
        tokens = min(self.reference_tokens, longest)
        return tokens, min(self.reference_prompt, tokens) if self.protect_prompt else 0

    @property
    def allocation(self) -> HeadAllocation:
        """Which heads are full; of resolved settings."""
        import torch

        from rlkv.gates.allocation import HeadAllocation

        assert self.full is not None, "asked of resolved settings only"
        return HeadAllocation(torch.tensor([[kept == "1" for kept in row] for row in self.full]))

    def policy(self) -> EvictionPolicy | None:
        """What compressible heads evict by; None: they keep sinks and a window."""
        if self.eviction is None:
            return None
        from rlkv.eviction import make_policy

        if not isinstance(self.eviction, Mapping) or not isinstance(self.eviction.get("name"), str):
            raise ValueError(
                'rlkv: eviction must be a mapping with the name of a policy, such as {"name": "rkv", "budget": 256}, '
                f"got {self.eviction!r}"
            )
        try:
            return make_policy(**self.eviction)
        except ValueError as error:
            raise ValueError(f"rlkv: eviction: {error}") from None

    def to_request(self) -> dict[str, Any]:
        """As :func:`parse_settings` takes it back."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def read_request(additional_config: Any, environment: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """What was asked for, not yet checked; None if nothing was."""
    if isinstance(additional_config, Mapping) and additional_config.get(KEY) is not None:
        request = additional_config[KEY]
        if not isinstance(request, Mapping):
            raise ValueError(f'additional_config["{KEY}"] must be a mapping such as {{"gates": ...}}, got {request!r}')
        return dict(request)
    environment = os.environ if environment is None else environment
    found = {key: environment[name] for key, name in VARIABLES.items() if environment.get(name)}
    if not found:
        return None
    missing = [name for key, name in VARIABLES.items() if key not in found]
    if missing:
        raise ValueError(f"{missing[0]} is missing: RLKV_GATES and RLKV_SPARSITY go together")
    try:
        return {"gates": found["gates"], "sparsity": float(found["sparsity"])}
    except ValueError:
        raise ValueError(f"RLKV_SPARSITY must be a number in [0, 1], got {found['sparsity']!r}") from None


def parse_settings(request: Mapping[str, Any]) -> ServingSettings:
    """Check a request for head reallocation: ValueError for unknown and missing keys and bad values, by name."""
    known = {field.name for field in fields(ServingSettings)}
    unknown = sorted(set(request) - known)
    if unknown:
        raise ValueError(f"rlkv: unknown setting {unknown[0]!r}: choose from {', '.join(sorted(known))}")
    missing = [name for name in ("gates", "sparsity") if name not in request and "full" not in request]
    if missing:
        raise ValueError(f"rlkv: {missing[0]} is missing: both gates and sparsity are needed")
    return ServingSettings(**request)
