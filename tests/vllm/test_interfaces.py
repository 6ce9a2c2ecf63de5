"""What rlkv uses of the engine's internals: a version that changed them fails here by name.

Sources are read, not imported: those of the installed engine, and those that VLLM_SOURCES names,
folders that hold the package ``vllm`` (a wheel's files will do).
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlkv.vllm.settings import SERVED
from tests.helpers.paths import ROOT
from tests.helpers.sources import Found, Sources, defined_in, parameters

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
    f"{ATTENTION}:CommonAttentionMetadata.batch_size": "self",
    "vllm.v1.spec_decode.draft_model:DraftModelProposer.propose": "num_rejected_tokens_gpu",
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": (
        "x cu_num_tokens num_tokens replace_from replace_to"
    ),
    "vllm.v1.sample.rejection_sampler:apply_sampling_constraints": (
        "logits cu_num_draft_tokens sampling_metadata"
    ),
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
    f"{MANAGER}.__init__": "kv_cache_spec scheduler_block_size max_admission_blocks_per_request",
    f"{MANAGER}._remove_blocks_in_range": "request_id",
    f"{MANAGER}.cache_blocks": "request num_tokens",
    # its result is an attribute that rlkv sets
    "vllm.v1.request:Request.get_skip_reading_prefix_cache": "self",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry._ensure_registered": "",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register": "uniform_type_base_spec",
    "vllm.entrypoints.generate.beam_search.offline:BeamSearchOfflineMixin.beam_search": "self",
    "vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search": "self",
    "vllm.v1.engine.async_llm:AsyncLLM.add_request": "request_id prompt",
    "vllm.v1.engine.llm_engine:LLMEngine.add_request": "request_id prompt params",
    "vllm.v1.engine.llm_engine:LLMEngine.step": "self",
    "vllm.v1.engine.llm_engine:LLMEngine.has_unfinished_requests": "self",
    "vllm.v1.engine.llm_engine:LLMEngine.abort_request": "request_ids internal",
    "vllm.v1.engine.llm_engine:LLMEngine.reset_prefix_cache": "self",
    "vllm.v1.engine.llm_engine:LLMEngine.collective_rpc": "method args",
    "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter": "lora_request",
    "vllm.v1.worker.gpu_worker:Worker.reload_weights": "self",
    "vllm.transformers_utils.repo_utils:is_mistral_model_repo": "model_name_or_path revision",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model": "self",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights": (
        "weights_iterator weights_path is_checkpoint_format"
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.get_model": "self",
}
# read or set by rlkv
FIELDS = {
    "vllm.config:ParallelConfig": (
        "tensor_parallel_size pipeline_parallel_size decode_context_parallel_size "
        "prefill_context_parallel_size use_ubatching"
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
        "kv_transfer_config max_in_flight_tokens use_v2_model_runner"
    ),
    "vllm.config:LoadConfig": "load_format",
    "vllm.lora.worker_manager:WorkerLoRAManager": "_adapter_manager",
    "vllm.lora.model_manager:LoRAModelManager": "model",
    "vllm.lora.lora_model:LoRAModel": "loras",
    "vllm.lora.lora_weights:LoRALayerWeights": "lora_a lora_b",
    "vllm.config:SpeculativeConfig": (
        "method model draft_model_config rejection_sample_method revision code_revision "
        "max_model_len kv_cache_dtype attention_backend moe_backend draft_load_config "
        "use_local_argmax_reduction parallel_drafting use_heterogeneous_vocab "
        "disable_padded_drafter_batch quantization"
    ),
    "vllm.v1.spec_decode.draft_model:DraftModelProposer": (
        "model input_ids positions block_size device vllm_config _draft_attn_layer_names"
    ),
    "vllm.config:CompilationConfig": "static_forward_context splitting_ops cudagraph_mode",
    "vllm.config.model_arch:ModelArchitectureConfig": "rswa_window",
    "vllm.engine.arg_utils:EngineArgs": (
        "kv_cache_memory_bytes skip_tokenizer_init generation_config logprobs_mode "
        "enable_chunked_prefill worker_extension_cls additional_config config_format load_format"
    ),
    "vllm.forward_context:ForwardContext": "no_compile_layers",
    f"{ATTENTION}:AttentionBackend": "forward_includes_kv_cache_update supported_dtypes "
    "supported_kv_cache_layouts",
    f"{ATTENTION}:AttentionCGSupport": "NEVER UNIFORM_SINGLE_TOKEN_DECODE",
    f"{ATTENTION}:CommonAttentionMetadata": (
        "query_start_loc query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound num_reqs "
        "num_actual_tokens max_query_len max_seq_len block_table_tensor slot_mapping "
        "is_prefilling rswa_prefix_lens"
    ),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadata": (
        "num_actual_tokens max_query_len max_seq_len seq_lens query_start_loc block_table"
    ),
    "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadata": (
        "num_actual_tokens seq_lens rswa_prefix_lens rswa_window"
    ),
    MANAGER: "supports_fine_grained_hash_lookup scheduler_block_size",
    "vllm.v1.kv_cache_interface:AttentionSpec": "block_size num_kv_heads head_size head_size_v "
    "dtype page_size_bytes page_size_padded",
    "vllm.v1.kv_cache_interface:MambaSpec": "page_size_bytes page_size_padded",
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": "sliding_window",
    "vllm.config:ModelConfig": "architecture config_format dtype is_hybrid "
    "model_class_overrides revision",
    "vllm.v1.kv_cache_layout:KVCacheLayout": "BLHNC LBHNC",
    "vllm.sampling_params:SamplingParams": (
        "temperature top_p top_k seed max_tokens logprobs stop_token_ids ignore_eos detokenize "
        "output_kind"
    ),
}


def folders() -> list[Any]:
    """Return where to look, and say what is missing."""
    installed = find_spec("vllm")
    places: dict[str, Path] = {}
    if installed is not None and installed.origin is not None:
        places["installed"] = Path(installed.origin).parents[1]
    for given in filter(None, os.environ.get("VLLM_SOURCES", "").split(os.pathsep)):
        places[given] = Path(given)
    if not places:
        why = "vLLM is not installed, and VLLM_SOURCES names no folder with its sources"
        return [pytest.param(None, marks=pytest.mark.skip(reason=why))]
    return [pytest.param(place, id=name) for name, place in places.items()]


@pytest.fixture(scope="module", params=folders())
def sources(request: pytest.FixtureRequest) -> Sources:
    found = Sources(request.param, ROOT)
    assert found.module("vllm") is not None, f"{request.param} does not hold the package vllm"
    return found


def test_names_that_are_imported(sources: Sources) -> None:
    missing = []
    for file in sorted((ROOT / "rlkv").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                names = [f"{node.module}:{alias.name}" for alias in node.names]
                missing += [name for name in names if sources.find(*name.split(":")) is None]
    assert not missing


def test_what_is_called_takes_the_same_parameters(sources: Sources) -> None:
    missing = []
    for name, expected in CALLS.items():
        found = sources.find(*name.split(":"))
        if found is None:
            missing.append(name)
        else:
            wrong = set(expected.split()) - parameters(found.node)
            missing += [f"{name}({parameter})" for parameter in sorted(wrong)]
    assert not missing


def test_what_is_read_is_there(sources: Sources) -> None:
    missing = []
    for name, expected in FIELDS.items():
        found = sources.find(*name.split(":"))
        members = {} if found is None else sources.members(found)
        missing += [f"{name}.{field}" for field in expected.split() if field not in members]
    assert not missing


def test_models_that_are_served(sources: Sources) -> None:
    """Each is made of the engine's class, whose weights pass through ``load_weights``."""
    registry = sources.module("vllm.model_executor.models.registry")
    assert registry is not None
    places: dict[str, tuple[str, str]] = {}
    for node in ast.walk(registry.node):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value in SERVED:
                places[key.value] = ast.literal_eval(value)
    missing = set(SERVED) - places.keys()
    for name, (module, stock) in places.items():
        found = sources.find(f"vllm.model_executor.models.{module}", stock)
        if found is None or "load_weights" not in sources.members(found):
            missing.add(name)
    assert not missing


