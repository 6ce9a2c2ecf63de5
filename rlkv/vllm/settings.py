"""Settings of the plugin: what the user asked for, resolved once, and what is refused.

They come as ``--additional-config '{"rlkv": {...}}'``, or as the variables ``RLKV_GATES`` and
``RLKV_SPARSITY`` for launchers whose arguments cannot be changed.  A request is resolved with the
engine's configuration: no other process needs the gates file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkv.gates.allocation import HeadAllocation, num_full_heads
from rlkv.utils.numbers import check_number, check_whole

if TYPE_CHECKING:
    from rlkv.cache.plan import CacheSettings
    from rlkv.eviction import EvictionPolicy

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")  # with rollouts
SERVED = (
    *ARCHITECTURES,
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "GraniteForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
)
MIXED = "RLKVMixed"  # before the name of an architecture: its model for rollouts
KEY = "rlkv"  # of the engine's additional_config
MIXED_KEY = "rlkv_mixed"  # likewise, for rollouts: {"sink": S, "window": W}
VARIABLES = {"gates": "RLKV_GATES", "sparsity": "RLKV_SPARSITY"}
# their scores need the keys and the last queries alone, head by head
EVICTIONS = ("rkv", "snapkv")

# how compressible heads read a prompt: all of it, or what they keep
FULL = "full"
LOCAL = "local"
PREFILLS = (LOCAL, FULL)

REALLOCATION = "head reallocation"
ROLLOUT = "a mixed-attention rollout"


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """Head reallocation: which heads are full, and what the others keep.

    Attributes:
        gates: a gates file, folder or hub address, as :meth:`rlkv.HeadGates.load` takes it; with
            ``sparsity``.
        sparsity: share of KV heads that are compressible, in [0, 1].
        full: instead of gates: one text for each layer with 1 for a full and 0 for a compressible
            head.
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

    def __post_init__(self) -> None:
        if self.full is None:
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
                "prompt in one way: use 'full' or 'local', or rlkv-infer with its own backend, "
                "which has all three"
            )
        for name, choices in (
            ("scope", ("global", "layer")),
            ("prefill", PREFILLS),
            ("protect_prompt", (None, False, True)),
        ):
            value = getattr(self, name)
            if value not in choices:
                allowed = " or ".join(str(choice) for choice in choices)
                raise ValueError(f"rlkv: {name} is {value!r}: it must be {allowed}")
        policy = self.policy()
        if policy is not None:
            self._check_eviction(policy)

    def _check_eviction(self, policy: EvictionPolicy) -> None:
        elsewhere = "rlkv-infer with its own backend"
        unserved = "is not served by the vLLM plugin"
        if self.sink is not None or self.window is not None or self.protect_prompt:
            wrong = (
                "sink, window and protect_prompt do not apply with eviction: use the policy's own "
                "fields"
            )
        elif self.prefill == FULL:
            wrong = (
                f"prefill 'full' {unserved} together with eviction, because a prompt's entries "
                f"would not fit into the buffer: use 'local', or {elsewhere}, which has both"
            )
        elif policy.name not in EVICTIONS:
            wrong = (
                f"eviction {policy.name!r} {unserved}: choose from {', '.join(EVICTIONS)}, or "
                f"{elsewhere}, which has all policies"
            )
        elif policy.budget is None:
            wrong = (
                f"eviction with ratio {unserved}, because a head would hold more the longer the "
                f"text gets: give it a budget alone, or use {elsewhere}"
            )
        elif policy.protect_prompt:
            wrong = (
                f"eviction with protect_prompt {unserved}, because when a head evicts would depend "
                f"on each request's prompt: give it a budget alone, or use {elsewhere}"
            )
        else:
            return
        raise ValueError(f"rlkv: {wrong}")

    @classmethod
    def of(cls, allocation: HeadAllocation, cache: CacheSettings) -> ServingSettings:
        """Resolve an allocation and what its compressible heads keep."""
        full = tuple("".join("01"[kept] for kept in row) for row in allocation.full.tolist())
        if cache.eviction is not None:
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
        if ranks > 1 and self.scope == "layer":
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
            self.of(asked.rounded_up(gates, ranks), cache),
            reference_tokens=self.reference_tokens,
            reference_prompt=self.reference_prompt,
        )

    @property
    def whole_prompts(self) -> bool:
        """Whether prompts must be read in one step.

        Tokens of a protected prompt see all before them in any chunks.
        """
        return self.prefill == FULL and not self.protect_prompt

    def reference(self, longest: int) -> tuple[int, int]:
        """Return the tokens of the request that memory is planned for, and of its kept prompt.

        longest: tokens of the longest text.
        """
        tokens = min(self.reference_tokens, longest)
        return tokens, min(self.reference_prompt, tokens) if self.protect_prompt else 0

    @property
    def allocation(self) -> HeadAllocation:
        """The allocation of resolved settings."""
        assert self.full is not None, "asked of resolved settings only"
        return HeadAllocation(torch.tensor([[kept == "1" for kept in row] for row in self.full]))

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


