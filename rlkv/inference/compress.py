"""``with compress(model, gates, sparsity=0.5): model.generate(...)``: a small cache for a while.

Two places of the *instance* are hooked and restored on exit: where ``generate`` prepares its cache,
and the forward of the decoder (for plain ``model(...)`` calls).  The model class and its weights
are left alone.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerationMode

from rlkv.attention.mixed import PLAIN
from rlkv.cache import IMPLEMENTATION, CacheSettings, HeadReallocationCache
from rlkv.cache.layer import UNCHANGED
from rlkv.cache.plan import COMPRESSIBLE, FULL_HEADS
from rlkv.eviction.base import EvictionPolicy
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.layout import (
    FULL,
    LATENT,
    Layout,
    describe_heads,
    gated_places,
    own_layers,
    ranges,
)
from rlkv.models.loading import (
    attention_of,
    cache_argument,
    refuse_latent_attention,
    refuse_own_cache,
    try_forward,
)
from rlkv.models.shape import max_positions
from rlkv.utils.devices import leave_cudnn_out
from rlkv.utils.runtime import shadow

Gates = HeadGates | HeadAllocation | str | Path | None
# models of which compress(...) has read two tokens, without and with a policy that reads queries
_TRIED: tuple[WeakSet[PreTrainedModel], WeakSet[PreTrainedModel]] = (WeakSet(), WeakSet())


# --- which models are served


def check_servable(model: Any) -> Layout:
    """Return the layers of a model.

    Raises:
        ValueError: if the model is compressed already or cannot be served.
    """
    config: Any = getattr(model, "config", None)
    if not isinstance(model, torch.nn.Module) or not hasattr(config, "_attn_implementation"):
        raise ValueError(
            f"the model is a {type(model).__name__}: pass a transformers model, such as "
            "AutoModelForCausalLM.from_pretrained(...) or the first of rlkv.tiny.load()"
        )
    if config._attn_implementation == IMPLEMENTATION:
        raise ValueError(
            "this model is compressed already: leave the first compress(...) before entering "
            "another"
        )
    if any("rlkv_gate" in name for name, _ in model.named_parameters()):
        raise ValueError(
            "this model has trainable gates attached, which compress(...) would bypass: unload "
            "them first"
        )
    if not hasattr(model, "_prepare_cache_for_generation"):
        raise ValueError(
            f"a {type(model).__name__} cannot generate: load the model with AutoModelForCausalLM "
            "for compress(...)"
        )
    if config.is_encoder_decoder:
        raise ValueError(
            f"{config.model_type} is an encoder-decoder: compress(...) serves decoders only"
        )
    refuse_attentions(config.output_attentions)
    refuse_latent_attention(model)
    layout = Layout.from_config(config)
    layout.check()
    if not layout.gated:
        raise ValueError(
            f"{layout.model_type} has no layer with full attention ({layout.describe()}): there is "
            "no full KV cache to compress, so use a model with full attention in some layers"
        )
    if LATENT in {layer.kind for layer in layout.layers}:
        raise ValueError(
            f"{layout.model_type} has {layout.describe()}: compress(...) serves models in which "
            "every layer has full, sliding-window or linear attention of its own, such as Llama, "
            "Qwen3 or Gemma 3"
        )
    refuse_own_cache(model, "compress(...) serves models that take transformers' DynamicCache")
    layout.modules(model)
    return layout


def default_layers(config: Any, numbers: list[int]) -> dict[int, Any]:
    """Make new layers of transformers' own cache for the layers ``numbers`` of a model."""
    layers = own_layers(config)  # those at the end that read the keys of others may be missing
    return {number: layers[number] for number in numbers if number < len(layers)}


def fit_allocation(allocation: HeadAllocation, layout: Layout) -> HeadAllocation:
    """Return the allocation of the layers with gates; all others stay as they are.

    A warning tells of heads that it makes compressible elsewhere.

    Raises:
        ValueError: for an allocation from gates of other layers.
    """
    if allocation.heads not in (None, layout.heads):
        raise ValueError(
            f"the allocation is for layers {describe_heads(allocation.heads)}, but "
            f"{layout.model_type} has full attention in {describe_heads(layout.heads)}: use the "
            "gates that were trained for this model"
        )
    full = allocation.full.clone()
    others = ~gated_places(layout.heads, *full.shape)
    ignored = (~full & others).any(dim=1).nonzero().flatten().tolist()
    if ignored:
        warnings.warn(
            f"layers {ranges(ignored)} have no full attention of their own and are not changed: "
            "the allocation serves the other layers",
            stacklevel=4,
        )
    full[others] = True
    return HeadAllocation(full, layout.heads)


