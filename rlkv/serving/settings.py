"""What the user asked the plugin to do: ``--additional-config '{"rlkv": {...}}'``, or two environment variables.

The first reaches every process of the engine and is part of its compilation key; the variables (``RLKV_GATES``,
``RLKV_SPARSITY``) are for launchers whose arguments cannot be changed. Without either the plugin does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

KEY = "rlkv"
VARIABLES = {"gates": "RLKV_GATES", "sparsity": "RLKV_SPARSITY"}


@dataclass(frozen=True)
class ServingSettings:
    """Head reallocation: which heads are full, and what the others keep.

    Attributes:
        gates: a gates file, folder or hub address, as :meth:`rlkv.HeadGates.load` takes it.
        sparsity: share of KV heads that are compressible, in [0, 1].
        sink, window: tokens that a compressible head keeps; default: what the gates file states for deployment.
        scope: ``global`` or ``layer``, as in :meth:`rlkv.HeadAllocation.from_gates`.
        prefill: ``local``: prompt tokens see what a compressible head keeps, sinks and window, like generated ones.
        reference_tokens: the length of a request for which memory is planned and reported.

    Raises:
        ValueError: for a value that cannot be.
    """

    gates: str
    sparsity: float
    sink: int | None = None
    window: int | None = None
    scope: str = "global"
    prefill: str = "local"
    reference_tokens: int = 3000

    def __post_init__(self) -> None:
        number = isinstance(self.sparsity, int | float) and not isinstance(self.sparsity, bool)
        if not number or not 0 <= self.sparsity <= 1:
            raise ValueError(f"rlkv: sparsity must be a number in [0, 1], got {self.sparsity!r}")
        if not isinstance(self.gates, str) or not self.gates:
            raise ValueError(f"rlkv: gates must be the path of a gates file, got {self.gates!r}")
        for name, least in (("sink", 0), ("window", 1), ("reference_tokens", 1)):
            value = getattr(self, name)
            if value is None and name != "reference_tokens":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"rlkv: {name} must be an integer of at least {least}, got {value!r}")
        if self.scope not in ("global", "layer"):
            raise ValueError(f"rlkv: scope must be global or layer, got {self.scope!r}")
        if self.prefill != "local":
            raise ValueError(
                f"rlkv: prefill {self.prefill!r} is not served by the vLLM plugin: use 'local' (docs/SERVING.md says "
                "why), or rlkv-infer with its own backend, which has both"
            )

    def to_dict(self) -> dict[str, Any]:
        """As :func:`read_request` takes it back."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def read_request(additional_config: Any, environment: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """What was asked for, not yet checked; None if nothing was.

    Raises:
        ValueError: if it is no mapping, if only one of the two variables is set, or for a sparsity that is no number.
    """
    if isinstance(additional_config, Mapping) and additional_config.get(KEY) is not None:
        request = additional_config[KEY]
        if not isinstance(request, Mapping):
            raise ValueError(f'additional_config["{KEY}"] must be a mapping such as {{"gates": ...}}, got {request!r}')
        return dict(request)
    environment = os.environ if environment is None else environment
    found = {key: environment[name] for key, name in VARIABLES.items() if environment.get(name)}
    if not found:
        return None
    missing = [name for key, name in VARIABLES.items() if key not in found]
    if missing:
        raise ValueError(f"{missing[0]} is missing: RLKV_GATES and RLKV_SPARSITY go together")
    try:
        return {"gates": found["gates"], "sparsity": float(found["sparsity"])}
    except ValueError:
        raise ValueError(f"RLKV_SPARSITY must be a number in [0, 1], got {found['sparsity']!r}") from None


def parse_settings(request: Mapping[str, Any]) -> ServingSettings:
    """Check a request for head reallocation.

    Raises:
        ValueError: for unknown and missing keys and bad values, by name.
    """
    known = {field.name for field in fields(ServingSettings)}
    unknown = sorted(set(request) - known)
    if unknown:
        raise ValueError(f"rlkv: unknown setting {unknown[0]!r}: choose from {', '.join(sorted(known))}")
    missing = [name for name in ("gates", "sparsity") if name not in request]
    if missing:
        raise ValueError(f"rlkv: {missing[0]} is missing: both gates and sparsity are needed")
    return ServingSettings(**request)
