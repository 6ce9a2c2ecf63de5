"""The stock models, or the same with other attention layers where rlkv was asked for; other imports are lazy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.model_executor.models.gemma import GemmaForCausalLM as StockGemma
from vllm.model_executor.models.glm4 import Glm4ForCausalLM as StockGlm4
from vllm.model_executor.models.granite import GraniteForCausalLM as StockGranite
from vllm.model_executor.models.llama import LlamaForCausalLM as StockLlama
from vllm.model_executor.models.mistral import MistralForCausalLM as StockMistral
from vllm.model_executor.models.phi3 import Phi3ForCausalLM as StockPhi3
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM as StockQwen2
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM as StockQwen3

from rlkv.vllm.plugin import check_version
from rlkv.vllm.settings import read_request

if TYPE_CHECKING:
    from rlkv.vllm.reallocation.weights import HeadOrder


class _Dispatch:
    """The stock model, with other attention layers if rlkv was asked for."""

    rlkv: HeadOrder | None = None

    def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)  # type: ignore[call-arg]
        if read_request(vllm_config.additional_config) is not None:
            from rlkv.vllm.reallocation.reallocation import attach_reallocation

            check_version()
            self.rlkv = attach_reallocation(self, vllm_config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(weights if self.rlkv is None else self.rlkv.reordered(weights))  # type: ignore[misc]


class GemmaForCausalLM(_Dispatch, StockGemma):
    pass


class Glm4ForCausalLM(_Dispatch, StockGlm4):
    pass


class GraniteForCausalLM(_Dispatch, StockGranite):
    pass


class LlamaForCausalLM(_Dispatch, StockLlama):
    pass


class MistralForCausalLM(_Dispatch, StockMistral):
    pass


class Phi3ForCausalLM(_Dispatch, StockPhi3):
    pass


class Qwen2ForCausalLM(_Dispatch, StockQwen2):
    pass


class Qwen3ForCausalLM(_Dispatch, StockQwen3):
    pass
