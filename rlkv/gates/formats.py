"""Reading and writing gates files.

Readers return the keyword arguments of ``HeadGates``, writers take them.

- ``.pt``: a versioned dict of tensors and plain values, loaded with ``weights_only=True`` (no code
  is run);
- ``.safetensors``: tensors ``alpha`` and ``rank`` (the gates' means over training), the rest as
  JSON in the header;
- ``.tsv``: alpha alone, one row per layer, tab separated: the published layout, for models with
  gates in every layer;
- a PEFT folder, and a repository on the Hugging Face hub that holds one of these.
"""

from __future__ import annotations

import io
import json
import re
import reprlib
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rlkv.models.builtin import PACKAGED_GATES
from rlkv.models.layout import ranges
from rlkv.models.shape import ModelShape
from rlkv.utils.files import at_home, atomic_path, parse_json, read_json, write_bytes, write_json
from rlkv.utils.numbers import check_whole
from rlkv.utils.runtime import first_line

FORMAT = "rlkv-gates"
VERSION = 2  # 1: gates on all heads of all layers, which is written as before
SUFFIXES = (".pt", ".safetensors", ".tsv")
EXPECTED = "expected a .pt, .safetensors or .tsv gates file or a PEFT folder"
_FIELDS = ("model", "sink", "window", "deploy_sink", "deploy_window", "training")
_LATER_FIELDS = ("deploy_protect_prompt",)  # which the first files do not have
_MOST_LAYERS = 10_000  # of a model; a damaged number is not allocated
HEADER_KEY = "rlkv_gates"  # of the metadata in a safetensors file

PEFT_TYPE = "HEAD_GATE"  # of rlkv.attention.head_gate, which imports peft
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
GATE = "rlkv_gate"  # the part of an attention module that holds its gates
GATE_KEY = "base_model.model.model.layers.{layer}.self_attn.rlkv_gate.alpha"
_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")  # of the layer, in the name of a module

_HUB = "hf://"
_HUB_ADDRESS = re.compile(r"(?:hf://)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_HUB_FILES = ["gates.pt", "gates.safetensors", "*.tsv", "config.json"]
_HUB_FILES += [ADAPTER_CONFIG, ADAPTER_WEIGHTS]


def read_gates(path: str | Path) -> dict[str, Any]:
    """Read a file, a folder, a hub address, ``tiny`` or ``smol``; see ``HeadGates.load``."""
    if isinstance(path, str) and not path.strip():
        raise ValueError("the name of the gates is empty: give a file, a folder or a hub address")
    if path in PACKAGED_GATES:
        return _read_local(PACKAGED_GATES[str(path)])
    if isinstance(path, str) and _is_hub_address(path):
        return _read_local(_download(path))
    return _read_local(at_home(path))


def write_gates(path: str | Path, payload: dict[str, Any]) -> None:
    """Write by suffix; see ``HeadGates.save``."""
    if str(path).startswith(_HUB):
        raise ValueError(
            f"{path}: gates are saved to a local path, not to the hub: use rlkv-gates push"
        )
    target = at_home(path)
    tensors = {"alpha": payload["alpha"], "rank": payload["mean_alpha"]}
    if target.is_dir() or not target.suffix or str(path).endswith("/"):
        _write_peft(target, payload)
    elif target.suffix == ".pt":
        # torch would put a path's name into the archive, and report a full disk in its own way
        buffer = io.BytesIO()
        torch.save({**_to_header(payload), **tensors}, buffer)
        write_bytes(target, buffer.getvalue())
    elif target.suffix == ".safetensors":
        _write_safetensors(target, tensors, _to_header(payload))
    elif target.suffix == ".tsv":
        if payload["heads"] is not None:
            raise ValueError(
                f"{path}: a .tsv holds gates of every layer, but some layers of this model have "
                "none: save these gates as .safetensors, .pt or a PEFT folder"
            )
        with atomic_path(target) as partial:
            np.savetxt(partial, payload["alpha"].double().numpy(), fmt="%.18e", delimiter="\t")
    else:
        raise ValueError(
            f"{path}: unknown gates format {target.suffix!r}, expected {', '.join(SUFFIXES)}, or a "
            "name that ends with / for a PEFT folder"
        )


# The hub


def hub_address(address: str) -> tuple[str, str | None]:
    """Split a hub address into ``owner/name`` and the revision, if any; ValueError for others."""
    match = _HUB_ADDRESS.fullmatch(address)
    if match is None:
        raise ValueError(
            f"{address}: not a hub address, expected hf://owner/name or hf://owner/name@revision"
        )
    return match["repo"], match["revision"]


def _is_hub_address(path: str) -> bool:
    """Return whether ``path`` begins with ``hf://``, or is ``owner/name`` but not a local path."""
    if path.startswith(_HUB):
        return True
    is_repo = _HUB_ADDRESS.fullmatch(path) is not None and not path.endswith(SUFFIXES)
    return is_repo and not Path(path).exists()


def _download(address: str) -> Path:
    """Fetch the folder with the gates files of a repository, from the hub or its local cache."""
    from huggingface_hub import snapshot_download

    # HTTPError is that of the HTTP library that this version of the hub's uses
    from huggingface_hub.errors import HFValidationError, HTTPError, RevisionResolutionError

    repo, revision = hub_address(address)
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_HUB_FILES))
    except (OSError, HTTPError, HFValidationError, RevisionResolutionError) as error:
        reason = first_line(error)
        where = "" if address.startswith(_HUB) else "no such local file or folder, and "
        raise ValueError(
            f"{address}: {where}it could not be downloaded ({reason}), expected a local gates file "
            "or folder, or a hub repository that holds gates: check the name and the network"
        ) from error


