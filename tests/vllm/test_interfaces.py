"""What rlkv uses of the engine's internals: a version that changed them fails here by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

pytest.importorskip("vllm")

from rlkv.vllm import backends, evicting, reallocation, specs

ATTENTION = "vllm.v1.attention.backend"
MANAGER = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
# called by rlkv, with these parameters
CALLS = {
    "vllm:ModelRegistry.register_model": "model_arch model_cls",
    "vllm.config:VllmConfig.__post_init__": "self",
    "vllm.config:ModelConfig.get_total_num_kv_heads": "self",
    "vllm.distributed:get_tensor_model_parallel_rank": "",
    "vllm.distributed:get_tensor_model_parallel_world_size": "",
    "vllm.distributed.parallel_state:cleanup_dist_env_and_memory": "",
    "vllm.distributed.parallel_state:model_parallel_is_initialized": "",
    "vllm.forward_context:get_forward_context": "",
    "vllm.model_executor.layers.attention:Attention.__init__": (
        "num_heads head_size scale num_kv_heads cache_config quant_config prefix attn_backend"
    ),
    "vllm.model_executor.layers.attention.attention:get_attention_context": "layer_name",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward": (
        "layer query key value kv_cache attn_metadata output"
    ),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update": (
        "layer key value kv_cache slot_mapping"
    ),
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.get_kv_cache_spec": (
        "vllm_config"
    ),
    "vllm.utils.torch_utils:direct_register_custom_op": "op_name op_func mutates_args fake_impl",
    "vllm.utils.torch_utils:_encode_layer_name": "layer_name",
    "vllm.utils.torch_utils:_resolve_layer_name": "layer_name",
    f"{ATTENTION}:CommonAttentionMetadata.replace": "self",
    "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadataBuilder.build": (
        "common_prefix_len common_attn_metadata fast_build"
    ),
    "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.forward": (
        "layer query key value kv_cache attn_metadata output"
    ),
    "vllm.v1.core.block_pool:BlockPool.get_cached_block": "block_hash kv_cache_group_ids",
    "vllm.v1.core.kv_cache_utils:resolve_block_hashes": (
        "block_hashes hash_block_size block_size supports_fine_grained_hash_lookup alignment_tokens"
    ),
    f"{MANAGER}.__init__": "kv_cache_spec max_admission_blocks_per_request",
    f"{MANAGER}._remove_blocks_in_range": "request_id",
    f"{MANAGER}.cache_blocks": "request num_tokens",
    # its result is an attribute that rlkv sets
    "vllm.v1.request:Request.get_skip_reading_prefix_cache": "self",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry._ensure_registered": "",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register": "uniform_type_base_spec",
    "vllm.v1.engine.llm_engine:LLMEngine.add_request": "request_id prompt params",
    "vllm.v1.engine.llm_engine:LLMEngine.step": "self",
    "vllm.v1.engine.llm_engine:LLMEngine.has_unfinished_requests": "self",
    "vllm.v1.engine.llm_engine:LLMEngine.abort_request": "request_ids internal",
    "vllm.v1.engine.llm_engine:LLMEngine.reset_prefix_cache": "self",
    "vllm.v1.engine.llm_engine:LLMEngine.collective_rpc": "method args",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model": "self",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.get_model": "self",
}
# read or set by rlkv
FIELDS = {
    "vllm.config:ParallelConfig": (
        "tensor_parallel_size pipeline_parallel_size decode_context_parallel_size "
        "prefill_context_parallel_size"
    ),
    "vllm.config:CacheConfig": (
        "block_size cache_dtype sliding_window enable_prefix_caching kv_sharing_fast_prefill "
        "kv_offloading_size"
    ),
    "vllm.config:SchedulerConfig": (
        "max_num_seqs max_num_batched_tokens enable_chunked_prefill long_prefill_token_threshold "
        "disable_hybrid_kv_cache_manager"
    ),
    "vllm.config:VllmConfig": (
        "additional_config speculative_config quant_config load_config lora_config "
        "kv_transfer_config max_in_flight_tokens"
    ),
    "vllm.config:LoadConfig": "load_format",
    "vllm.config:LoRAConfig": "target_modules",
    "vllm.config:CompilationConfig": "static_forward_context splitting_ops cudagraph_mode",
    "vllm.config.model_arch:ModelArchitectureConfig": "rswa_window",
    "vllm.engine.arg_utils:EngineArgs": (
        "kv_cache_memory_bytes skip_tokenizer_init generation_config logprobs_mode "
        "enable_chunked_prefill worker_extension_cls additional_config"
    ),
    "vllm.forward_context:ForwardContext": "no_compile_layers",
    f"{ATTENTION}:AttentionBackend": "forward_includes_kv_cache_update supported_dtypes "
    "supported_kv_cache_layouts",
    f"{ATTENTION}:AttentionCGSupport": "ALWAYS UNIFORM_SINGLE_TOKEN_DECODE",
    f"{ATTENTION}:CommonAttentionMetadata": (
        "query_start_loc query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound num_reqs "
        "num_actual_tokens max_query_len max_seq_len block_table_tensor "
        "is_prefilling rswa_prefix_lens"
    ),
    "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadata": (
        "num_actual_tokens seq_lens rswa_prefix_lens rswa_window"
    ),
    MANAGER: "supports_fine_grained_hash_lookup",
    "vllm.v1.kv_cache_interface:AttentionSpec": "block_size num_kv_heads head_size head_size_v "
    "dtype page_size_bytes page_size_padded",
    "vllm.v1.kv_cache_interface:MambaSpec": "page_size_bytes page_size_padded",
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": "sliding_window",
    "vllm.config:ModelConfig": "is_hybrid",
    "vllm.v1.kv_cache_layout:KVCacheLayout": "BLHNC LBHNC",
    "vllm.sampling_params:SamplingParams": (
        "temperature top_p top_k seed max_tokens logprobs stop_token_ids ignore_eos detokenize "
        "output_kind"
    ),
}


def load(name: str) -> Any:
    module, path = name.split(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
        assert found is not None, f"vLLM has no {name}"
    return found


@pytest.mark.parametrize("name", CALLS)
def test_what_is_called_takes_the_same_parameters(name: str) -> None:
    missing = set(CALLS[name].split()) - set(inspect.signature(load(name)).parameters)
    assert not missing, f"{name} has no parameter {', '.join(sorted(missing))}"


@pytest.mark.parametrize("name", FIELDS)
def test_what_is_read_is_there(name: str) -> None:
    owner = load(name)
    own = (
        {field.name for field in fields(owner)} if hasattr(owner, "__dataclass_fields__") else set()
    )
    missing = [
        field for field in FIELDS[name].split() if field not in own and not hasattr(owner, field)
    ]
    assert not missing, f"{name} has no {', '.join(missing)}"


def own_classes() -> Iterator[type]:
    """The classes of rlkv that stand in the place of the engine's."""
    for module in (specs, backends, evicting, reallocation):
        for found in vars(module).values():
            if (
                isinstance(found, type)
                and found.__module__ == module.__name__
                and engine_bases(found)
            ):
                yield found


