"""Reading and writing gates files. Readers return the keyword arguments of ``HeadGates``, writers take them.

- ``.pt``: a versioned dict of tensors and plain values, loaded with ``weights_only=True`` (no code is run);
- ``.safetensors``: tensors ``alpha`` and ``rank`` (the gates' means over training), the rest as JSON in the header;
- ``.tsv``: alpha alone, one row per layer, tab separated: the published layout;
- a PEFT folder, and a repository on the Hugging Face hub that holds one of these.
"""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkv.gates.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    EXPECTED,
    from_header,
    is_peft_weights,
    read_peft,
    read_safetensors,
    to_header,
    write_peft,
    write_safetensors,
)
from rlkv.models.builtin import PACKAGED_GATES
from rlkv.models.shape import ModelShape
from rlkv.utils.atomic import atomic_path, write_bytes
from rlkv.utils.jsonl import read_json

SUFFIXES = (".pt", ".safetensors", ".tsv")
_HUB = "hf://"
_HUB_ADDRESS = re.compile(r"(?:hf://)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_HUB_FILES = ["gates.pt", "gates.safetensors", ADAPTER_CONFIG, ADAPTER_WEIGHTS, "config.json", "*.tsv"]


def read_gates(path: str | Path) -> dict[str, Any]:
    """Arguments of ``HeadGates`` from a file, a folder, a hub address, ``tiny`` or ``smol``; see ``HeadGates.load``."""
    if path in PACKAGED_GATES:
        return _read_local(PACKAGED_GATES[str(path)])
    if isinstance(path, str) and _is_hub_address(path):
        return _read_local(_download(path))
    return _read_local(Path(path).expanduser())


def write_gates(path: str | Path, payload: dict[str, Any]) -> None:
    """Write by suffix; see ``HeadGates.save``."""
    if str(path).startswith(_HUB):
        raise ValueError(f"{path}: gates are saved to a local path, not to the hub: use rlkv-gates push")
    target = Path(path).expanduser()
    if target.is_dir() or not target.suffix or str(path).endswith("/"):
        write_peft(target, payload)
    elif target.suffix == ".pt":
        buffer = io.BytesIO()  # torch would put a path's name into the archive, and report a full disk in its own way
        torch.save({**to_header(payload), **_tensors(payload)}, buffer)
        write_bytes(target, buffer.getvalue())
    elif target.suffix == ".safetensors":
        write_safetensors(target, _tensors(payload), to_header(payload))
    elif target.suffix == ".tsv":
        with atomic_path(target) as partial:
            np.savetxt(partial, payload["alpha"].double().numpy(), fmt="%.18e", delimiter="\t")
    else:
        raise ValueError(
            f"{path}: unknown gates format {target.suffix!r}, expected {', '.join(SUFFIXES)}, or a name that ends "
            "with / for a PEFT folder"
        )


def _tensors(payload: dict[str, Any]) -> dict[str, Tensor]:
    return {"alpha": payload["alpha"], "rank": payload["mean_alpha"]}


def _is_hub_address(path: str) -> bool:
    """Whether ``path`` means the hub: ``hf://...``, or ``owner/name[@revision]`` that is not a local path."""
    if path.startswith(_HUB):
        return True
    return bool(_HUB_ADDRESS.fullmatch(path)) and not path.endswith(SUFFIXES) and not Path(path).exists()


def hub_address(address: str) -> tuple[str, str | None]:
    """``(owner/name, revision or None)`` of a hub address; ``ValueError`` if it is none."""
    match = _HUB_ADDRESS.fullmatch(address)
    if match is None:
        raise ValueError(f"{address}: not a hub address, expected hf://owner/name or hf://owner/name@revision")
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
            f"{address}: {where}it could not be downloaded ({reason}), expected a local gates file or folder, or a hub "
            "repository that holds gates: check the name and the network"
        ) from error


def _read_local(path: Path) -> dict[str, Any]:
    if path.is_dir():
        path = _pick(path)
    if not path.exists():
        raise ValueError(
            f"{path}: no such file or folder, {EXPECTED}: rlkv-train and rlkv-distill write gates.pt into their output "
            "folders"
        )
    if path.is_dir():
        return read_peft(path)
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty, {EXPECTED}")
    readers = {".pt": _read_pt, ".safetensors": _read_safetensors, ".tsv": _read_tsv}
    if path.suffix not in readers:
        raise ValueError(f"{path}: unknown gates format {path.suffix or 'without a suffix'!r}, {EXPECTED}")
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
        f"{folder}: found {found} in this folder, expected {ADAPTER_CONFIG}, gates.safetensors, gates.pt or one .tsv"
    )


def _read_pt(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # arbitrary bytes make the unpickler raise almost any exception
        found = "truncated or damaged" if path.read_bytes()[:2] == b"PK" else "not a file written by torch.save"
        raise ValueError(f"{path}: {found}, expected gates as HeadGates.save writes them") from error
    return {**from_header(content, path), **_stored_tensors(content, path)}


def _read_safetensors(path: Path) -> dict[str, Any]:
    tensors, header = read_safetensors(path)
    if is_peft_weights(tensors):
        raise ValueError(f"{path}: weights of a PEFT adapter, expected a gates file: pass the folder that holds it")
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
        raise ValueError(f"{path}: not a text file, expected one row of tab-separated numbers per layer") from error
    if not text.endswith("\n"):  # a number that is cut in half is still a number
        raise ValueError(f"{path}: found no newline at its end, expected one as in any whole file: it may be truncated")
    rows: list[list[float]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append([float(cell) for cell in line.split("\t")])
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}, expected tab-separated numbers") from error
        if len(rows[-1]) != len(rows[0]):
            raise ValueError(
                f"{path}, line {number}: found {len(rows[-1])} KV heads, expected {len(rows[0])} as in the first row"
            )
    if not rows:
        raise ValueError(f"{path}: no rows, expected one row of tab-separated numbers per layer")
    return {"alpha": torch.tensor(rows), **_read_sibling_config(path.with_name("config.json"), len(rows), len(rows[0]))}


def _read_sibling_config(path: Path, num_layers: int, num_kv_heads: int) -> dict[str, Any]:
    """What a ``config.json`` next to a ``.tsv`` adds: DuoAttention's names the model and the training sizes."""
    if not path.exists():
        return {}
    try:
        config = read_json(path)
        if not isinstance(config, dict):
            raise ValueError("it does not hold an object")
    except ValueError as error:
        warnings.warn(f"{path}: not readable as JSON ({error}), so the gates name no model", stacklevel=2)
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
