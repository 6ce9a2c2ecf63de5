"""Models of vLLM whose attention is mixed: the engine's own classes with other attention layers, and their gates.

They are chosen by name with ``hf_overrides``; S and W are in the engine's ``additional_config``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import ModelRegistry
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from rlkv.attention import LocalSizes
from rlkv.vllm.limits import check_engine
from rlkv.vllm.mixed.backend import mixed_backend
from rlkv.vllm.settings import ARCHITECTURES, MIXED, MIXED_KEY

GATES = "rlkv_gates"  # the buffer of the model: float32 [num_layers, num_kv_heads]


def _exchange(model: Any, config: VllmConfig) -> None:
    """Put a mixed attention layer in the place of every stock one, all reading one buffer of gates."""
    check_engine(config, "a mixed-attention rollout")
    sizes = LocalSizes(**config.additional_config[MIXED_KEY])
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

    Mixed.__name__ = Mixed.__qualname__ = MIXED + base.__name__
    return Mixed


RLKVMixedLlamaForCausalLM = _mixed(LlamaForCausalLM)
RLKVMixedQwen2ForCausalLM = _mixed(Qwen2ForCausalLM)
RLKVMixedQwen3ForCausalLM = _mixed(Qwen3ForCausalLM)


def register() -> None:
    """Make the mixed classes known to this process under their names."""
    for name in (MIXED + architecture for architecture in ARCHITECTURES):
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, globals()[name])


class GateWorker:
    """What the engine's worker can be asked for (``collective_rpc``): vLLM mixes this class into it."""

    model_runner: Any

    def _gates(self) -> Tensor:
        model = self.model_runner.get_model()
        buffer: Tensor = getattr(model, GATES)
        for index, layer in enumerate(model.model.layers):
            # moving the model to another device copies the buffer, and the layers keep the old one
            if layer.self_attn.attn.impl.alpha_H.data_ptr() != buffer[index].data_ptr():
                raise RuntimeError(f"layer {index} does not read the model's gates: the model was moved after loading")
        return buffer

    def rlkv_gates(self) -> list[list[float]]:
        """The gates ``[num_layers][num_kv_heads]``."""
        return self._gates().cpu().tolist()

    def rlkv_set_gates(self, alpha: list[list[float]]) -> None:
        """Overwrite the gates in place."""
        self._gates().copy_(torch.tensor(alpha, dtype=torch.float32))
