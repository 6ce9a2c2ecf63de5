"""Gates as a PEFT adapter folder, as ``save_pretrained`` of a gated model writes it.

The header of the weights file also holds mean gates, model shape and training summary, which PEFT ignores.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkv.gates.header import from_header, read_safetensors, to_header, write_safetensors
from rlkv.models.shape import ModelShape
from rlkv.utils.atomic import write_json

PEFT_TYPE = "HEAD_GATE"  # of rlkv.training.head_gate, which imports peft
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
GATE_KEY = "base_model.model.model.layers.{layer}.self_attn.rlkv_gate.alpha"
_LAYER = re.compile(r"\.layers\.(\d+)\..*\brlkv_gate\b")


def is_peft_weights(tensors: dict[str, Tensor]) -> bool:
    """Whether tensor names are those of an adapter with gates."""
    return any(_LAYER.search(name) for name in tensors)


def _stack(tensors: dict[str, Tensor], path: Path) -> Tensor:
    """One row per layer, ordered by the layer number in the name."""
    rows: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        match = _LAYER.search(name)
        if match is None:
            raise ValueError(f"{path}: no adapter of KV head gates (it holds {name!r}), expected keys like {GATE_KEY}")
        layer = int(match[1])
        if layer in rows:
            raise ValueError(f"{path}: two tensors hold gates of layer {layer}, expected one per layer")
        rows[layer] = tensor.flatten().float()
    sizes = {layer: rows[layer].numel() for layer in sorted(rows)}
    if list(sizes) != list(range(len(rows))) or len(set(sizes.values())) != 1:
        raise ValueError(f"{path}: found gates per layer {sizes}, expected as many for every layer from 0 without gaps")
    return torch.stack([rows[layer] for layer in sizes])


def read_peft(folder: Path) -> dict[str, Any]:
    """Arguments of ``HeadGates`` from an adapter folder, written here or by PEFT.

    Raises:
        ValueError: if it is incomplete, damaged or another adapter.
    """
    weights, config_path = folder / ADAPTER_WEIGHTS, folder / ADAPTER_CONFIG
    try:
        config = json.loads(config_path.read_text())
        sizes = {name: config[name] for name in ("sink", "window")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{config_path}: not the config of KV head gates ({error!r}), expected sink and window"
        ) from error
    if not weights.exists():
        raise ValueError(f"{folder}: found {ADAPTER_CONFIG} alone, expected {ADAPTER_WEIGHTS} next to it")
    tensors, header = read_safetensors(weights)
    alpha = _stack(tensors, weights)
    if header is not None:
        return {**from_header(header, weights), **sizes, "alpha": alpha, "mean_alpha": header.get("rank")}
    name = config.get("base_model_name_or_path")
    model = ModelShape(name, "", alpha.shape[0], alpha.shape[1], 0, 0) if name else None
    return {"alpha": alpha, "model": model, **sizes}


def write_peft(folder: Path, payload: dict[str, Any]) -> None:
    """Write an adapter that ``PeftModel.from_pretrained`` loads once ``rlkv.training.head_gate`` is imported."""
    tensors = {GATE_KEY.format(layer=i): row.clone() for i, row in enumerate(payload["alpha"])}
    header = {**to_header(payload), "rank": payload["mean_alpha"].tolist()}  # JSON keeps float32 exactly
    write_safetensors(folder / ADAPTER_WEIGHTS, tensors, header)
    config = {
        "peft_type": PEFT_TYPE,
        "base_model_name_or_path": payload["model"].model_id if payload["model"] else None,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "sink": payload["sink"],
        "window": payload["window"],
    }
    write_json(folder / ADAPTER_CONFIG, config)
