"""What the user asked the plugin to do:

``--additional-config '{"rlkv": {...}}'``, or two environment variables.

``RLKV_GATES`` and ``RLKV_SPARSITY`` are for launchers whose arguments cannot be changed.  A request
is resolved once, with the engine's configuration: no other process needs the gates file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkv.gates.allocation import num_full_heads

if TYPE_CHECKING:
    from rlkv.cache.plan import CacheSettings
    from rlkv.eviction import EvictionPolicy
    from rlkv.gates.allocation import HeadAllocation


def deal_heads(full_LH: Tensor, ranks: int) -> Tensor:
    """KV heads of each rank, ``[ranks, L, H / ranks]``, by their numbers in the checkpoint,
    ascending.

    The full heads of all layers go to the ranks in turn.  So a layer's are even to within one,
    which leaves room for them, and the model's are exactly even.  The compressible ones fill every
    rank up.

    Args:
        full_LH: True for full heads; their number and H must be multiples of ``ranks``.

    Raises:
        ValueError: if the number of full heads is not.
    """
    layers, heads = full_LH.shape
    assert heads % ranks == 0, "checked with the engine's settings"
    if int(full_LH.sum()) % ranks:
        raise ValueError(
            f"rlkv: {int(full_LH.sum())} full heads are not spread evenly over {ranks} ranks of "
            "tensor parallelism: "
            f"choose an allocation with a multiple of {ranks} full heads, or give gates and a "
            "sparsity, which "
            "is rounded down"
        )
    dealt = torch.empty(ranks, layers, heads // ranks, dtype=torch.int64)
    turn = 0
    for layer, row in enumerate(full_LH.tolist()):
        own: list[list[int]] = [[] for _ in range(ranks)]
        for head in (head for head, full in enumerate(row) if full):
            own[turn % ranks].append(head)
            turn += 1
        rest = iter(head for head, full in enumerate(row) if not full)
        for rank, mine in enumerate(own):
            mine.extend(next(rest) for _ in range(heads // ranks - len(mine)))
            dealt[rank, layer] = torch.tensor(sorted(mine))
    return dealt


ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")  # with rollouts
SERVED = (
    *ARCHITECTURES,
    *(
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "GraniteForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
    ),
)
# before the name of the architecture: the same model with mixed attention, for rollouts
MIXED = "RLKVMixed"
KEY = "rlkv"  # of the engine's additional_config
MIXED_KEY = "rlkv_mixed"  # likewise, for rollouts: {"sink": S, "window": W}
DRAW_KEY = "rlkv_draw"  # of a request's extra_args
VARIABLES = {"gates": "RLKV_GATES", "sparsity": "RLKV_SPARSITY"}
EVICTIONS = (
    "rkv",
    "snapkv",
)  # their scores need the keys and the last queries, and are computed head by head


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """Head reallocation: which heads are full, and what the others keep.

    Attributes:
        gates: a gates file, folder or hub address, as :meth:`rlkv.HeadGates.load` takes it; with
            ``sparsity``.
        sparsity: share of KV heads that are compressible, in [0, 1].
        full: instead of gates: one text for each layer with 1 for a full and 0 for a compressible
        head. sink, window: tokens that a compressible head keeps; default: what the gates file
        states for deployment.
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
    prefill: str = "local"
    reference_tokens: int = 3000
    reference_prompt: int = 256
    eviction: Mapping[str, Any] | None = None
    protect_prompt: bool | None = None

    def __post_init__(self) -> None:
        if self.full is None:
            number = isinstance(self.sparsity, int | float) and not isinstance(self.sparsity, bool)
            if not number or not 0 <= self.sparsity <= 1:  # type: ignore[operator]
                raise ValueError(
                    f"rlkv: sparsity must be a number in [0, 1], got {self.sparsity!r}"
                )
            if not isinstance(self.gates, str) or not self.gates:
                raise ValueError(
                    f"rlkv: gates must be the path of a gates file, got {self.gates!r}"
                )
        for name, least in (
            ("sink", 0),
            ("window", 1),
            ("reference_tokens", 1),
            ("reference_prompt", 1),
        ):
            value = getattr(self, name)
            optional = value is None and name in ("sink", "window")
            if not optional and (
                not isinstance(value, int) or isinstance(value, bool) or value < least
            ):
                raise ValueError(
                    f"rlkv: {name} must be an integer of at least {least}, got {value!r}"
                )
        if self.prefill == "published":
            raise ValueError(
                "rlkv: prefill 'published' is not served by the vLLM plugin, whose steps read a "
                "prompt in one way: use "
                "'full' or 'local', or rlkv-infer with its own backend, which has all three"
            )
        for name, choices in (("scope", ("global", "layer")), ("prefill", ("local", "full"))):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"rlkv: {name} must be {' or '.join(choices)}, got {getattr(self, name)!r}"
                )
        if self.protect_prompt not in (None, False, True):
            raise ValueError(
                f"rlkv: protect_prompt must be true or false, got {self.protect_prompt!r}"
            )
        if (policy := self.policy()) is not None:
            self._check_eviction(policy)

    def _check_eviction(self, policy: EvictionPolicy) -> None:
        if self.sink is not None or self.window is not None or self.protect_prompt:
            raise ValueError(
                "rlkv: sink, window and protect_prompt do not apply with eviction: use the "
                "policy's own fields"
            )
        if self.prefill == "full":
            raise ValueError(
                "rlkv: prefill 'full' is not served together with eviction by the vLLM plugin, "
                "because a prompt's "
                "entries would not fit into the buffer: use 'local', or rlkv-infer with its own "
                "backend, which has both"
            )
        if policy.name not in EVICTIONS:
            raise ValueError(
                f"rlkv: eviction {policy.name!r} is not served by the vLLM plugin: choose from "
                f"{', '.join(EVICTIONS)}, "
                "or rlkv-infer with its own backend, which has all policies"
            )
        for wrong, field, why in (
            (policy.budget is None, "ratio", "a head would hold more the longer the text gets"),
            (
                policy.protect_prompt,
                "protect_prompt",
                "when a head evicts would depend on each request's prompt",
            ),
        ):
            if wrong:
                raise ValueError(
                    f"rlkv: eviction with {field} is not served by the vLLM plugin, because {why}: "
                    "give it a budget "
                    "alone, or use rlkv-infer with its own backend"
                )

    @classmethod
    def of(cls, allocation: HeadAllocation, cache: CacheSettings) -> ServingSettings:
        """Resolved settings: this allocation, and what its compressible heads keep."""
        full = tuple("".join("01"[kept] for kept in row) for row in allocation.full.tolist())
        if cache.eviction is not None:
            return cls(full=full, prefill=cache.prefill, eviction=cache.eviction.describe())
        protect = cache.protect_prompt or None
        return cls(
            full=full,
            sink=cache.sink,
            window=cache.window,
            prefill=cache.prefill,
            protect_prompt=protect,
        )

    def resolved(self, config: Any, ranks: int = 1) -> ServingSettings:
        """With the allocation, sink and window instead of gates.

        ``config`` is the model's (transformers).

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
            raise ValueError(
                "rlkv: scope 'layer' is not served with tensor parallelism: leave it out, or use "
                "one rank"
            )
        gates = HeadGates.load(self.gates)
        gates.check_model(config)
        allocation = HeadAllocation.from_gates(gates, self.sparsity, self.scope).rounded_up(
            gates, ranks
        )
        sizes = gates.serving(
            sink=self.sink, window=self.window, protect_prompt=self.protect_prompt
        )
        cache = CacheSettings(prefill=self.prefill, **sizes).with_policy(self.policy())
        resolved = self.of(allocation, cache)
        return replace(
            resolved, reference_tokens=self.reference_tokens, reference_prompt=self.reference_prompt
        )

    @property
    def whole_prompts(self) -> bool:
        """Whether prompts must be read in one step.

        Tokens of a protected prompt see all before them in any chunks.
        """
        return self.prefill == "full" and not self.protect_prompt

    def reference(self, longest: int) -> tuple[int, int]:
        """Tokens of the request for which memory is planned, and how many are in a protected
        prompt.
        """
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
                'rlkv: eviction must be a mapping with the name of a policy, such as {"name": '
                '"rkv", "budget": 256}, '
                f"got {self.eviction!r}"
            )
        try:
            return make_policy(**self.eviction)
        except ValueError as error:
            raise ValueError(f"rlkv: eviction: {error}") from None

    def to_request(self) -> dict[str, Any]:
        """As :func:`parse_settings` takes it back."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def read_request(
    additional_config: Any, environment: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """What was asked for, not yet checked; None if nothing was."""
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
    missing = [name for key, name in VARIABLES.items() if key not in found]
    if missing:
        raise ValueError(f"{missing[0]} is missing: RLKV_GATES and RLKV_SPARSITY go together")
    try:
        return {"gates": found["gates"], "sparsity": float(found["sparsity"])}
    except ValueError:
        raise ValueError(
            f"RLKV_SPARSITY must be a number in [0, 1], got {found['sparsity']!r}"
        ) from None


