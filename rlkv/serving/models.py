"""The stock models, and in their place, where rlkv was asked for, the same with other attention layers.

Only the stock model classes are imported here, so that a plugin that nobody asks for costs nothing and breaks nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor
from vllm.model_executor.models.llama import LlamaForCausalLM as StockLlama
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM as StockQwen2
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM as StockQwen3

from rlkv.serving.settings import read_request
from rlkv.serving.versions import check_version, installed_version

MIXED = "mixed"


class Attachment(Protocol):
    """What was changed in a model."""

    def weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """The checkpoint's tensors as the changed model takes them."""
        ...


def attach(model: Any, vllm_config: Any, request: dict[str, Any]) -> Attachment:
    """Exchange the attention layers of ``model``: mixed attention for rollouts, or head reallocation for serving.

    Raises:
        ValueError: for what is not supported, by name.
    """
    if request.get("mode") == MIXED:
        from rlkv.serving.mixed_model import attach_mixed

        return attach_mixed(model, vllm_config, request)
    from rlkv.serving.reallocation import attach_reallocation

    return attach_reallocation(model, vllm_config, request)


class _Dispatch:
    """Builds the stock model, and changes it if rlkv was asked for."""

    rlkv: Attachment
    stock: Any

    def __new__(cls, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> Any:
        if read_request(vllm_config.additional_config) is None:
            return cls.stock(vllm_config=vllm_config, prefix=prefix, **kwargs)
        return super().__new__(cls)

    def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)  # type: ignore[call-arg]
        check_version(installed_version())
        request = read_request(vllm_config.additional_config)
        assert request is not None
        self.rlkv = attach(self, vllm_config, request)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(self.rlkv.weights(weights))  # type: ignore[misc]


class LlamaForCausalLM(_Dispatch, StockLlama):  # type: ignore[misc]
    stock = StockLlama


class Qwen2ForCausalLM(_Dispatch, StockQwen2):  # type: ignore[misc]
    stock = StockQwen2


class Qwen3ForCausalLM(_Dispatch, StockQwen3):  # type: ignore[misc]
    stock = StockQwen3
