"""What generations depend on besides their settings: the model, and the versions of the code and its libraries.

A resumed measurement compares these and names what differs.  The commit is recorded
(:func:`rlkv.utils.provenance.commit`), not compared: an edited comment does not throw away a day of rows.
"""

from __future__ import annotations

import importlib.metadata
import json
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from rlkv import __version__
from rlkv.utils.provenance import digest

LIBRARIES = ("torch", "transformers", "math-verify", "sympy")
SAMPLED = 1024  # elements of each parameter


def digest_of(value: Any) -> str:
    """A digest of ``value`` as JSON, whatever the order of its keys."""
    return digest(json.dumps(value, sort_keys=True, default=str).encode())


def model_facts(model: PreTrainedModel) -> dict[str, Any]:
    """Config, kind of device, number type and a hash over up to 1,024 evenly spaced elements of each parameter.

    Another training, merge or quantization is seen, a change of single elements may not be.
    """
    config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    config.pop("transformers_version", None)
    weights = bytearray()
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().flatten()
        places = torch.linspace(0, flat.numel() - 1, min(SAMPLED, flat.numel()), dtype=torch.float64).long()
        sample = flat[places.to(flat.device)].cpu()
        weights += f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()
        weights += sample.contiguous().view(torch.uint8).numpy().tobytes()
    return {
        "config": digest_of(config),
        "weights": digest(bytes(weights)),
        "dtype": str(model.dtype),
        "device": model.device.type,
    }


@cache
def library_facts() -> dict[str, str]:
    """Versions of this package and of the libraries that decode and grade; absent ones are left out."""
    found = {"rlkv": __version__}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
