"""Model classes that vLLM loads by name: its own, with other attention layers if asked for.

What is asked for is in the engine's ``additional_config``: S and W of a rollout's mixed attention,
or the settings of head reallocation.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.registry import _VLLM_MODELS
from vllm.platforms import current_platform

from rlkv.attention import LocalSizes
from rlkv.vllm.backends import exchanged, mixed_backend
from rlkv.vllm.configuration import check_engine
from rlkv.vllm.settings import (
    MIXED_KEY,
    ROLLOUT,
    SERVED,
    asks_for_rollout,
    parse_settings,
    read_request,
)

if TYPE_CHECKING:
    from rlkv.vllm.head_order import HeadOrder

GATES = "rlkv_gates"  # the buffer of the model: float32 [num_layers, num_kv_heads]


def attach_mixed(model: Any, config: VllmConfig) -> None:
    """Put mixed attention in the place of the stock layers', all reading one buffer of gates."""
    from rlkv.vllm.reallocation import check_layers

    check_engine(config, ROLLOUT)
    sizes = LocalSizes(**config.additional_config[MIXED_KEY])
    layers = model.model.layers
    stock: list[Attention] = [layer.self_attn.attn for layer in layers]
    check_layers(stock, ROLLOUT)
    gates = torch.ones(len(stock), stock[0].num_kv_heads, dtype=torch.float32)
    model.register_buffer(GATES, gates, persistent=False)
    for index, (layer, old) in enumerate(zip(layers, stock, strict=True)):
        mixed = exchanged(old, mixed_backend(), config)
        mixed.impl.attach(getattr(model, GATES)[index], sizes)
        layer.self_attn.attn = mixed


class GateWorker:
    """Calls that a worker answers (``collective_rpc``): vLLM mixes this class into its own."""

    model_runner: Any

    def _gates(self) -> Tensor:
        model = self.model_runner.get_model()
        buffer: Tensor = getattr(model, GATES)
        for index, layer in enumerate(model.model.layers):
            # moving the model to another device copies the buffer, and the layers keep the old one
            if layer.self_attn.attn.impl.alpha_H.data_ptr() != buffer[index].data_ptr():
                raise RuntimeError(
                    f"layer {index} does not read the model's gates: the model was moved after "
                    "loading"
                )
        return buffer

    def rlkv_gates(self) -> list[list[float]]:
        """Return the gates ``[num_layers][num_kv_heads]``."""
        return self._gates().cpu().tolist()

    def rlkv_set_gates(self, alpha: list[list[float]]) -> None:
        """Overwrite the gates in place."""
        self._gates().copy_(torch.tensor(alpha, dtype=torch.float32))

    def rlkv_pool(self) -> tuple[int, int, list[Any]]:
        """Return tokens of a block, entries of the least one, and the layers without gates.

        Of head reallocation.
        """
        return self.model_runner.get_model().rlkv_pool


class _Dispatch:
    """The stock model, with other attention layers if rlkv was asked for."""

    rlkv: HeadOrder | None = None

    def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)  # type: ignore[call-arg]
        if asks_for_rollout(vllm_config.additional_config):
            attach_mixed(self, vllm_config)
            return
        request = read_request(vllm_config.additional_config)
        if request is None:
            return
        from rlkv.vllm.drafts import mend_sampling
        from rlkv.vllm.keep import attach_keep
        from rlkv.vllm.reallocation import attach_reallocation

        if vllm_config.speculative_config is not None and current_platform.is_cpu():
            mend_sampling()
        if parse_settings(request).keeps:
            attach_keep(self, vllm_config)
        else:
            self.rlkv = attach_reallocation(self, vllm_config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(weights if self.rlkv is None else self.rlkv.reordered(weights))  # type: ignore[misc]


@cache
def __getattr__(name: str) -> type:
    """Make the class of an architecture that is served, out of the engine's own."""
    if name not in SERVED:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    module, stock = _VLLM_MODELS[name]
    found = getattr(import_module(f"vllm.model_executor.models.{module}"), stock)
    return type(name, (_Dispatch, found), {"__module__": __name__})
