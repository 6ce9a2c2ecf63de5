"""What generations depend on beside their settings: the model, the code that decodes and grades, its libraries.

A measurement that goes on compares these with what it was begun with, and names what differs.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import rlkv

PACKAGE = Path(rlkv.__file__).parent
# what decides on tokens and verdicts, files or whole folders of the package; the full heads and the problems are
# compared as such, so what they come from is not in it
CODE = (
    "cache",
    "eviction",
    "kernels",
    "evaluation/error_modes.py",
    "evaluation/grading.py",
    "evaluation/runner.py",
    "evaluation/sandbox",
    "evaluation/tasks",
    "inference/compress.py",
    "inference/engine.py",
    "inference/servable.py",
    "models.py",
    "prompts.py",
    "rollout/base.py",
    "rollout/hf.py",
    "rollout/watch.py",
    "verifier.py",
    "verifier_pool.py",
    "verifier_worker.py",
)
LIBRARIES = ("torch", "transformers", "math-verify", "sympy")
SAMPLED = 1024  # elements of each parameter
DIGITS = 16  # of a SHA-256 in hexadecimal: enough to tell two states apart


def digest(content: bytes) -> str:
    """A short hash."""
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def digest_of(value: Any) -> str:
    """A short hash of ``value`` as JSON."""
    return digest(json.dumps(value, sort_keys=True, default=str).encode())


def model_facts(model: PreTrainedModel) -> dict[str, Any]:
    """Config, kind of device, number type and a hash over weights.

    The weights are sampled, up to 1,024 evenly spaced elements of each parameter with the first and the last one, so
    that a large model costs little: another training, merge or quantization is seen, a change of single elements may
    not be.
    """
    config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    config.pop("transformers_version", None)
    weights = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().flatten()
        places = torch.linspace(0, flat.numel() - 1, min(SAMPLED, flat.numel()), dtype=torch.float64).long()
        sample = flat[places.to(flat.device)].cpu()
        weights.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        weights.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return {
        "config": digest_of(config),
        "weights": weights.hexdigest()[:DIGITS],
        "dtype": str(model.dtype),
        "device": model.device.type,
    }


@cache
def code_facts() -> dict[str, str]:
    """Version of this package, and of its files in :data:`CODE` their hashes."""
    files: list[Path] = []
    for name in CODE:
        path = PACKAGE / name
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    found = {file.relative_to(PACKAGE).as_posix(): digest(file.read_bytes()) for file in files}
    return {"version": rlkv.__version__, **found}


def measured_with(model: PreTrainedModel) -> dict[str, Any]:
    """What rows of :func:`rlkv.evaluation.heads.measure` depend on beside settings, heads and problems."""
    files = ("allocation.py", "evaluation/heads.py", "evaluation/matching.py")
    own = {name: digest((PACKAGE / name).read_bytes()) for name in files}
    return {"model_state": model_facts(model), "code": {**code_facts(), **own}, "libraries": library_facts()}


@cache
def library_facts() -> dict[str, str]:
    """Versions of the libraries that decode and grade; absent ones are left out."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