def parse_settings(request: Mapping[str, Any]) -> ServingSettings:
    """Check a request for head reallocation:

    ValueError for unknown and missing keys and bad values, by name.
    """
    known = {field.name for field in fields(ServingSettings)}
    unknown = sorted(set(request) - known)
    if unknown:
        raise ValueError(
            f"rlkv: unknown setting {unknown[0]!r}: choose from {', '.join(sorted(known))}"
        )
    missing = [
        name for name in ("gates", "sparsity") if name not in request and "full" not in request
    ]
    if missing:
        raise ValueError(f"rlkv: {missing[0]} is missing: both gates and sparsity are needed")
    return ServingSettings(**request)


# formats of quantised weights in which whole heads are known to move
QUANTISED = (
    "awq",
    "awq_marlin",
    "auto_awq",
    "gptq",
    "gptq_marlin",
    "auto_gptq",
    "compressed-tensors",
    "fp8",
)
NOT_REORDERED = (
    "sharded_state",
    "runai_streamer_sharded",
    "tensorizer",
)  # written to parameters as they are
PROJECTIONS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "o_proj",
)  # what an adapter would have to reorder


def prepare_engine(vllm_config: Any) -> float | None:
    """Resolve what was asked for, note it in ``additional_config``, and switch off what contradicts
    it.

    The note reaches every process of the engine, and its compilation cache.  ValueError for wrong
    settings, gates that do not fit the model, a model that is not served, and ``prefill: full``
    where a prompt may be longer than a step. Returns the sparsity if this process reports on
    ``/metrics`` what is held and saved, else None.
    """
    model, request = vllm_config.model_config, read_request(vllm_config.additional_config)
    if model is None or request is None or model.architecture.startswith(MIXED):
        return None
    if model.architecture not in SERVED:
        raise ValueError(
            "rlkv: head reallocation does not work with a model of architecture "
            f"{model.architecture}: serve one of "
            f"{', '.join(SERVED)}, or leave the rlkv settings out"
        )
    check_engine(vllm_config)
    settings, ranks = (
        resolve_settings(vllm_config),
        vllm_config.parallel_config.tensor_parallel_size,
    )
    check_shape(settings, model)
    deal_heads(
        settings.allocation.full, ranks
    )  # refuses an uneven allocation before any process starts
    if isinstance(vllm_config.additional_config, dict):
        vllm_config.additional_config = {
            **vllm_config.additional_config,
            KEY: settings.to_request(),
        }
    _adapt(vllm_config, settings, rounding(request, settings, ranks))
    # with "full" another process has resolved them, or they are not a server's
    return None if "full" in request else settings.allocation.sparsity


