"""Models of vLLM whose attention is mixed: the engine's own classes, their attention layers exchanged.

A model becomes mixed by its architecture name (``RLKVMixedLlamaForCausalLM`` instead of ``LlamaForCausalLM``, set with
``hf_overrides``) and finds S and W in the engine's ``additional_config``; other models of the process stay stock.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import ModelRegistry
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from rlkv.attention.sizes import SinkWindow
from rlkv.vllm.mixed.backend import mixed_backend
from rlkv.vllm.names import CONFIG_KEY, PREFIX

GATES = "rlkv_gates"  # the buffer of the model: float32 [num_layers, num_kv_heads]


def check_supported(config: VllmConfig) -> None:
    """Refuse what the mixed attention would get wrong.

    Raises:
        ValueError: names the setting.
    """
    parallel, cache, text = config.parallel_config, config.cache_config, config.model_config.hf_text_config
    refused = {
        "tensor parallel size above 1": parallel.tensor_parallel_size > 1,
        "pipeline parallel size above 1": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "speculative decoding": config.speculative_config is not None,
        f"a quantised KV cache ({cache.cache_dtype})": cache.cache_dtype not in ("auto", "float16", "bfloat16"),
        "a KV connector": config.kv_transfer_config is not None,
        "offloading of the KV cache": cache.kv_offloading_size is not None,
        "dual chunk attention": bool(getattr(text, "dual_chunk_attention_config", None)),
    }
    for setting, is_set in refused.items():
        if is_set:
            raise ValueError(f"mixed-attention rollouts do not work with {setting}: run one plain engine per GPU")


def _exchange(model: Any, config: VllmConfig) -> None:
    """Put a mixed attention layer in the place of every stock one, all reading one buffer of gates."""
    check_supported(config)
    sizes = SinkWindow(**config.additional_config[CONFIG_KEY])
    layers = model.model.layers
    stock: list[Attention] = [layer.self_attn.attn for layer in layers]
    gates = torch.ones(len(stock), stock[0].num_kv_heads, dtype=torch.float32)
    model.register_buffer(GATES, gates, persistent=False)
    for index, (layer, old) in enumerate(zip(layers, stock, strict=True)):
        if old.sliding_window is not None:
            raise ValueError(f"{old.layer_name} has a sliding window: mixed attention takes full-attention layers only")
        del config.compilation_config.static_forward_context[old.layer_name]
        mixed = Attention(
            old.num_heads,
            old.head_size,
            old.impl.scale,
            num_kv_heads=old.num_kv_heads,
            cache_config=config.cache_config,
            quant_config=old.quant_config,
            prefix=old.layer_name,
            attn_backend=mixed_backend(),
        )
        mixed.impl.attach(getattr(model, GATES)[index], sizes)
        layer.self_attn.attn = mixed


def _mixed(base: type) -> type:
    class Mixed(base):
        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
            _exchange(self, get_current_vllm_config())

    Mixed.__name__ = Mixed.__qualname__ = PREFIX + base.__name__
    return Mixed


RLKVMixedLlamaForCausalLM = _mixed(LlamaForCausalLM)
RLKVMixedQwen2ForCausalLM = _mixed(Qwen2ForCausalLM)
RLKVMixedQwen3ForCausalLM = _mixed(Qwen3ForCausalLM)
CLASSES = (RLKVMixedLlamaForCausalLM, RLKVMixedQwen2ForCausalLM, RLKVMixedQwen3ForCausalLM)


def register() -> None:
    """Make the mixed classes known to this process under their names."""
    known = ModelRegistry.get_supported_archs()
    for model_class in CLASSES:
        if model_class.__name__ not in known:
            ModelRegistry.register_model(model_class.__name__, model_class)
