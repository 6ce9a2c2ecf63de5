"""Settings of the plugin: what the user asked for, resolved once, and what is refused.

They come as ``--additional-config '{"rlkv": {...}}'``, or as the variables ``RLKV_GATES`` and
``RLKV_SPARSITY`` for launchers whose arguments cannot be changed.  A request is resolved with the
engine's configuration: no other process needs the gates file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkv.gates.allocation import HeadAllocation
from rlkv.utils.numbers import check_number, check_whole

if TYPE_CHECKING:
    from rlkv.cache.plan import CacheSettings
    from rlkv.eviction import EvictionPolicy

LEARNED_SINKS = "GptOssForCausalLM"
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")  # with rollouts
SERVED = (
    *ARCHITECTURES,
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "GraniteForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen3MoeForCausalLM",
    # hybrids, with sliding windows
    "Exaone4ForCausalLM",
    "Gemma3ForCausalLM",
    LEARNED_SINKS,
    # with linear layers
    "GraniteMoeHybridForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
)
KEY = "rlkv"  # of the engine's additional_config
MIXED_KEY = "rlkv_mixed"  # likewise, of rollouts: {"sink": S, "window": W}
VARIABLES = {"gates": "RLKV_GATES", "sparsity": "RLKV_SPARSITY"}
CHECK = "RLKV_CHECK"  # likewise: compare what is read with the settings (rlkv.vllm.check)
# their scores need only the keys and the last queries, head by head
EVICTIONS = ("rkv", "snapkv")
TEMPERATURES = (0.01, 2.0)  # that the engine draws at: below it would take the least in silence


def check_temperature(temperature: float) -> None:
    """Raise ValueError for one that the engine does not draw at; 0 is greedy."""
    least, most = TEMPERATURES
    if temperature > 0 and not least <= temperature <= most:
        raise ValueError(
            f"vLLM draws at temperatures from {least} to {most:g}, not {temperature}: take one of "
            "these, or decode with transformers (hf)"
        )


# how compressible heads read a prompt: all of it, or what they keep
FULL = "full"
LOCAL = "local"
PREFILLS = (LOCAL, FULL)

# what head reallocation saves: bytes that are held, bytes that are read, bytes that drafts read
MEMORY = "memory"
KEEP = "keep"
LOSSLESS = "lossless"

ELSEWHERE = "transformers (rlkv-infer --backend hf, rlkv-eval --engine hf)"
REALLOCATION = "head reallocation"
KEEPING = "mode 'keep'"
DRAFTING = "mode 'lossless'"
ROLLOUT = "a mixed-attention rollout"


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """Head reallocation: which heads are full, and what the others keep.

    Attributes:
        gates: a gates file, folder or hub address, as :meth:`rlkv.HeadGates.load` takes it; with
            ``sparsity``.
        sparsity: share of KV heads that are compressible, in [0, 1].
        full: instead of gates: one text for each layer with 1 for a full and 0 for a compressible
            head; empty for a layer without gates.
        sink, window: tokens that a compressible head keeps; default: what the gates file states
            for deployment.
        scope: ``global`` or ``layer``, as in :meth:`rlkv.HeadAllocation.from_gates`.
        prefill: ``local``: prompt tokens see what a compressible head keeps, like generated ones.
            ``full``: they see everything before them (sinks and window only).
        reference_tokens: the length of a request for which memory is planned and reported.
        reference_prompt: the length of its prompt, where prompts are protected.
        eviction: instead of sinks and a window: name and fields of a policy, as
            :func:`rlkv.eviction.make_policy` takes them, such as ``{"name": "rkv", "budget":
            256}``.
        protect_prompt: compressible heads also keep every token of the prompt (sinks and window
            only); default: what the gates file states for deployment.
        aligned_windows: compressible heads see the whole blocks that hold sinks and window, which
            stock kernels read without a mask, instead of exactly these tokens.
        mode: ``memory``: compressible heads hold less.  ``keep``: all heads hold everything, in the
            engine's own blocks, and compressible ones read less (aligned windows only).
            ``lossless``: they read less while they draft for the served model itself, which
            verifies with all heads (``--speculative-config`` with method ``draft_model``).
        keep_prompt_window: while a request runs, compressible heads also keep the window at whose
            end a request with the same prompt can go on (prefix caching of sinks and window
            only); default: whether prefixes are cached.
    """

    gates: str | None = None
    sparsity: float | None = None
    full: tuple[str, ...] | None = None
    sink: int | None = None
    window: int | None = None
    scope: str = "global"
    prefill: str = LOCAL
    reference_tokens: int = 3000
    reference_prompt: int = 256
    eviction: Mapping[str, Any] | None = None
    protect_prompt: bool | None = None
    aligned_windows: bool | None = None
    mode: str = MEMORY
    keep_prompt_window: bool | None = None

    def __post_init__(self) -> None:
        if self.full is not None:
            for name in ("gates", "sparsity"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"rlkv: full says which heads are full, and so does {name}: give only one"
                    )
            self._check_full(self.full)
        else:
            check_number("rlkv: sparsity", self.sparsity, 0, 1)
            if not isinstance(self.gates, str) or not self.gates:
                raise ValueError(f"rlkv: gates is {self.gates!r}: it must be a gates file's path")
        for name, least in (("sink", 0), ("window", 1)):
            if getattr(self, name) is not None:
                check_whole(f"rlkv: {name}", getattr(self, name), least)
        for name in ("reference_tokens", "reference_prompt"):
            check_whole(f"rlkv: {name}", getattr(self, name), 1)
        if self.prefill == "published":
            raise ValueError(
                "rlkv: prefill 'published' is not served by the vLLM plugin, whose steps read a "
                f"prompt in one way: use 'full' or 'local', or {ELSEWHERE}, which has all three"
            )
        for name, choices in (
            ("scope", ("global", "layer")),
            ("prefill", PREFILLS),
            ("protect_prompt", (None, False, True)),
            ("aligned_windows", (None, False, True)),
            ("mode", (MEMORY, KEEP, LOSSLESS)),
            ("keep_prompt_window", (None, False, True)),
        ):
            value = getattr(self, name)
            # 0 and 1 are equal to False and True
            if value not in choices or type(value) not in map(type, choices):
                allowed = " or ".join(str(choice) for choice in choices)
                raise ValueError(f"rlkv: {name} is {value!r}: it must be {allowed}")
        if self.keeps and self.aligned_windows is False:
            raise ValueError(
                f"rlkv: {self.feature} reads whole blocks: leave aligned_windows out, or use mode "
                "'memory'"
            )
        if self.keeps and self.keep_prompt_window:
            raise ValueError(
                f"rlkv: {self.feature} keeps every block: leave keep_prompt_window out, or use "
                "mode 'memory'"
            )
        if self.drafts and self.prefill == FULL:
            raise ValueError(
                "rlkv: mode 'lossless' always reads prompts in full: leave prefill out"
            )
        policy = self.policy()
        if policy is not None:
            self._check_eviction(policy)
        elif self.full is not None and None in (self.sink, self.window):
            raise ValueError(
                "rlkv: full comes without gates, which would state sink and window: give both, or "
                "eviction"
            )

    def _check_full(self, rows: Any) -> None:
        of_layers = isinstance(rows, (list, tuple)) and any(rows)
        if not of_layers or not all(isinstance(row, str) and set(row) <= {*"01"} for row in rows):
            raise ValueError(
                f"rlkv: full is {rows!r}: it must be a list with a text of 0 and 1 for each layer, "
                'such as ["0110", "1111"]'
            )

    def _check_eviction(self, policy: EvictionPolicy) -> None:
        unserved = "is not served by the vLLM plugin"
        if self.sink is not None or self.window is not None or self.protect_prompt:
            wrong = (
                "sink, window and protect_prompt do not apply with eviction: use the policy's own "
                "fields"
            )
        elif self.keeps or self.aligned_windows:
            wrong = (
                "modes 'keep' and 'lossless', and aligned_windows, do not apply with eviction, "
                "which drops tokens one by one: leave them out"
            )
        elif self.prefill == FULL:
            wrong = (
                f"prefill 'full' {unserved} together with eviction, because a prompt's entries "
                f"would not fit into the buffer: use 'local', or {ELSEWHERE}, which has both"
            )
        elif policy.name not in EVICTIONS:
            wrong = _unserved_policy(policy.name)
        elif policy.budget is None:
            wrong = (
                f"eviction with ratio {unserved}, because a head would hold more the longer the "
                f"text gets: give it only a budget, or use {ELSEWHERE}"
            )
        elif policy.protect_prompt:
            wrong = (
                f"eviction with protect_prompt {unserved}, because when a head evicts would depend "
                f"on each request's prompt: give it only a budget, or use {ELSEWHERE}"
            )
        else:
            return
        raise ValueError(f"rlkv: {wrong}")

    @classmethod
    def of(cls, allocation: HeadAllocation, cache: CacheSettings) -> ServingSettings:
        """Resolve an allocation and what its compressible heads keep.

        Raises:
            ValueError: if full heads evict, or by a policy that is not served.
        """
        if cache.policy_of(True) is not None:
            raise ValueError(
                "rlkv: a policy that evicts from full heads is not served: decode with "
                "transformers, or let it evict from compressible heads"
            )
        rows = zip(allocation.full.tolist(), allocation.gated.sum(1).tolist(), strict=True)
        full = tuple("".join("01"[kept] for kept in row[:heads]) for row, heads in rows)
        if cache.eviction is not None:
            # before its fields are options again, which those of others would not pass
            if cache.eviction.name not in EVICTIONS:
                raise ValueError(f"rlkv: {_unserved_policy(cache.eviction.name)}")
            return cls(full=full, prefill=cache.prefill, eviction=cache.eviction.describe())
        return cls(
            full=full,
            sink=cache.sink,
            window=cache.window,
            prefill=cache.prefill,
            protect_prompt=cache.protect_prompt or None,
        )

    def resolved(self, config: Any, ranks: int = 1) -> ServingSettings:
        """Return the same with an allocation, sink and window in the place of gates.

        Args:
            config: the model's, of transformers.
            ranks: of tensor parallelism, to which full heads are dealt evenly.
        """
        if self.full is not None:
            return self
        from rlkv.cache.plan import CacheSettings
        from rlkv.gates.head_gates import HeadGates

        assert self.gates is not None
        assert self.sparsity is not None
        if ranks > 1 and self.scope == "layer" and not self.keeps:
            raise ValueError(
                "rlkv: scope 'layer' is not served with tensor parallelism: leave it out, or use "
                "one rank"
            )
        gates = HeadGates.load(self.gates)
        gates.check_model(config)
        asked = HeadAllocation.from_gates(gates, self.sparsity, self.scope)
        sizes = gates.serving(
            sink=self.sink, window=self.window, protect_prompt=self.protect_prompt
        )
        cache = CacheSettings(prefill=self.prefill, **sizes).with_policy(self.policy())
        return replace(
            self.of(asked if self.keeps else asked.rounded_up(gates, ranks), cache),
            reference_tokens=self.reference_tokens,
            reference_prompt=self.reference_prompt,
            aligned_windows=self.aligned_windows,
            mode=self.mode,
            keep_prompt_window=self.keep_prompt_window,
        )

    @property
    def keeps(self) -> bool:
        """True if all heads hold everything."""
        return self.mode != MEMORY

    @property
    def drafts(self) -> bool:
        """True if compressible heads read less only in drafts."""
        return self.mode == LOSSLESS

    @property
    def feature(self) -> str:
        """Name in refusals of what was asked for."""
        return {MEMORY: REALLOCATION, KEEP: KEEPING, LOSSLESS: DRAFTING}[self.mode]

    @property
    def whole_prompts(self) -> bool:
        """True if prompts must be read in one step.

        Tokens of a protected prompt see all before them in any chunks.
        """
        return self.prefill == FULL and not self.protect_prompt

    def reference(self, longest: int) -> tuple[int, int]:
        """Return the tokens of the request that memory is planned for, and of its kept prompt.

        longest: tokens of the longest text.
        """
        tokens = min(self.reference_tokens, longest)
        kept = self.protect_prompt or self.keep_prompt_window
        return tokens, min(self.reference_prompt, tokens) if kept else 0

    @property
    def allocation(self) -> HeadAllocation:
        """The allocation of resolved settings."""
        assert self.full is not None, "asked of resolved settings only"
        heads = [len(row) for row in self.full]
        rows = [[kept == "1" for kept in row.ljust(max(heads), "1")] for row in self.full]
        return HeadAllocation(torch.tensor(rows), heads)

    @property
    def full_LH(self) -> Tensor:
        """The full heads of resolved settings, only of the layers with gates."""
        allocation = self.allocation
        return allocation.full[allocation.gated.any(1)]

    def policy(self) -> EvictionPolicy | None:
        """Make the policy of compressible heads; None: they keep sinks and a window."""
        if self.eviction is None:
            return None
        from rlkv.eviction import make_policy

        if not isinstance(self.eviction, Mapping) or not isinstance(self.eviction.get("name"), str):
            raise ValueError(
                'rlkv: eviction must be a mapping with the name of a policy, such as {"name": '
                f'"rkv", "budget": 256}}, got {self.eviction!r}'
            )
        try:
            return make_policy(**self.eviction)
        except ValueError as error:
            raise ValueError(f"rlkv: eviction: {error}") from None

    def to_request(self) -> dict[str, Any]:
        """Return a request that :func:`parse_settings` takes back."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def _unserved_policy(name: str) -> str:
    return (
        f"eviction {name!r} is not served by the vLLM plugin: choose from {', '.join(EVICTIONS)}, "
        f"or {ELSEWHERE}, which has all policies"
    )