def check_shape(settings: ServingSettings, model: Any) -> None:
    """Raise ``ValueError`` unless the allocation is for a model (vLLM's config) of this shape."""
    found = list(settings.allocation.full.shape)
    shape = [model.hf_text_config.num_hidden_layers, model.get_total_num_kv_heads()]
    if found != shape:
        raise ValueError(
            f"rlkv: the allocation is for {found} layers and KV heads, but the model has {shape}"
        )


def rounding(request: Mapping[str, Any], settings: ServingSettings, ranks: int) -> str | None:
    """What equal shares of ``ranks`` ranks cost, in a sentence; None: nothing, or an allocation was
    asked for.
    """
    own, asked = settings.allocation, request.get("sparsity")
    if ranks == 1 or asked is None or own.num_full == num_full_heads(asked, own.full.numel()):
        return None
    return (
        f"sparsity {own.sparsity:.4f} instead of {asked}: {own.num_full} of {own.full.numel()} KV "
        "heads are full, a "
        f"multiple of the {ranks} ranks"
    )


def resolve_settings(vllm_config: Any) -> ServingSettings:
    """The settings of an engine that was asked for head reallocation."""
    request = read_request(vllm_config.additional_config)
    assert request is not None
    return parse_settings(request).resolved(
        vllm_config.model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size
    )


def _adapt(vllm_config: Any, settings: ServingSettings, rounded: str | None) -> None:
    """Switch off what is on by default and contradicts the settings.

    Warn of that and of what was ``rounded``.
    """
    from vllm.logger import init_logger

    logger = init_logger(f"vllm.{__name__}")
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    if rounded:
        logger.warning("rlkv: %s", rounded)
    is_full = settings.whole_prompts
    if is_full:
        longest = vllm_config.model_config.max_model_len
        for name in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
            tokens = getattr(scheduler, name, None)
            if tokens is not None and tokens < longest:
                raise ValueError(
                    "rlkv: prefill 'full' reads every prompt in one step, but a step has "
                    f"{tokens:,} tokens and a text "
                    f"up to {longest:,}: raise --{name.replace('_', '-')}, lower --max-model-len, "
                    "or use prefill "
                    "'local'"
                )
        if scheduler.enable_chunked_prefill or scheduler.long_prefill_token_threshold:
            scheduler.enable_chunked_prefill, scheduler.long_prefill_token_threshold = False, 0
            logger.warning(
                "rlkv: prefill 'full' reads every prompt in one step, so chunked prefill is "
                "switched off"
            )
    if cache.enable_prefix_caching and (is_full or settings.eviction):
        cache.enable_prefix_caching = False
        why = "cached answers were not read in full" if is_full else "eviction keeps no prefixes"
        logger.warning("rlkv: %s, so prefix caching is switched off", why)


