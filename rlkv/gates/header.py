"""What a gates file says in addition to its tensors, checked when it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from rlkv.models.shape import ModelShape
from rlkv.utils.atomic import atomic_path

FORMAT = "rlkv-gates"
VERSION = 1
EXPECTED = "expected a .pt, .safetensors or .tsv gates file or a PEFT folder"
HEADER_KEY = "rlkv_gates"  # of the metadata in a safetensors file
_FIELDS = ("model", "sink", "window", "deploy_sink", "deploy_window", "training")


def to_header(payload: dict[str, Any]) -> dict[str, Any]:
    """All of ``HeadGates.to_payload()`` but the tensors, as plain JSON-able values."""
    model = payload["model"].to_dict() if payload["model"] else None
    return {"format": FORMAT, "version": VERSION, **{name: payload[name] for name in _FIELDS}, "model": model}


def from_header(header: Any, path: Path) -> dict[str, Any]:
    """Arguments of ``HeadGates`` from what :func:`to_header` gave.

    Raises:
        ValueError: if it is not such a header, of a newer version, or incomplete.
    """
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
        return {name: header[name] for name in _FIELDS} | {"model": model}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged gates file, expected a field that is absent or wrong ({error})") from error


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """``(tensors by name, header)`` of a safetensors file; the header is None if the file was not written here.

    Raises:
        ValueError: if the file is truncated, damaged or of another kind.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        return tensors, json.loads(metadata.get(HEADER_KEY, "null"))
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: truncated, damaged or not a safetensors file ({error}), {EXPECTED}") from error


def write_safetensors(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Tensors with ``header`` in the file's metadata (and ``format: pt``, which PEFT and transformers look for)."""
    from safetensors.torch import save_file

    with atomic_path(path) as partial:
        save_file(tensors, partial, {"format": "pt", HEADER_KEY: json.dumps(header)})