def asks_for_rollout(additional_config: Any) -> bool:
    """Return whether an engine samples with mixed attention."""
    return isinstance(additional_config, Mapping) and MIXED_KEY in additional_config


def asks_for_check() -> bool:
    """Return whether what is read shall be compared with the settings."""
    return os.environ.get(CHECK, "0") not in ("", "0")


def read_request(
    additional_config: Any, environment: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """Return what was asked for, not yet checked; None if nothing was, or None itself."""
    if isinstance(additional_config, Mapping) and KEY in additional_config:
        request = additional_config[KEY]
        if request is None:
            return None
        if not isinstance(request, Mapping):
            raise ValueError(
                f'additional_config["{KEY}"] must be a mapping such as {{"gates": ...}}, got '
                f"{request!r}"
            )
        return dict(request)
    environment = os.environ if environment is None else environment
    found = {key: environment[name] for key, name in VARIABLES.items() if environment.get(name)}
    if not found:
        return None
    for key, name in VARIABLES.items():
        if key not in found:
            raise ValueError(f"{name} is missing: RLKV_GATES and RLKV_SPARSITY go together")
    try:
        return {"gates": found["gates"], "sparsity": float(found["sparsity"])}
    except ValueError:
        raise ValueError(
            f"RLKV_SPARSITY must be a number in [0, 1], got {found['sparsity']!r}"
        ) from None


def parse_settings(request: Mapping[str, Any]) -> ServingSettings:
    """Check a request for head reallocation.

    Raises:
        ValueError: for unknown and missing keys and bad values, by name.
    """
    known = sorted(field.name for field in fields(ServingSettings))
    for name in sorted(request):
        if name not in known:
            raise ValueError(f"rlkv: unknown setting {name!r}: choose from {', '.join(known)}")
    for name in ("gates", "sparsity"):
        if name not in request and "full" not in request:
            raise ValueError(f"rlkv: {name} is missing: both gates and sparsity are needed")
    return ServingSettings(**request)


def resolve_settings(vllm_config: Any) -> ServingSettings:
    """Return the settings of an engine that was asked for head reallocation."""
    request = read_request(vllm_config.additional_config)
    assert request is not None
    return parse_settings(request).resolved(
        vllm_config.model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size
    )


def deal_heads(full_LH: Tensor, ranks: int) -> Tensor:
    """Deal the KV heads of every layer to ranks.

    The full heads of all layers go to the ranks in turn.  So a layer's are even to within one,
    which leaves room for them, and the model's are exactly even.  The compressible ones fill every
    rank up.

    Args:
        full_LH: True for full heads; their number and H must be multiples of ``ranks``.

    Returns:
        Numbers in the checkpoint, ascending, int64 ``[ranks, L, H / ranks]``.

    Raises:
        ValueError: if the number of full heads is not a multiple of ``ranks``.
    """
    layers, heads = full_LH.shape
    assert heads % ranks == 0, "checked with the engine's settings"
    if int(full_LH.sum()) % ranks:
        raise ValueError(
            f"rlkv: {int(full_LH.sum())} full heads are not spread evenly over {ranks} ranks of "
            f"tensor parallelism: choose an allocation with a multiple of {ranks} full heads, or "
            "give gates and a sparsity, which is rounded down"
        )
    # the rank of each head, if it is full
    turn_LH = (full_LH.flatten().cumsum(0) - 1).view_as(full_LH) % ranks
    dealt = torch.empty(ranks, layers, heads // ranks, dtype=torch.int64)
    for layer, full_H in enumerate(full_LH):
        rest = (~full_H).nonzero()[:, 0]
        for rank in range(ranks):
            own = (full_H & (turn_LH[layer] == rank)).nonzero()[:, 0]
            missing = heads // ranks - len(own)
            dealt[rank, layer] = torch.cat([own, rest[:missing]]).sort().values
            rest = rest[missing:]
    return dealt
