"""Reading and writing gates files.

Readers return the keyword arguments of ``HeadGates``, writers take them.

- ``.pt``: a versioned dict of tensors and plain values, loaded with ``weights_only=True`` (no code
  is run);
- ``.safetensors``: tensors ``alpha`` and ``rank`` (the gates' means over training), the rest as
  JSON in the header;
- ``.tsv``: alpha alone, one row per layer, tab separated: the published layout;
- a PEFT folder, and a repository on the Hugging Face hub that holds one of these.
"""

from __future__ import annotations

import io
import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkv.models.builtin import PACKAGED_GATES
from rlkv.models.shape import ModelShape
from rlkv.utils.files import atomic_path, parse_json, read_json, write_bytes, write_json

FORMAT = "rlkv-gates"
VERSION = 1
EXPECTED = "expected a .pt, .safetensors or .tsv gates file or a PEFT folder"
HEADER_KEY = "rlkv_gates"  # of the metadata in a safetensors file
_FIELDS = ("model", "sink", "window", "deploy_sink", "deploy_window", "training")
_LATER_FIELDS = ("deploy_protect_prompt",)  # which the first files do not have
PEFT_TYPE = "HEAD_GATE"  # of rlkv.attention.head_gate, which imports peft
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
GATE_KEY = "base_model.model.model.layers.{layer}.self_attn.rlkv_gate.alpha"
_LAYER = re.compile(r"\.layers\.(\d+)\..*\brlkv_gate\b")


def to_header(payload: dict[str, Any]) -> dict[str, Any]:
    """All of ``HeadGates.to_payload()`` but the tensors, as plain JSON-able values."""
    model = payload["model"].to_dict() if payload["model"] else None
    fields = (*_FIELDS, *_LATER_FIELDS)
    return {
        "format": FORMAT,
        "version": VERSION,
        **{name: payload[name] for name in fields},
        "model": model,
    }


def from_header(header: Any, path: Path) -> dict[str, Any]:
    """Arguments of ``HeadGates`` from what :func:`to_header` gave.

    ValueError if it is another or incomplete.
    """
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(
            f"{path}: not a gates file (it does not name the format {FORMAT!r}), {EXPECTED}"
        )
    version = header.get("version")
    if not isinstance(version, int):
        raise ValueError(
            f"{path}: the gates format version is {version!r}, expected a number up to {VERSION}"
        )
    if version > VERSION:
        raise ValueError(
            f"{path}: written in gates format version {version}, expected at most {VERSION}: "
            "upgrade rlkv to read it"
        )
    try:
        model = ModelShape(**header["model"]) if header["model"] is not None else None
        later = {name: header[name] for name in _LATER_FIELDS if name in header}
        return {name: header[name] for name in _FIELDS} | later | {"model": model}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: damaged gates file, expected a field that is absent or wrong ({error})"
        ) from error


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """``(tensors by name, header or None)`` of a safetensors file.

    ValueError if it is damaged or another kind.
    """
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