def warn_without_rope(model: Any) -> None:
    """Warn if cached keys carry no rotary position, which scores that compare keys rely on."""
    if not any("rotary" in name for name, _ in model.named_modules()):
        warnings.warn(
            f"{model.config.model_type} has no rotary position embedding: eviction works, but keys "
            "then carry position only as far as the hidden states do, so policies that compare "
            "keys (R-KV) see more tokens as repetitions",
            stacklevel=4,
        )


# --- which calls are served


def refuse_attentions(asked: bool | None) -> None:
    """Raise ValueError if attention weights are asked for, which would be None."""
    if asked:
        raise ValueError(
            "output_attentions=True: compress(...) computes no attention weights to return: leave "
            "it out"
        )


def refuse_packed(position_ids: Tensor | None, attention_mask: Any) -> None:
    """Raise ValueError for several texts in one row, which need a model without a cache."""
    if position_ids is None or attention_mask is not None or position_ids.ndim != 2:
        return
    if position_ids.shape[1] == 1:  # a look at the numbers could not be captured in a CUDA graph
        return
    if bool((position_ids.diff(dim=-1) != 1).any()):
        raise ValueError(
            "position_ids start again within a row: compress(...) takes one text per row, so give "
            "each packed text a row of its own, or an attention_mask if the row is padded"
        )


def check_generation(config: Any, mode: GenerationMode) -> None:
    """Raise ValueError for a generation that would bypass the cache or break it."""
    refuse_attentions(config.output_attentions)
    is_assisted = mode == GenerationMode.ASSISTED_GENERATION or config.is_assistant
    cases = [
        (
            config.cache_implementation not in (None, "dynamic"),
            f"cache_implementation={config.cache_implementation!r} would replace the compressed "
            "cache: leave it out under compress(...)",
        ),
        (
            config.use_cache is False,
            "use_cache=False leaves nothing to compress: generate with the cache under "
            "compress(...)",
        ),
        (
            config.guidance_scale not in (None, 1),
            "guidance_scale reads a second text, whose cache would replace the first one's: leave "
            "it out",
        ),
        (
            is_assisted,
            "assisted generation takes tokens back, which a compressed cache cannot: leave it out",
        ),
        (
            config.prefill_chunk_size is not None,
            "prefill_chunk_size would compress the prompt between its chunks: leave it out",
        ),
    ]
    for is_refused, sentence in cases:
        if is_refused:
            raise ValueError(sentence)


def tokens_before_drop(model: Any) -> int | None:
    """Return how many tokens a text has when ``generate`` drops its cache; None: it never does.

    That of Phi-3 does once, in the step that reads the first token after
    ``original_max_position_embeddings``, and before transformers 5.20 goes on with this token
    alone.
    """
    if Version(transformers.__version__) >= Version("5.20"):
        return None
    name = "original_max_position_embeddings"
    # many models have a method of their own, and any config may have the field
    methods = [vars(kind).get("prepare_inputs_for_generation") for kind in type(model).mro()]
    read = [inspect.unwrap(method).__code__.co_names for method in methods if method is not None]
    return getattr(model.config, name, None) if any(name in names for names in read) else None


def refuse_dropped_cache(model: Any, held: int, tokens: int, limit: int) -> None:
    """Raise ValueError for a text in the middle of which ``generate`` drops its cache.

    Args:
        held: tokens in the cache.
        tokens: of the text so far.
        limit: tokens that are read at most.
    """
    last = tokens_before_drop(model)
    if last is not None and (held or tokens) <= last < limit:
        raise ValueError(
            f"generate of {model.config.model_type} drops its cache after {last} tokens "
            f"(original_max_position_embeddings), and this text may have {limit + 1}: end it "
            "earlier, by max_new_tokens, or use transformers 5.20 or newer"
        )


def refuse_continuous_batching(*args: Any, **kwargs: Any) -> None:
    """Raise ValueError in the place of a model's methods for continuous batching."""
    raise ValueError(
        "continuous batching brings its own paged cache: use model.generate under compress(...)"
    )


# --- the session


