"""Two tokens through a model, to find what it cannot do before anything depends on it."""

from __future__ import annotations

from typing import Any

import torch


def try_forward(model: Any, **arguments: Any) -> None:
    """Call ``model`` with two tokens and ``arguments``, in eval mode and without gradients.

    Does nothing while the weights are not there yet (on the device ``meta``, or sharded over processes).
    """
    if any(parameter.is_meta or not parameter.numel() for parameter in model.parameters()):
        return
    modes = {module: module.training for module in model.modules()}
    model.eval()
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    try:
        with torch.no_grad():
            model(input_ids=tokens, **arguments)
    finally:
        for module, training in modes.items():
            module.training = training


def refuse_latent_attention(model: Any) -> None:
    """Raise ``ValueError`` if the heads of ``model`` expand their keys and values from one latent state."""
    for module in model.modules():
        rank = getattr(module, "kv_lora_rank", None)
        if rank is not None and hasattr(module, "layer_idx"):
            raise ValueError(
                f"{model.config.model_type} has multi-head latent attention: its heads share one latent state of "
                f"{rank} numbers a token and have no KV heads of their own to gate or compress; use a model with "
                "multi-head or grouped-query attention, such as Llama or Qwen3"
            )
