"""Checkpoints with quantised weights, in formats that are common on the hub, of plain ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

GROUP = 32  # inputs that share a scale
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs in a packed number


def _quantise(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Integers ``[out, in]`` around 0, and scales ``[out, in / group]``."""
    most = 2 ** (bits - 1) - 1
    grouped = weight.unflatten(1, (-1, group))
    scale = grouped.abs().amax(-1).clamp(min=1e-5) / most
    return (grouped / scale[..., None]).round().clamp(-most, most).flatten(1).int(), scale


def _pack(numbers: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight 4-bit numbers of ``dim`` in each int32."""
    parts = numbers.to(torch.int64).unflatten(dim, (-1, 8)).unbind(dim + 1)
    packed = sum(parts[own] << (4 * place) for place, own in enumerate(order))
    assert isinstance(packed, Tensor)
    return (packed - (packed >> 31 << 32)).to(torch.int32)


def _int8(weight: Tensor) -> dict[str, Tensor]:
    numbers, scale = _quantise(weight, 8, weight.shape[1])
    return {"weight": numbers.to(torch.int8), "weight_scale": scale}


def _packed(weight: Tensor) -> dict[str, Tensor]:
    numbers, scale = _quantise(weight, 4, GROUP)
    return {
        "weight_packed": _pack(numbers + 8, 1),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }


def _gptq(weight: Tensor) -> dict[str, Tensor]:
    numbers, scale = _quantise(weight, 4, GROUP)
    return {
        "qweight": _pack(numbers.T + 8, 0),
        "qzeros": _pack(torch.full_like(scale.T, 7).int(), 1),  # stored less one
        "scales": scale.T.contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }


def _awq(weight: Tensor) -> dict[str, Tensor]:
    numbers, scale = _quantise(weight, 4, GROUP)
    return {
        "qweight": _pack(numbers.T + 8, 1, _AWQ_ORDER),
        "qzeros": _pack(torch.full_like(scale.T, 8).int(), 1, _AWQ_ORDER),
        "scales": scale.T.contiguous(),
    }


def _fp8(weight: Tensor) -> dict[str, Tensor]:
    """In blocks of ``GROUP x GROUP``, whose scales are of type float32."""
    blocks = weight.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-5) / 448
    numbers = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)
    return {"weight": numbers.to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def _compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    common = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
    return {**common, "ignore": ["lm_head"], "format": form, "config_groups": {"group_0": group}}


_NUMBERS = {"type": "int", "num_bits": 4, "symmetric": True}
_NUMBERS |= {"strategy": "group", "group_size": GROUP}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
# formats of 4 bits that the CPU engine takes, with its settings
FORMATS: dict[str, tuple[Callable[[Tensor], dict[str, Tensor]], dict[str, Any]]] = {
    "packed": (_packed, _compressed("pack-quantized", _NUMBERS)),
    "awq": (_awq, {**_AWQ, "version": "gemm"}),
}
LAYOUTS: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    **{form: change for form, (change, _) in FORMATS.items()},
    "int8": _int8,
    "gptq": _gptq,
    "fp8": _fp8,
}


def with_weights_of(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Give ``model`` the numbers that the weights of :func:`quantise_folder` stand for."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                numbers, scale = _quantise(weight, 4, GROUP)
                rounded = scale.to(dtype).float()[..., None]
                weight.copy_((numbers.unflatten(1, (scale.shape[1], -1)) * rounded).flatten(1))
            else:
                weight.copy_(weight.to(dtype))
    return model


def quantise_folder(source: Path, target: Path, form: str, dtype: torch.dtype) -> None:
    """Copy a checkpoint with all projections of its layers in a format of ``FORMATS``."""
    shutil.copytree(source, target)
    change, config = FORMATS[form]
    written: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            for kind, changed in change(tensor).items():
                own = changed.to(dtype) if changed.is_floating_point() else changed
                written[name.removesuffix("weight") + kind] = own.contiguous()
        else:
            written[name] = tensor.to(dtype)
    save_file(written, target / "model.safetensors", {"format": "pt"})
    settings = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