def engine_bases(own: type) -> list[type]:
    return [base for base in own.__mro__ if base.__module__.startswith("vllm.")]


def overrides() -> Iterator[Any]:
    for own in own_classes():
        for name, method in vars(own).items():
            theirs = next(
                (vars(base)[name] for base in engine_bases(own) if name in vars(base)), None
            )
            if theirs is not None and callable(getattr(own, name)) and name != "__init__":
                yield pytest.param(
                    unwrapped(method), unwrapped(theirs), id=f"{own.__name__}.{name}"
                )


def unwrapped(method: Any) -> Any:
    return getattr(method, "__func__", method)


@pytest.mark.parametrize(("own", "theirs"), [*overrides()])
def test_what_the_engine_calls_takes_its_parameters(own: Any, theirs: Any) -> None:
    kinds = {parameter.kind for parameter in inspect.signature(own).parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return
    first = {"self", "cls"}  # a static method may override one of the class
    missing = (
        set(inspect.signature(theirs).parameters) - set(inspect.signature(own).parameters) - first
    )
    assert not missing, f"{theirs.__qualname__} has the new parameter {', '.join(sorted(missing))}"


LEAVES = [
    own for own in own_classes() if not any(own in other.__mro__[1:] for other in own_classes())
]


@pytest.mark.parametrize("own", LEAVES, ids=lambda own: own.__name__)
def test_no_method_is_left_abstract(own: type) -> None:
    abstract = getattr(own, "__abstractmethods__", frozenset())
    assert not abstract, f"{own.__name__} has no {', '.join(sorted(abstract))}"
