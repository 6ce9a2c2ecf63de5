"""Gates in safetensors files, alone or as a PEFT adapter folder, and the header in which every format states the rest.

An adapter is what ``save_pretrained`` of a gated model writes; PEFT ignores the header of its weights file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkv.models.shape import ModelShape
from rlkv.utils.atomic import write_bytes, write_json
from rlkv.utils.jsonl import parse_json, read_json

FORMAT = "rlkv-gates"
VERSION = 1
EXPECTED = "expected a .pt, .safetensors or .tsv gates file or a PEFT folder"
HEADER_KEY = "rlkv_gates"  # of the metadata in a safetensors file
_FIELDS = ("model", "sink", "window", "deploy_sink", "deploy_window", "training")
_LATER_FIELDS = ("deploy_protect_prompt",)  # which the first files do not have
PEFT_TYPE = "HEAD_GATE"  # of rlkv.training.head_gate, which imports peft
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
GATE_KEY = "base_model.model.model.layers.{layer}.self_attn.rlkv_gate.alpha"
_LAYER = re.compile(r"\.layers\.(\d+)\..*\brlkv_gate\b")


def to_header(payload: dict[str, Any]) -> dict[str, Any]:
    """All of ``HeadGates.to_payload()`` but the tensors, as plain JSON-able values."""
    model = payload["model"].to_dict() if payload["model"] else None
    fields = (*_FIELDS, *_LATER_FIELDS)
    return {"format": FORMAT, "version": VERSION, **{name: payload[name] for name in fields}, "model": model}


def from_header(header: Any, path: Path) -> dict[str, Any]:
    """Arguments of ``HeadGates`` from what :func:`to_header` gave; ValueError if it is another or incomplete."""
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{path}: not a gates file (it does not name the format {FORMAT!r}), {EXPECTED}")
    version = header.get("version")
    if not isinstance(version, int):
        raise ValueError(f"{path}: the gates format version is {version!r}, expected a number up to {VERSION}")
    if version > VERSION:
        raise ValueError(
            f"{path}: written in gates format version {version}, expected at most {VERSION}: upgrade rlkv to read it"
        )
    try:
        model = ModelShape(**header["model"]) if header["model"] is not None else None
        later = {name: header[name] for name in _LATER_FIELDS if name in header}
        return {name: header[name] for name in _FIELDS} | later | {"model": model}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged gates file, expected a field that is absent or wrong ({error})") from error


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """``(tensors by name, header or None)`` of a safetensors file; ValueError if it is damaged or another kind."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        return tensors, parse_json(metadata.get(HEADER_KEY, "null"))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path}: truncated, damaged or not a safetensors file ({error}), {EXPECTED}") from error


def write_safetensors(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Tensors with ``header`` in the file's metadata (and ``format: pt``, which PEFT and transformers look for)."""
    from safetensors.torch import save

    write_bytes(path, save(tensors, {"format": "pt", HEADER_KEY: json.dumps(header)}))


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
    """Arguments of ``HeadGates`` from an adapter folder; ValueError if it is damaged or another adapter."""
    weights, config_path = folder / ADAPTER_WEIGHTS, folder / ADAPTER_CONFIG
    try:
        config = read_json(config_path)
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
    if not isinstance(name, str | None):
        raise ValueError(f"{config_path}: base_model_name_or_path is {name!r}, expected the name of a model")
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
        "num_layers": payload["alpha"].shape[0],
        "num_kv_heads": payload["alpha"].shape[1],
    }
    write_json(folder / ADAPTER_CONFIG, config)