def own_classes(sources: Sources) -> Iterator[tuple[str, list[Found]]]:
    """Yield the classes that stand in the place of the engine's, with what they inherit from."""
    for file in sorted((ROOT / "rlkv" / "vllm").glob("*.py")):
        module = sources.module(f"rlkv.vllm.{file.stem}")
        assert module is not None
        for node in module.node.body:
            if isinstance(node, ast.ClassDef):
                lineage = sources.lineage(Found(module.module, node))
                if any(is_engines(one) for one in lineage):
                    yield node.name, lineage


def is_engines(found: Found) -> bool:
    return found.module.split(".")[0] == "vllm"


def test_what_the_engine_calls_takes_its_parameters(sources: Sources) -> None:
    missing = set()
    compared = 0
    for name, lineage in own_classes(sources):
        theirs: dict[str, Any] = {}
        for one in reversed(lineage):
            for method, node in defined_in(one.node):
                if not isinstance(node, ast.FunctionDef) or method == "__init__":
                    continue
                if is_engines(one):
                    theirs[method] = node
                elif method in theirs and "**" not in parameters(node):
                    compared += 1
                    wrong = parameters(theirs[method]) - parameters(node) - {"self", "cls"}
                    missing |= {f"{name}.{method}({parameter})" for parameter in wrong}
    assert not missing
    assert compared > 50


def test_no_method_is_left_abstract(sources: Sources) -> None:
    classes = dict(own_classes(sources))
    inherited = {one.node.name for lineage in classes.values() for one in lineage[1:]}
    abstract = []
    for name in classes.keys() - inherited:
        for method, found in sources.members(classes[name][0]).items():
            marks = getattr(found.node, "decorator_list", [])
            if any(ast.unparse(mark).endswith("abstractmethod") for mark in marks):
                abstract.append(f"{name}.{method}")
    assert not abstract


def test_sources_are_read_as_python_would(tmp_path: Path) -> None:
    """Names through imports, members through bases; what is gone is missing."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("if typing.TYPE_CHECKING:\n    from .b import Own, made\n")
    (package / "a.py").write_text(
        "class Base:\n    left: int\n    def run(self, old, *, new=1): self.set = 2\n"
        "    def other(self, x): local = 3\n"
    )
    (package / "b.py").write_text(
        "from vllm.a import Base as Renamed\n"
        "class Own(Renamed[int]):\n    def other(self, y, **rest): ...\n"
        "made = Own()\n"
    )
    found = Sources(tmp_path)
    own = found.find("vllm", "Own")
    assert own is not None
    assert own.module == "vllm.b"
    assert found.members(own).keys() == {"left", "run", "set", "other"}
    for path, expected in (
        ("Own.run", {"self", "old", "new"}),
        ("made.other", {"self", "y", "**"}),
    ):
        method = found.find("vllm", path)
        assert method is not None
        assert parameters(method.node) == expected
    assert found.find("vllm", "Gone") is found.find("vllm", "Own.gone") is None
    assert found.find("vllm.a", "local") is None
    assert found.find("vllm.c", "Own") is None