@dataclass
class CompressedSession:
    """The value of ``with compress(...) as session``.

    ``allocation`` says which heads are full; ``cache`` is the cache of the latest call of
    ``generate`` or of the model, with ``cache.nbytes()`` held against ``cache.full_nbytes()``.
    With ``record=True`` ``cache.kept`` lists what each eviction kept, and ``cache.held(row)`` says
    which tokens each head holds.  With ``own_loop`` it is not ``generate`` that decodes.
    """

    allocation: HeadAllocation
    settings: CacheSettings
    record: bool = False
    default_layers: Callable[[], dict[int, Any]] = dict
    cache: HeadReallocationCache | None = None
    own_loop: bool = False

    def new_cache(
        self, limit: int | None = None, planned: torch.Tensor | None = None
    ) -> HeadReallocationCache:
        """Make an empty cache of this session's allocation and sizes.

        Args:
            limit: tokens at which generation ends.
            planned: int64 ``[B]``, a length of text for each row: the policy's ratio is of that
                length, from the start.

        Raises:
            ValueError: for planned lengths and a policy that counts the tokens read.
        """
        policy = self.settings.eviction
        if planned is not None and policy is not None and not policy.takes_planned:
            raise ValueError(
                f"{policy.describe()} counts the tokens that were read: leave planned lengths out"
            )
        cache = HeadReallocationCache(
            self.allocation.full,
            record=self.record,
            stock_layers=self.default_layers,
            heads=self.allocation.heads,
            **vars(self.settings),
        )
        cache.state.limit = limit
        cache.state.planned = planned
        return cache

    def check(self, cache: Any) -> HeadReallocationCache:
        """Return ``cache`` if it may be continued here.

        Raises:
            ValueError: if it is of another kind, allocation or size.
        """
        if not isinstance(cache, HeadReallocationCache):
            raise ValueError(
                f"{cache_argument()} is a {type(cache).__name__}: under compress(...) leave it "
                "out, pass session.cache to continue an earlier text, or, where it is prefix "
                "tuning of PEFT that passes it, use another adapter, such as LoRA"
            )
        if cache.settings != self.settings or not cache.full.equal(self.allocation.full.cpu()):
            raise ValueError(
                f"{cache_argument()} comes from a compress(...) with another allocation, sink, "
                "window, prefill, eviction policy, evict_from or protect_prompt: start without it"
            )
        return cache


def resolve_allocation(
    model: PreTrainedModel,
    gates: HeadGates | HeadAllocation | None,
    sparsity: float | None = None,
    scope: str = "global",
) -> HeadAllocation:
    """Return the allocation from gates and a sparsity; without gates no head is full.

    Raises:
        ValueError: if it does not fit the model, or ``sparsity`` is missing or superfluous.
    """
    layout = Layout.from_config(model.config)
    heads = (len(layout.layers), max(layout.heads))
    if isinstance(gates, HeadGates):
        if sparsity is None:
            raise ValueError(
                "sparsity is missing: pass the share of heads to compress, such as sparsity=0.5"
            )
        gates.check_model(model.config)
        return HeadAllocation.from_gates(gates, sparsity, scope=scope)
    if scope != "global":
        raise ValueError(
            f"scope is {scope!r} without a gates file, whose heads it would rank: pass gates, or "
            "leave it out"
        )
    if gates is None:
        if sparsity is not None:
            raise ValueError(
                "sparsity is given without gates, which say which heads it compresses: pass gates "
                "too, or leave it out to compress all heads"
            )
        return HeadAllocation(~gated_places(layout.heads, *heads), layout.heads)
    if not isinstance(gates, HeadAllocation):
        raise ValueError(
            f"gates is a {type(gates).__name__}: pass a gates file, HeadGates(alpha), or a "
            "HeadAllocation(full)"
        )
    if sparsity is not None:
        raise ValueError(
            "sparsity is given together with a HeadAllocation, which has its own: pass one of the "
            "two"
        )
    if tuple(gates.full.shape) != heads:
        raise ValueError(
            f"the allocation is for {gates.full.shape[0]} layers x {gates.full.shape[1]} KV heads, "
            f"but the model has {heads[0]} x {heads[1]}"
        )
    return fit_allocation(gates, layout)