def read_request(
    additional_config: Any, environment: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """Return what was asked for, not yet checked; None if nothing was."""
    if isinstance(additional_config, Mapping) and additional_config.get(KEY) is not None:
        request = additional_config[KEY]
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
    dealt = torch.empty(ranks, layers, heads // ranks, dtype=torch.int64)
    turn = 0
    for layer, row in enumerate(full_LH.tolist()):
        own: list[list[int]] = [[] for _ in range(ranks)]
        rest = []
        for head, full in enumerate(row):
            if not full:
                rest.append(head)
                continue
            own[turn % ranks].append(head)
            turn += 1
        for rank, mine in enumerate(own):
            missing = heads // ranks - len(mine)
            mine += rest[:missing]
            rest = rest[missing:]
            dealt[rank, layer] = torch.tensor(sorted(mine))
    return dealt


# formats of quantised weights in which whole heads are known to move
_AWQ = ("awq", "awq_marlin", "auto_awq")
_GPTQ = ("gptq", "gptq_marlin", "auto_gptq")
QUANTISED = (*_AWQ, *_GPTQ, "compressed-tensors", "fp8")
# written to parameters as they are
NOT_REORDERED = ("sharded_state", "runai_streamer_sharded", "tensorizer")
# what an adapter would have to reorder
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")


def _weights(engine: Any) -> str | None:
    known = engine.quant_config is None or engine.quant_config.get_name() in QUANTISED
    return None if known else str(engine.model_config.quantization)


def _adapters(engine: Any) -> str | None:
    if engine.lora_config is None:
        return None
    named = getattr(engine.lora_config, "target_modules", None) or PROJECTIONS
    return next((name for name in named if name.rsplit(".")[-1] in PROJECTIONS), None)


def _ranks(engine: Any) -> str | None:
    heads = engine.model_config.get_total_num_kv_heads()
    ranks = engine.parallel_config.tensor_parallel_size
    even = heads % ranks == 0
    return None if even else f"{ranks} and {heads} KV heads a layer: choose a divisor of {heads}"


def _load_format(engine: Any) -> str | None:
    name = str(engine.load_config.load_format)
    return name if name in NOT_REORDERED else None


def _sliding_layers(engine: Any) -> bool:
    layers = getattr(engine.model_config.hf_text_config, "layer_types", None)
    return "sliding_attention" in (layers or ())


def _breakable_graphs(engine: Any) -> bool:
    """Whether graphs break at the engine's own operators only, which would capture host work."""
    mode = engine.compilation_config.cudagraph_mode
    captures = mode is not None and mode.name != "NONE"
    # where the engine notes its own decision
    return captures and os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH", "0") == "1"


_CONTEXT = (
    "context parallelism: leave out --decode-context-parallel-size and "
    "--prefill-context-parallel-size"
)
_SLIDING = "sliding-window layers: their heads have no full cache to reallocate"
_HYBRID = "leave it out, blocks of several kinds are what saves memory"
_GRAPHS = (
    "breakable CUDA graphs (VLLM_USE_BREAKABLE_CUDAGRAPH=1, which VLLM_BATCH_INVARIANT=1 may "
    "switch on): set VLLM_USE_BREAKABLE_CUDAGRAPH=0, or pass --enforce-eager"
)
_WEIGHTS = (
    "quantised weights of format {}, whose heads it cannot reorder: serve one of "
    f"{', '.join(QUANTISED)}, or a checkpoint in float32, bfloat16 or float16"
)
_ADAPTERS = (
    "LoRA adapters of attention, whose heads are reordered: merge the adapter into the model, or "
    "name the modules of an adapter of others with --lora-target-modules gate_proj up_proj "
    "down_proj"
)
_DTYPES = ("auto", "float16", "bfloat16", "float32")

# a setting of the engine (or what finds something in it), the values that work, and what is said
# of another one, {}
Refusal = tuple[str | Callable[[Any], Any], tuple[Any, ...], str]
_ALWAYS: tuple[Refusal, ...] = (
    (
        "parallel_config.pipeline_parallel_size",
        (1,),
        "pipeline parallelism (--pipeline-parallel-size {}): use --tensor-parallel-size",
    ),
    ("parallel_config.decode_context_parallel_size", (1,), _CONTEXT),
    ("parallel_config.prefill_context_parallel_size", (1,), _CONTEXT),
    ("speculative_config", (None,), "speculative decoding: leave out --speculative-config"),
    (
        "cache_config.cache_dtype",
        _DTYPES,
        "a quantised KV cache (--kv-cache-dtype {}): leave it at auto",
    ),
    ("kv_transfer_config", (None,), "KV connectors: leave out --kv-transfer-config"),
    (
        "cache_config.kv_offloading_size",
        (None,),
        "offloading of the KV cache: leave out --kv-offloading-size",
    ),
    (
        "model_config.hf_text_config.dual_chunk_attention_config",
        (None, {}),
        "dual chunk attention: remove dual_chunk_attention_config from the model's config",
    ),
    (_breakable_graphs, (False,), _GRAPHS),
)
REFUSALS: dict[str, tuple[Refusal, ...]] = {
    REALLOCATION: (
        *_ALWAYS,
        (_weights, (None,), _WEIGHTS),
        (_adapters, (None,), _ADAPTERS),
        (_ranks, (None,), "--tensor-parallel-size {}"),
        (
            _load_format,
            (None,),
            "--load-format {}: what it loads is not reordered, leave it at auto",
        ),
        (
            "scheduler_config.disable_hybrid_kv_cache_manager",
            (None, False),
            f"--disable-hybrid-kv-cache-manager: {_HYBRID}",
        ),
        ("cache_config.sliding_window", (None,), _SLIDING),
        (_sliding_layers, (False,), _SLIDING),
        (
            "cache_config.kv_sharing_fast_prefill",
            (False,),
            "--kv-sharing-fast-prefill: leave it out",
        ),
    ),
    # mixed attention leaves blocks and weights as they are, but its gates are those of all heads
    ROLLOUT: (
        *_ALWAYS,
        (
            "parallel_config.tensor_parallel_size",
            (1,),
            "tensor parallelism: run one engine per GPU",
        ),
    ),
}


def check_engine(vllm_config: Any, feature: str = REALLOCATION) -> None:
    """Raise ``ValueError`` for the first setting under which ``feature`` would be wrong."""
    for setting, works, refusal in REFUSALS[feature]:
        if callable(setting):
            value = setting(vllm_config)
        else:
            value = vllm_config
            for name in setting.split("."):
                value = getattr(value, name, None)
        if value not in works:
            raise ValueError(f"rlkv: {feature} does not work with {refusal.format(value)}")


def prepare_engine(vllm_config: Any) -> float | None:
    """Resolve what was asked for, and switch off what contradicts it.

    The resolved settings are noted in ``additional_config``, which reaches every process of the
    engine, and its compilation cache.

    Returns:
        The sparsity if this process reports on ``/metrics`` what is held and saved, else None.

    Raises:
        ValueError: for wrong settings, gates that do not fit the model, a model that is not served,
            and ``prefill: full`` where a prompt may be longer than a step.
    """
    model = vllm_config.model_config
    request = read_request(vllm_config.additional_config)
    if model is None or request is None or model.architecture.startswith(MIXED):
        return None
    if model.architecture not in SERVED:
        raise ValueError(
            "rlkv: head reallocation does not work with a model of architecture "
            f"{model.architecture}: serve one of {', '.join(SERVED)}, or leave the rlkv settings "
            "out"
        )
    check_engine(vllm_config)
    settings = resolve_settings(vllm_config)
    ranks = vllm_config.parallel_config.tensor_parallel_size
    found = list(settings.allocation.full.shape)
    shape = [model.hf_text_config.num_hidden_layers, model.get_total_num_kv_heads()]
    if found != shape:
        raise ValueError(
            f"rlkv: the allocation is for {found} layers and KV heads, but the model has {shape}"
        )
    # refuses an uneven allocation before any process starts
    deal_heads(settings.allocation.full, ranks)
    if isinstance(vllm_config.additional_config, dict):
        resolved = {KEY: settings.to_request()}
        vllm_config.additional_config = vllm_config.additional_config | resolved
    _adapt(vllm_config, settings, rounding(request, settings, ranks))
    # with "full" another process has resolved them, or they are not a server's
    return None if "full" in request else settings.allocation.sparsity


def resolve_settings(vllm_config: Any) -> ServingSettings:
    """Return the settings of an engine that was asked for head reallocation."""
    request = read_request(vllm_config.additional_config)
    assert request is not None
    return parse_settings(request).resolved(
        vllm_config.model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size
    )


def rounding(request: Mapping[str, Any], settings: ServingSettings, ranks: int) -> str | None:
    """Say in a sentence what equal shares of ``ranks`` ranks cost; None: nothing."""
    own = settings.allocation
    asked = request.get("sparsity")
    if ranks == 1 or asked is None or own.num_full == num_full_heads(asked, own.full.numel()):
        return None
    return (
        f"sparsity {own.sparsity:.4f} instead of {asked}: {own.num_full} of {own.full.numel()} KV "
        f"heads are full, a multiple of the {ranks} ranks"
    )


def _adapt(vllm_config: Any, settings: ServingSettings, rounded: str | None) -> None:
    """Switch off what is on by default and contradicts the settings, with a warning each."""
    from vllm.logger import init_logger

    logger = init_logger(f"vllm.{__name__}")
    cache = vllm_config.cache_config
    scheduler = vllm_config.scheduler_config
    if rounded:
        logger.warning("rlkv: %s", rounded)
    if settings.whole_prompts:
        _check_steps(scheduler, vllm_config.model_config.max_model_len)
        if scheduler.enable_chunked_prefill or scheduler.long_prefill_token_threshold:
            scheduler.enable_chunked_prefill = False
            scheduler.long_prefill_token_threshold = 0
            logger.warning(
                "rlkv: prefill 'full' reads every prompt in one step, so chunked prefill is "
                "switched off"
            )
    if cache.enable_prefix_caching and (settings.whole_prompts or settings.eviction):
        cache.enable_prefix_caching = False
        read = "cached answers were not read in full"
        why = "eviction keeps no prefixes" if settings.eviction else read
        logger.warning("rlkv: %s, so prefix caching is switched off", why)


def _check_steps(scheduler: Any, longest: int) -> None:
    for name in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
        tokens = getattr(scheduler, name, None)
        if tokens is not None and tokens < longest:
            raise ValueError(
                f"rlkv: prefill 'full' reads every prompt in one step, but a step has {tokens:,} "
                f"tokens and a text up to {longest:,}: raise --{name.replace('_', '-')}, lower "
                "--max-model-len, or use prefill 'local'"
            )