def write_safetensors(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Tensors with ``header`` in the file's metadata (and ``format: pt``, which PEFT and
    transformers look for).
    """
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
            raise ValueError(
                f"{path}: no adapter of KV head gates (it holds {name!r}), expected keys like "
                f"{GATE_KEY}"
            )
        layer = int(match[1])
        if layer in rows:
            raise ValueError(
                f"{path}: two tensors hold gates of layer {layer}, expected one per layer"
            )
        rows[layer] = tensor.flatten().float()
    sizes = {layer: rows[layer].numel() for layer in sorted(rows)}
    if list(sizes) != list(range(len(rows))) or len(set(sizes.values())) != 1:
        raise ValueError(
            f"{path}: found gates per layer {sizes}, expected as many for every layer from 0 "
            "without gaps"
        )
    return torch.stack([rows[layer] for layer in sizes])


def read_peft(folder: Path) -> dict[str, Any]:
    """Arguments of ``HeadGates`` from an adapter folder.

    ValueError if it is damaged or another adapter.
    """
    weights, config_path = folder / ADAPTER_WEIGHTS, folder / ADAPTER_CONFIG
    try:
        config = read_json(config_path)
        sizes = {name: config[name] for name in ("sink", "window")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{config_path}: not the config of KV head gates ({error!r}), expected sink and window"
        ) from error
    if not weights.exists():
        raise ValueError(
            f"{folder}: found {ADAPTER_CONFIG} alone, expected {ADAPTER_WEIGHTS} next to it"
        )
    tensors, header = read_safetensors(weights)
    alpha = _stack(tensors, weights)
    if header is not None:
        return {
            **from_header(header, weights),
            **sizes,
            "alpha": alpha,
            "mean_alpha": header.get("rank"),
        }
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str | None):
        raise ValueError(
            f"{config_path}: base_model_name_or_path is {name!r}, expected the name of a model"
        )
    model = ModelShape(name, "", alpha.shape[0], alpha.shape[1], 0, 0) if name else None
    return {"alpha": alpha, "model": model, **sizes}


def write_peft(folder: Path, payload: dict[str, Any]) -> None:
    """Write an adapter that ``PeftModel.from_pretrained`` loads once ``rlkv.attention.head_gate``
    is imported.
    """
    tensors = {GATE_KEY.format(layer=i): row.clone() for i, row in enumerate(payload["alpha"])}
    header = {
        **to_header(payload),
        "rank": payload["mean_alpha"].tolist(),
    }  # JSON keeps float32 exactly
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


SUFFIXES = (".pt", ".safetensors", ".tsv")
_HUB = "hf://"
_HUB_ADDRESS = re.compile(r"(?:hf://)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_HUB_FILES = [
    "gates.pt",
    "gates.safetensors",
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    "config.json",
    "*.tsv",
]


def read_gates(path: str | Path) -> dict[str, Any]:
    """Arguments of ``HeadGates`` from a file, a folder, a hub address, ``tiny`` or ``smol``.

    See ``HeadGates.load``.
    """
    if path in PACKAGED_GATES:
        return _read_local(PACKAGED_GATES[str(path)])
    if isinstance(path, str) and _is_hub_address(path):
        return _read_local(_download(path))
    return _read_local(Path(path).expanduser())


def write_gates(path: str | Path, payload: dict[str, Any]) -> None:
    """Write by suffix; see ``HeadGates.save``."""
    if str(path).startswith(_HUB):
        raise ValueError(
            f"{path}: gates are saved to a local path, not to the hub: use rlkv-gates push"
        )
    target = Path(path).expanduser()
    if target.is_dir() or not target.suffix or str(path).endswith("/"):
        write_peft(target, payload)
    elif target.suffix == ".pt":
        buffer = (
            io.BytesIO()
        )  # torch would put a path's name into the archive, and report a full disk in its own way
        torch.save({**to_header(payload), **_tensors(payload)}, buffer)
        write_bytes(target, buffer.getvalue())
    elif target.suffix == ".safetensors":
        write_safetensors(target, _tensors(payload), to_header(payload))
    elif target.suffix == ".tsv":
        with atomic_path(target) as partial:
            np.savetxt(partial, payload["alpha"].double().numpy(), fmt="%.18e", delimiter="\t")
    else:
        raise ValueError(
            f"{path}: unknown gates format {target.suffix!r}, expected {', '.join(SUFFIXES)}, or a "
            "name that ends "
            "with / for a PEFT folder"
        )


def _tensors(payload: dict[str, Any]) -> dict[str, Tensor]:
    return {"alpha": payload["alpha"], "rank": payload["mean_alpha"]}


def _is_hub_address(path: str) -> bool:
    """Whether ``path`` means the hub:

    ``hf://...``, or ``owner/name[@revision]`` that is not a local path.
    """
    if path.startswith(_HUB):
        return True
    return (
        bool(_HUB_ADDRESS.fullmatch(path))
        and not path.endswith(SUFFIXES)
        and not Path(path).exists()
    )


def hub_address(address: str) -> tuple[str, str | None]:
    """``(owner/name, revision or None)`` of a hub address; ``ValueError`` if it is none."""
    match = _HUB_ADDRESS.fullmatch(address)
    if match is None:
        raise ValueError(
            f"{address}: not a hub address, expected hf://owner/name or hf://owner/name@revision"
        )
    return match["repo"], match["revision"]


def _download(address: str) -> Path:
    """The folder with the gates files of a hub repository, from the hub or its local cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RevisionResolutionError

    repo, revision = hub_address(address)
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_HUB_FILES))
    except (OSError, HFValidationError, HfHubHTTPError, RevisionResolutionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = "" if address.startswith(_HUB) else "no such local file or folder, and "
        raise ValueError(
            f"{address}: {where}it could not be downloaded ({reason}), expected a local gates file "
            "or folder, or a hub "
            "repository that holds gates: check the name and the network"
        ) from error


def _read_local(path: Path) -> dict[str, Any]:
    if path.is_dir():
        path = _pick(path)
    if not path.exists():
        raise ValueError(
            f"{path}: no such file or folder, {EXPECTED}: rlkv-train and rlkv-distill write "
            "gates.pt into their output "
            "folders"
        )
    if path.is_dir():
        return read_peft(path)
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty, {EXPECTED}")
    readers = {".pt": _read_pt, ".safetensors": _read_safetensors, ".tsv": _read_tsv}
    if path.suffix not in readers:
        raise ValueError(
            f"{path}: unknown gates format {path.suffix or 'without a suffix'!r}, {EXPECTED}"
        )
    return readers[path.suffix](path)


def _pick(folder: Path) -> Path:
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


def _read_pt(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # arbitrary bytes make the unpickler raise almost any exception
        found = (
            "truncated or damaged"
            if path.read_bytes()[:2] == b"PK"
            else "not a file written by torch.save"
        )
        raise ValueError(
            f"{path}: {found}, expected gates as HeadGates.save writes them"
        ) from error
    return {**from_header(content, path), **_stored_tensors(content, path)}


def _read_safetensors(path: Path) -> dict[str, Any]:
    tensors, header = read_safetensors(path)
    if is_peft_weights(tensors):
        raise ValueError(
            f"{path}: weights of a PEFT adapter, expected a gates file: pass the folder that holds "
            "it"
        )
    return {**from_header(header, path), **_stored_tensors(tensors, path)}


def _stored_tensors(content: dict[str, Any], path: Path) -> dict[str, Tensor]:
    for name in ("alpha", "rank"):
        if not isinstance(content.get(name), Tensor):
            raise ValueError(f"{path}: damaged gates file, expected a tensor {name!r}")
    return {"alpha": content["alpha"], "mean_alpha": content["rank"]}


def _read_tsv(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not a text file, expected one row of tab-separated numbers per layer"
        ) from error
    if not text.endswith("\n"):  # a number that is cut in half is still a number
        raise ValueError(
            f"{path}: found no newline at its end, expected one as in any whole file: it may be "
            "truncated"
        )
    rows: list[list[float]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append([float(cell) for cell in line.split("\t")])
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: {error}, expected tab-separated numbers"
            ) from error
        if len(rows[-1]) != len(rows[0]):
            raise ValueError(
                f"{path}, line {number}: found {len(rows[-1])} KV heads, expected {len(rows[0])} "
                "as in the first row"
            )
    if not rows:
        raise ValueError(f"{path}: no rows, expected one row of tab-separated numbers per layer")
    return {
        "alpha": torch.tensor(rows),
        **_read_sibling_config(path.with_name("config.json"), len(rows), len(rows[0])),
    }


def _read_sibling_config(path: Path, num_layers: int, num_kv_heads: int) -> dict[str, Any]:
    """What a ``config.json`` next to a ``.tsv`` adds:

    DuoAttention's names the model and the training sizes.
    """
    if not path.exists():
        return {}
    try:
        config = read_json(path)
        if not isinstance(config, dict):
            raise ValueError("it does not hold an object")
    except ValueError as error:
        warnings.warn(
            f"{path}: not readable as JSON ({error}), so the gates name no model", stacklevel=2
        )
        return {}
    kwargs: dict[str, Any] = {}
    name = config.get("model_name") or config.get("_name_or_path")
    if name:  # nothing else is known of the model's shape: empty fields are not compared
        kwargs["model"] = ModelShape(str(name), "", num_layers, num_kv_heads, 0, 0)
    sizes = {
        prefix + ours: config.get(f"{prefix}{theirs}_size")
        for prefix in ("", "deploy_")
        for ours, theirs in (("sink", "sink"), ("window", "recent"))
    }
    return kwargs | {name: size for name, size in sizes.items() if size is not None}