def _check_policy(
    gates: Gates, eviction: EvictionPolicy | None, sizes: dict[str, Any], evict_from: str
) -> None:
    if gates is None and eviction is None:
        raise ValueError(
            "gates and eviction are both missing: pass gates (which heads stay full), an eviction "
            "policy such as rlkv.eviction.RKV(budget=256) (what the others keep), or both"
        )
    if gates is None and evict_from == FULL_HEADS:
        raise ValueError(
            "evict_from='full' needs gates, which say which heads are full: pass them, or leave it "
            "out to evict from all heads"
        )
    given = [name for name, value in sizes.items() if value is not None and value is not False]
    if given and isinstance(eviction, EvictionPolicy) and evict_from == COMPRESSIBLE:
        raise ValueError(
            f"{' and '.join(given)} cannot be given with the eviction policy {eviction.name}, "
            "which decides itself what is kept: set its own fields, such as RKV(budget=256, "
            "protect_prompt=True)"
        )


@contextmanager
def compress(
    model: PreTrainedModel,
    gates: Gates = None,
    sparsity: float | None = None,
    sink: int | None = None,
    window: int | None = None,
    prefill: str = "full",
    scope: str = "global",
    eviction: EvictionPolicy | None = None,
    record: bool = False,
    protect_prompt: bool | None = None,
    evict_from: str = COMPRESSIBLE,
) -> Iterator[CompressedSession]:
    """Keep the full KV cache in the heads that need it, and a small one in all others.

    Inside the context ``model.generate(...)`` and ``model(...)`` run with a
    :class:`HeadReallocationCache`: greedy, sampled, beams, left-padded batches, and further turns
    with ``past_key_values=session.cache`` (``cache=`` from transformers 5.24 on).  On exit, also by
    an exception, the model is as it was.  For inference only: no gradients flow through the cache.

    Args:
        model: a transformers causal LM in eval mode (or a PEFT model around one).  Layers without
            full attention (sliding windows, linear layers) stay as they are.
        gates: ``HeadGates``, a gates file or folder, "tiny" or "smol" for those of a built-in
            model, or a ``HeadAllocation``; None: all heads are compressible (token eviction as
            published), which needs an ``eviction`` policy.
        sparsity: share of all KV heads with full attention that is compressed; None with a
            ``HeadAllocation`` or without gates.
        sink: first tokens of each row that a compressible head keeps; None: what the gates
            recommend for serving, 16 with a ``HeadAllocation``.
        window: last tokens that it keeps, the current one included; None: as above, 64 with a
            ``HeadAllocation``.
        prefill: ``"full"``: all heads read a prompt in full and compress it afterwards;
            ``"local"``: compressible heads read it through sinks and window too, as in training;
            ``"published"``: all of it but its last 50 tokens in full, these as if they were
            decoded, as in the evaluation of RLKV (a prompt of up to 50 tokens is decoded as a
            whole).
        scope: ``"global"`` or ``"layer"``: where heads compete for staying full.
        eviction: a policy from :mod:`rlkv.eviction`, such as ``RKV(budget=256)``, for the
            compressible heads, instead of ``sink`` and ``window``.
        record: note the positions of cached tokens, for ``session.cache.kept`` and
            ``session.cache.held(row)``.
        protect_prompt: compressible heads also keep every token of the prompt, which is what the
            first call reads; further turns are kept as generated tokens are.  A policy has a field
            of the same name instead.  None: what the gates recommend, False with a
            ``HeadAllocation``.
        evict_from: ``"compressible"``, or ``"full"`` for two budgets: ``eviction`` is the policy of
            the full heads, and the others keep ``sink`` and ``window``.

    Raises:
        ValueError: if gates and model do not belong together, the model cannot be served or is
            compressed already, and inside the context for what would bypass the cache (other
            caches, assisted generation, continuous batching, ``use_cache=False`` in generate).
    """
    base: Any = model
    if hasattr(base, "get_base_model"):  # a PEFT model
        base = base.get_base_model()
    layout = check_servable(base)
    sizes: dict[str, Any] = {"sink": sink, "window": window, "protect_prompt": protect_prompt}
    _check_policy(gates, eviction, sizes, evict_from)
    if isinstance(gates, str | Path):
        gates = HeadGates.load(gates)
    if isinstance(gates, HeadGates):
        sizes = gates.serving(**sizes)
    given = {name: value for name, value in sizes.items() if value is not None}
    settings = CacheSettings(prefill=prefill, **given).with_policy(eviction, evict_from)
    allocation = resolve_allocation(base, gates, sparsity, scope)
    settings.check_heads(allocation.num_full)
    settings.check_positions(max_positions(base.config))
    if eviction is not None:
        warn_without_rope(base)
    stock = [number for number, layer in enumerate(layout.layers) if layer.kind != FULL]
    stock_layers = partial(default_layers, base.config, stock)
    session = CompressedSession(allocation, settings, record, stock_layers)
    with ExitStack() as undo:
        _hook(base, session, undo)
        for module in layout.sharing_modules(base):
            shadow(module, UNCHANGED, True, undo)
        tried = _TRIED[eviction is not None and eviction.uses_queries]
        if base not in tried:
            # what its attention cannot be served with is refused before any text
            cache = {cache_argument(): session.new_cache()}
            try_forward(base, **cache, use_cache=True)
            tried.add(base)
        yield session