# Local files and folders


def _read_local(path: Path) -> dict[str, Any]:
    if path.is_dir():
        path = _pick(path)
    if path.is_dir():
        return _read_peft(path)
    if not path.exists():
        raise ValueError(
            f"{path}: no such file or folder, {EXPECTED}: rlkv-train and rlkv-distill write "
            "gates.pt into their output folders"
        )
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty, {EXPECTED}")
    if path.suffix == ".tsv":
        return _read_tsv(path)
    if path.suffix == ".pt":
        content = header = _read_pt(path)
    elif path.suffix == ".safetensors":
        content, header = _read_safetensors(path)
        if any(_gated_layer(name) is not None for name in content):
            raise ValueError(
                f"{path}: weights of a PEFT adapter, expected a gates file: pass the folder that "
                "holds it"
            )
    else:
        raise ValueError(
            f"{path}: unknown gates format {path.suffix or 'without a suffix'!r}, {EXPECTED}"
        )
    arguments = _from_header(header, path)
    for name in ("alpha", "rank"):
        if not isinstance(content.get(name), Tensor):
            raise ValueError(f"{path}: damaged gates file, expected a tensor {name!r}")
    return arguments | {"alpha": content["alpha"], "mean_alpha": content["rank"]}


def _pick(folder: Path) -> Path:
    """Choose the file to read, or the folder itself if it is an adapter."""
    if (folder / ADAPTER_CONFIG).exists():
        return folder
    for name in ("gates.safetensors", "gates.pt"):
        if (folder / name).exists():
            return folder / name
    tables = sorted(folder.glob("*.tsv"))
    if len(tables) == 1:
        return tables[0]
    found = f"{len(tables)} .tsv files" if tables else "no gates"
    raise ValueError(
        f"{folder}: found {found} in this folder, expected {ADAPTER_CONFIG}, gates.safetensors, "
        "gates.pt or one .tsv"
    )


def _to_header(payload: dict[str, Any]) -> dict[str, Any]:
    """Return all of the payload but the tensors, as plain JSON-able values."""
    heads = payload["heads"]
    header = {"format": FORMAT, "version": 1 if heads is None else VERSION}
    header |= {name: payload[name] for name in (*_FIELDS, *_LATER_FIELDS)}
    if heads is not None:
        header["heads"] = list(heads)
    return header | {"model": asdict(payload["model"]) if payload["model"] else None}