def check_engine(vllm_config: Any, feature: str = "head reallocation") -> None:
    """Raise ``ValueError`` for the first setting of the engine under which ``feature`` would give
    wrong results.
    """
    refusals = _always(vllm_config)
    if feature == "head reallocation":
        refusals |= _reallocation(vllm_config)
    # mixed attention leaves blocks and weights as they are, but its gates are those of all heads
    else:
        refusals |= {
            "tensor parallelism: run one engine per GPU": vllm_config.parallel_config.tensor_parallel_size
            > 1
        }
    for refusal, applies in refusals.items():
        if applies:
            raise ValueError(f"rlkv: {feature} does not work with {refusal}")


def _always(vllm_config: Any) -> dict[str, bool]:
    """What does not work, and what to do instead; whether it was asked for."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    stages = parallel.pipeline_parallel_size
    context = (
        parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
    )
    dual_chunk = getattr(
        vllm_config.model_config.hf_text_config, "dual_chunk_attention_config", None
    )
    plain_cache = cache.cache_dtype in ("auto", "float16", "bfloat16", "float32")
    # such graphs break at the engine's own operators only: what rlkv does on the host would be
    # captured once
    breakable = (
        "breakable CUDA graphs (VLLM_USE_BREAKABLE_CUDAGRAPH=1, which "
        "VLLM_BATCH_INVARIANT=1 may switch on)"
    )
    return {
        f"pipeline parallelism (--pipeline-parallel-size {stages}): use --tensor-parallel-size": stages
        > 1,
        "context parallelism: leave out --decode-context-parallel-size and "
        "--prefill-context-parallel-size": context,
        "speculative decoding: leave out --speculative-config": vllm_config.speculative_config
        is not None,
        f"a quantised KV cache (--kv-cache-dtype {cache.cache_dtype}): leave it at auto": not plain_cache,
        "KV connectors: leave out --kv-transfer-config": vllm_config.kv_transfer_config is not None,
        "offloading of the KV cache: leave out --kv-offloading-size": cache.kv_offloading_size
        is not None,
        "dual chunk attention: remove dual_chunk_attention_config from the model's config": bool(
            dual_chunk
        ),
        f"{breakable}: set VLLM_USE_BREAKABLE_CUDAGRAPH=0, or pass --enforce-eager": _breaks_graphs(
            vllm_config
        ),
    }


def _breaks_graphs(vllm_config: Any) -> bool:
    """Whether the engine captures breakable graphs.

    It notes its own decision in the environment.
    """
    mode = vllm_config.compilation_config.cudagraph_mode
    return (
        os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH", "0") == "1"
        and mode is not None
        and mode.name != "NONE"
    )


def _reallocation(vllm_config: Any) -> dict[str, bool]:
    cache, model = vllm_config.cache_config, vllm_config.model_config
    config, scheduler = model.hf_text_config, vllm_config.scheduler_config
    sliding = cache.sliding_window is not None or "sliding_attention" in (
        getattr(config, "layer_types", None) or ()
    )
    weights = (
        f"quantised weights of format {model.quantization}, whose heads it cannot reorder: serve "
        "one of "
        f"{', '.join(QUANTISED)}, or a checkpoint in float32, bfloat16 or float16"
    )
    quantised, adapters = vllm_config.quant_config, vllm_config.lora_config
    named = {
        name.rsplit(".")[-1] for name in getattr(adapters, "target_modules", None) or PROJECTIONS
    }
    form = str(vllm_config.load_config.load_format)
    lora = adapters is not None and not named.isdisjoint(PROJECTIONS)
    heads, ranks = model.get_total_num_kv_heads(), vllm_config.parallel_config.tensor_parallel_size
    uneven = (
        f"--tensor-parallel-size {ranks} and {heads} KV heads a layer: choose a divisor of {heads}"
    )
    hybrid = (
        "--disable-hybrid-kv-cache-manager: leave it out, blocks of several kinds are what "
        "saves memory"
    )
    return {
        weights: quantised is not None and quantised.get_name() not in QUANTISED,
        "LoRA adapters of attention, whose heads are reordered: merge the adapter into the model, "
        "or name the modules "
        "of an adapter of others with --lora-target-modules gate_proj up_proj down_proj": lora,
        uneven: heads % ranks > 0,
        f"--load-format {form}: what it loads is not reordered, leave it at auto": form
        in NOT_REORDERED,
        hybrid: bool(scheduler.disable_hybrid_kv_cache_manager),
        "sliding-window layers: their heads have no full cache to reallocate": sliding,
        "--kv-sharing-fast-prefill: leave it out": cache.kv_sharing_fast_prefill,
    }
