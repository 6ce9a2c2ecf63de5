"""What an engine's worker can be asked from outside: to set gates, and to read them back.

Reached with ``collective_rpc`` whether the engine runs in the caller's process or in one of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkv.vllm.mixed.model import GATES


class GateWorker:
    """vLLM mixes this class into its worker (``worker_extension_cls``)."""

    model_runner: Any

    def _gates(self) -> Tensor:
        model = self.model_runner.get_model()
        buffer: Tensor = getattr(model, GATES)
        for index, layer in enumerate(model.model.layers):
            # moving the model to another device copies the buffer, and the layers keep the old one
            if layer.self_attn.attn.impl.alpha_H.data_ptr() != buffer[index].data_ptr():
                raise RuntimeError(f"layer {index} does not read the model's gates: the model was moved after loading")
        return buffer

    def rlkv_set_gates(self, alpha: list[list[float]]) -> list[list[float]]:
        """Overwrite the gates, ``[num_layers][num_kv_heads]``, in place; what the layers read from now on.

        Raises:
            ValueError: for another shape.
        """
        gates = self._gates()
        given = torch.tensor(alpha, dtype=torch.float32)
        if given.shape != gates.shape:
            raise ValueError(f"the engine's model has gates {list(gates.shape)}, got {list(given.shape)}")
        gates.copy_(given)
        return self.rlkv_gates()

    def rlkv_gates(self) -> list[list[float]]:
        """The gates as they are."""
        return self._gates().cpu().tolist()