def _from_header(header: Any, path: Path) -> dict[str, Any]:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(
            f"{path}: not a gates file (it does not name the format {FORMAT!r}), {EXPECTED}"
        )
    version = header.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise ValueError(
            f"{path}: written in gates format version {version!r}, expected 1 to {VERSION}: a "
            "newer rlkv may read it"
        )
    try:
        arguments = {name: header[name] for name in _FIELDS}
        if header["model"] is not None:
            arguments["model"] = ModelShape(**header["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: damaged gates file, expected a field that is absent or wrong ({error})"
        ) from error
    return arguments | {name: header[name] for name in (*_LATER_FIELDS, "heads") if name in header}


def _read_pt(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # arbitrary bytes make the unpickler raise almost any exception
        is_archive = path.read_bytes()[:2] == b"PK"
        found = "truncated or damaged" if is_archive else "not a file written by torch.save"
        raise ValueError(
            f"{path}: {found}, expected gates as HeadGates.save writes them"
        ) from error


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors by name, and the header or None."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        return tensors, parse_json(metadata.get(HEADER_KEY, "null"))
    except (SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path}: truncated, damaged or not a safetensors file ({error}), {EXPECTED}"
        ) from error


def _write_safetensors(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    from safetensors.torch import save

    # PEFT and transformers look for the format
    write_bytes(path, save(tensors, {"format": "pt", HEADER_KEY: json.dumps(header)}))


def _read_tsv(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError("no rows")
        if not text.endswith("\n"):  # a number that is cut in half is still a number
            raise ValueError("no newline at its end: it may be truncated")
        alpha = np.loadtxt(io.StringIO(text), delimiter="\t", comments=None, ndmin=2)
    except ValueError as error:
        raise ValueError(
            f"{path}: {error}, expected one row of tab-separated numbers per layer"
        ) from error
    return {"alpha": alpha, **_read_sibling_config(path.with_name("config.json"), *alpha.shape)}


def _read_sibling_config(path: Path, num_layers: int, num_kv_heads: int) -> dict[str, Any]:
    """Read model and sizes from DuoAttention's ``config.json`` next to a ``.tsv``, if any."""
    if not path.exists():
        return {}
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: not an object, expected the config of DuoAttention's gates")
    arguments: dict[str, Any] = {}
    name = config.get("model_name") or config.get("_name_or_path")
    if name:  # nothing else is known of the model's shape: empty fields are not compared
        arguments["model"] = ModelShape(str(name), "", num_layers, num_kv_heads, 0, 0)
    for ours, theirs in (("sink", "sink_size"), ("window", "recent_size")):
        for prefix in ("", "deploy_"):
            if config.get(prefix + theirs) is not None:
                arguments[prefix + ours] = config[prefix + theirs]
    return arguments


# PEFT folders


def _read_peft(folder: Path) -> dict[str, Any]:
    weights = folder / ADAPTER_WEIGHTS
    config_path = folder / ADAPTER_CONFIG
    try:
        config = read_json(config_path)
        sizes = {"sink": config["sink"], "window": config["window"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{config_path}: not the config of KV head gates ({error!r}), expected sink and window"
        ) from error
    if not weights.exists():
        raise ValueError(
            f"{folder}: found {ADAPTER_CONFIG} alone, expected {ADAPTER_WEIGHTS} next to it"
        )
    tensors, header = _read_safetensors(weights)
    if header is not None:  # written by HeadGates.save, not by PEFT alone
        arguments = _from_header(header, weights) | sizes
        counts = arguments.get("heads")
        layers = None if counts is None else _gated_layers(tensors)
        num_layers = len(counts) if isinstance(counts, list) else None
        alpha, heads = _stack_layers(tensors, weights, layers, num_layers)
        if counts is not None and heads != counts:
            raise ValueError(
                f"{weights}: found gates per layer {reprlib.repr(heads)}, expected "
                f"{reprlib.repr(counts)} as its header says"
            )
        return arguments | {"alpha": alpha, "heads": heads, "mean_alpha": header.get("rank")}
    layers = _target_layers(config, tensors)
    alpha, heads = _stack_layers(tensors, weights, layers, layers and config.get("num_layers"))
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str | None):
        raise ValueError(
            f"{config_path}: base_model_name_or_path is {name!r}, expected the name of a model"
        )
    model = ModelShape(name, "", alpha.shape[0], alpha.shape[1], 0, 0) if name else None
    return {"alpha": alpha, "heads": heads, "model": model, **sizes}


def _gated_layer(name: str) -> int | None:
    """Return the layer that the tensor of a gate, by its name, belongs to."""
    match = _NUMBER.search(name)
    return int(match[1]) if match is not None and GATE in name.split(".") else None


def _gated_layers(tensors: dict[str, Tensor]) -> list[int] | None:
    """Return the layers of the tensors that are gates; None if there are none."""
    found = {_gated_layer(name) for name in tensors} - {None}
    return sorted(cast(set[int], found)) or None


def _target_layers(config: dict[str, Any], tensors: dict[str, Tensor]) -> list[int] | None:
    """Return the layers whose modules an adapter's config names; None if it names none."""
    names = config.get("target_modules")
    if not isinstance(names, list):
        return None
    matches = [_NUMBER.search(name) for name in names if isinstance(name, str)]
    layers = {int(match[1]) for match in matches if match is not None}
    if layers or config.get("num_layers") is None:
        return sorted(layers) or None
    # peft writes 20 names and more as their common end, where no other module has it
    return _gated_layers(tensors)


def _stack_layers(
    tensors: dict[str, Tensor], path: Path, layers: list[int] | None, num_layers: Any
) -> tuple[Tensor, list[int]]:
    """Stack the gates of the layers by the numbers in their names.

    Args:
        layers: which have gates; None: all from 0 on.
        num_layers: of the model; None: as many as have gates.

    Returns:
        Alpha ``[num_layers, the most gates of a layer]``, 1 where there is no gate, and the number
        of gates of each layer.
    """
    rows: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        layer = _gated_layer(name)
        if layer is None:
            raise ValueError(
                f"{path}: no adapter of KV head gates (it holds {name!r}), expected keys like "
                f"{GATE_KEY}"
            )
        rows[layer] = tensor.flatten().float()
    sizes = {layer: rows[layer].numel() for layer in sorted(rows)}
    is_whole = len(rows) == len(tensors)
    if layers is None:
        if not is_whole or list(sizes) != list(range(len(rows))) or len(set(sizes.values())) != 1:
            raise ValueError(
                f"{path}: found gates per layer {sizes} in {len(tensors)} tensors, expected one "
                "tensor for every layer from 0 without gaps, all of one size"
            )
    elif not is_whole or list(sizes) != layers:
        raise ValueError(
            f"{path}: found gates per layer {sizes} in {len(tensors)} tensors, expected one tensor "
            f"for each of the layers {ranges(layers)}"
        )
    if num_layers is None:
        num_layers = max(sizes) + 1
    check_whole(f"{path}: the number of layers", num_layers, max(sizes) + 1, _MOST_LAYERS)
    alpha = torch.ones(num_layers, max(sizes.values()))
    for layer, row in rows.items():
        alpha[layer, : len(row)] = row
    return alpha, [sizes.get(layer, 0) for layer in range(num_layers)]


def _write_peft(folder: Path, payload: dict[str, Any]) -> None:
    """Write an adapter that ``PeftModel.from_pretrained`` loads.

    ``rlkv.attention.head_gate`` must have been imported before.
    """
    alpha = payload["alpha"]
    counts = payload["heads"] or [alpha.shape[1]] * len(alpha)
    tensors = {}
    for layer, count in enumerate(counts):
        if count:
            tensors[GATE_KEY.format(layer=layer)] = alpha[layer, :count].clone()
    # JSON keeps float32 exactly
    header = {**_to_header(payload), "rank": payload["mean_alpha"].tolist()}
    _write_safetensors(folder / ADAPTER_WEIGHTS, tensors, header)
    model = payload["model"]
    config = {
        "peft_type": PEFT_TYPE,
        "base_model_name_or_path": (model and model.model_id) or None,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "sink": payload["sink"],
        "window": payload["window"],
        "num_layers": payload["alpha"].shape[0],
        "num_kv_heads": payload["alpha"].shape[1],
    }
    write_json(folder / ADAPTER_CONFIG, config)
