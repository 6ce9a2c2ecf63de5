"""Settings of the plugin: what the user asked for, resolved once, and what is refused.

They come as ``--additional-config '{"rlkv": {...}}'``, or as the variables ``RLKV_GATES`` and
``RLKV_SPARSITY`` for launchers whose arguments cannot be changed.  A request is resolved with the
engine's configuration: no other process needs the gates file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkv.gates.allocation import HeadAllocation, num_full_heads
from rlkv.models.layout import Layout
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
# their scores need the keys and the last queries alone, head by head
EVICTIONS = ("rkv", "snapkv")
TEMPERATURES = (0.01, 2.0)  # that the engine draws at: below it would take the least in silence

# how compressible heads read a prompt: all of it, or what they keep
FULL = "full"
LOCAL = "local"
PREFILLS = (LOCAL, FULL)

ELSEWHERE = "transformers (rlkv-infer --backend hf, rlkv-eval --engine hf)"
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
                f"prompt in one way: use 'full' or 'local', or {ELSEWHERE}, which has all three"
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
        unserved = "is not served by the vLLM plugin"
        if self.sink is not None or self.window is not None or self.protect_prompt:
            wrong = (
                "sink, window and protect_prompt do not apply with eviction: use the policy's own "
                "fields"
            )
        elif self.prefill == FULL:
            wrong = (
                f"prefill 'full' {unserved} together with eviction, because a prompt's entries "
                f"would not fit into the buffer: use 'local', or {ELSEWHERE}, which has both"
            )
        elif policy.name not in EVICTIONS:
            wrong = (
                f"eviction {policy.name!r} {unserved}: choose from {', '.join(EVICTIONS)}, or "
                f"{ELSEWHERE}, which has all policies"
            )
        elif policy.budget is None:
            wrong = (
                f"eviction with ratio {unserved}, because a head would hold more the longer the "
                f"text gets: give it a budget alone, or use {ELSEWHERE}"
            )
        elif policy.protect_prompt:
            wrong = (
                f"eviction with protect_prompt {unserved}, because when a head evicts would depend "
                f"on each request's prompt: give it a budget alone, or use {ELSEWHERE}"
            )
        else:
            return
        raise ValueError(f"rlkv: {wrong}")

    @classmethod
    def of(cls, allocation: HeadAllocation, cache: CacheSettings) -> ServingSettings:
        """Resolve an allocation and what its compressible heads keep."""
        rows = zip(allocation.full.tolist(), allocation.gated.sum(1).tolist(), strict=True)
        full = tuple("".join("01"[kept] for kept in row[:heads]) for row, heads in rows)
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
        """True if prompts must be read in one step.

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
        heads = [len(row) for row in self.full]
        rows = [[kept == "1" for kept in row.ljust(max(heads), "1")] for row in self.full]
        return HeadAllocation(torch.tensor(rows), heads)

    @property
    def full_LH(self) -> Tensor:
        """The full heads of resolved settings, of the layers with gates alone."""
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


def asks_for_rollout(additional_config: Any) -> bool:
    """Return whether an engine samples with mixed attention."""
    return isinstance(additional_config, Mapping) and MIXED_KEY in additional_config


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


# formats of quantised weights in which whole heads are known to move
_AWQ = ("awq", "awq_marlin", "auto_awq")
_GPTQ = ("gptq", "gptq_marlin", "auto_gptq")
QUANTISED = (*_AWQ, *_GPTQ, "compressed-tensors", "fp8")
# written to parameters as they are
NOT_REORDERED = ("sharded_state", "runai_streamer_sharded", "tensorizer")
# what an adapter would have to reorder
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")


def check_engine(vllm_config: Any, feature: str = REALLOCATION) -> None:
    """Raise ``ValueError`` for the first setting under which ``feature`` would be wrong."""
    found = [*_unsupported(vllm_config)]
    architecture = vllm_config.model_config.architecture
    if feature == REALLOCATION:
        found += _unsupported_by_reallocation(vllm_config)
    elif architecture not in ARCHITECTURES:
        found.append(f"{architecture}: sample {', '.join(ARCHITECTURES)}, or with --rollout hf")
    elif vllm_config.parallel_config.tensor_parallel_size != 1:  # gates are those of all heads
        found.append("tensor parallelism: run one engine per GPU")
    if found:
        raise ValueError(f"rlkv: {feature} does not work with {found[0]}")