def _hook(model: Any, session: CompressedSession, undo: ExitStack) -> None:
    """Change the instance; ``undo`` restores it."""
    leave_cudnn_out(model.device)
    if model.config._attn_implementation == PLAIN:
        raise ValueError(
            "a stream with the full cache has not ended on this model: read it to its end, or "
            "close it, before compress(...)"
        )
    undo.callback(model.set_attn_implementation, attention_of(model))
    model.set_attn_implementation(IMPLEMENTATION)  # only warns if it cannot
    decoder = model.base_model
    if {model.config._attn_implementation, decoder.config._attn_implementation} != {IMPLEMENTATION}:
        raise ValueError(
            f"{type(model).__name__} does not let its attention implementation be set: "
            "compress(...) needs a model that uses transformers' attention interface"
        )
    shadow(model, "_prepare_cache_for_generation", _cache_preparation(model, session), undo)
    for name in ("generate_batch", "init_continuous_batching"):
        if hasattr(model, name):
            shadow(model, name, refuse_continuous_batching, undo)
    hooked = [decoder]
    inner = model.get_decoder()
    if inner is not decoder and isinstance(inner, PreTrainedModel):
        hooked.append(inner)  # some models call it without its wrapper
    for module in hooked:
        hook = _forward_hook(module, session)
        undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        undo.callback(module.register_forward_hook(_end_call, with_kwargs=True).remove)


def _cache_preparation(model: Any, session: CompressedSession) -> Any:
    original = model._prepare_cache_for_generation
    name = cache_argument()

    def prepare(
        generation_config: Any,
        model_kwargs: Any,
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        check_generation(generation_config, generation_mode)
        given = model_kwargs.get(name)
        cache = session.new_cache() if given is None else session.check(given)
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not session.own_loop:
            held = cache.get_seq_length()
            refuse_dropped_cache(model, held, mask.shape[-1], max_cache_length)
        cache.state.limit = max_cache_length
        session.cache = cache  # read by nobody here: another thread may exchange it
        if given is None:
            model_kwargs[name] = cache
            return None
        return original(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    return prepare


def _forward_hook(decoder: torch.nn.Module, session: CompressedSession) -> Any:
    names = list(inspect.signature(decoder.forward).parameters)
    name = cache_argument()

    def give_cache(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # a replica of DataParallel lives for one call
        if module is not decoder and not getattr(module, "_is_replica", False):
            raise ValueError(
                "this model is a copy that was made inside compress(...), whose end does not reach "
                "it: copy the model outside"
            )
        if module.training:
            raise ValueError("compress(...) is for inference: call model.eval() first")
        # all by keyword: transformers' wrappers add keywords that must not meet positions
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        refuse_attentions(given.get("output_attentions"))
        refuse_packed(given.get("position_ids"), given.get("attention_mask"))
        # transformers 5.24 calls it cache, and still takes the name of before, which it renames
        # after this hook
        cache = given.pop("past_key_values", None)
        newer = given.pop("cache", None)
        if cache is not None and newer is not None and newer is not cache:
            raise ValueError(
                "past_key_values and cache are two caches, and a call has one: pass session.cache "
                "as one of them"
            )
        if newer is not None:
            cache = newer
        if cache is None:
            cache = session.new_cache()
            # without use_cache the tokens still go through a cache, which is not kept
            if given.get("use_cache") is not False:
                session.cache = cache
        tokens = given.get("input_ids")
        if tokens is None:
            tokens = given.get("inputs_embeds")
        given[name] = session.check(cache)
        given[name].begin_call(module, tokens)
        return (), given

    return give_cache


def _end_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    kwargs[cache_argument()].end_call(module)