def _unsupported(engine: Any) -> Iterator[str]:
    """Yield the settings that do not work with rlkv, each with what to do about it."""
    parallel = engine.parallel_config
    cache = engine.cache_config
    if parallel.pipeline_parallel_size != 1:
        yield (
            f"pipeline parallelism (--pipeline-parallel-size {parallel.pipeline_parallel_size}): "
            "use --tensor-parallel-size"
        )
    if parallel.decode_context_parallel_size != 1 or parallel.prefill_context_parallel_size != 1:
        yield (
            "context parallelism: leave out --decode-context-parallel-size and "
            "--prefill-context-parallel-size"
        )
    if engine.speculative_config is not None:
        yield "speculative decoding: leave out --speculative-config"
    if cache.cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
        yield f"a quantised KV cache (--kv-cache-dtype {cache.cache_dtype}): leave it at auto"
    if engine.kv_transfer_config is not None:
        yield "KV connectors: leave out --kv-transfer-config"
    if cache.kv_offloading_size is not None:
        yield "offloading of the KV cache: leave out --kv-offloading-size"
    if getattr(engine.model_config.hf_text_config, "dual_chunk_attention_config", None):
        yield "dual chunk attention: remove dual_chunk_attention_config from the model's config"
    graphs = engine.compilation_config.cudagraph_mode
    captures = graphs is not None and graphs.name != "NONE"
    # where the engine notes its own decision; such graphs break at the engine's own operators only,
    # and would capture work of the host
    if captures and os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH", "0") == "1":
        yield (
            "breakable CUDA graphs (VLLM_USE_BREAKABLE_CUDAGRAPH=1, which VLLM_BATCH_INVARIANT=1 "
            "may switch on): set VLLM_USE_BREAKABLE_CUDAGRAPH=0, or pass --enforce-eager"
        )


def _unsupported_by_reallocation(engine: Any) -> Iterator[str]:
    """Yield the same for settings of weights that are reordered, and of blocks."""
    quantised = engine.quant_config
    if quantised is not None and quantised.get_name() not in QUANTISED:
        yield (
            f"quantised weights of format {engine.model_config.quantization}, whose heads it "
            f"cannot reorder: serve one of {', '.join(QUANTISED)}, or a checkpoint in float32, "
            "bfloat16 or float16"
        )
    if engine.lora_config is not None:
        adapted = getattr(engine.lora_config, "target_modules", None) or PROJECTIONS
        if any(name.rsplit(".")[-1] in PROJECTIONS for name in adapted):
            yield (
                "LoRA adapters of attention, whose heads are reordered: merge the adapter into the "
                "model, or name the modules of an adapter of others with --lora-target-modules "
                "gate_proj up_proj down_proj"
            )
    heads = engine.model_config.get_total_num_kv_heads()
    ranks = engine.parallel_config.tensor_parallel_size
    if heads % ranks:
        yield (
            f"--tensor-parallel-size {ranks} and {heads} KV heads a layer: choose a divisor of "
            f"{heads}"
        )
    load_format = str(engine.load_config.load_format)
    if load_format in NOT_REORDERED:
        yield f"--load-format {load_format}: what it loads is not reordered, leave it at auto"
    if engine.scheduler_config.disable_hybrid_kv_cache_manager:
        yield (
            "--disable-hybrid-kv-cache-manager: leave it out, blocks of several kinds are what "
            "saves memory"
        )
    if engine.cache_config.sliding_window is not None:
        yield "sliding windows in all layers: their heads have no full cache to reallocate"
    if engine.model_config.is_hybrid and engine.cache_config.enable_prefix_caching:
        yield "prefix caching of linear layers: pass --no-enable-prefix-caching"
    if engine.cache_config.kv_sharing_fast_prefill:
        yield "--kv-sharing-fast-prefill: leave it out"


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
    if model is None or request is None or asks_for_rollout(vllm_config.additional_config):
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
    if settings.eviction and model.architecture == LEARNED_SINKS:
        raise ValueError(
            "rlkv: eviction is not served with learned sinks, which the policies' scores do not "
            "know: leave eviction out"
        )
    assert settings.full is not None
    found = [len(row) for row in settings.full]
    heads = list(Layout.from_config(model.hf_config).heads)
    if found != heads:
        raise ValueError(
            f"rlkv: the allocation is for {found} KV heads, layer by layer, but the model has "
            f"{heads} with full attention"
        )
    # refuses an uneven allocation before any process starts
    deal_heads(settings.full_LH, ranks)
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
    heads = int(own.gated.sum())
    if ranks == 1 or asked is None or own.num_full == num_full_heads(asked, heads):
        return None
    return (
        f"sparsity {own.sparsity:.4f} instead of {asked}: {own.num_full} of {heads} KV heads are "
        f"full, a multiple of the {ranks} ranks"
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
