"""Names of compression methods: which heads stay full, and what the others keep.

full                         no compression
rlkv@0.5                     heads of the gates named rlkv, half of them compressible (sinks and a window)
random-heads@0.5             random heads, drawn with the run's seed
rkv@256                      R-KV in all heads, 256 entries each
rkv@ratio=0.5                R-KV in all heads, half of the text (and ``extra`` entries)
rlkv@0.5+rkv@256             R-KV in the compressible heads
rkv@256:variant=published    fields of the policy after a colon, separated by colons
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from rlkv.eviction import POLICIES, make_policy, parse_options
from rlkv.eviction.base import EvictionPolicy
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape

FULL = "full"
RANDOM_HEADS = "random-heads"


@dataclass(frozen=True)
class CompressionMethod:
    """A parsed name; without a ranking all heads are compressible (none for ``full``), without a policy: a window."""

    name: str
    ranking: str | None
    sparsity: float | None
    policy: EvictionPolicy | None

    def allocation(self, config: PretrainedConfig, gates: dict[str, HeadGates], seed: int) -> HeadAllocation:
        """The full heads for a model; a ``ValueError`` if the gates are not those of the model."""
        shape = ModelShape.from_config(config)
        size = (shape.num_layers, shape.num_kv_heads)
        if self.ranking is None:
            return HeadAllocation(torch.full(size, self.policy is None, dtype=torch.bool))
        assert self.sparsity is not None
        if self.ranking == RANDOM_HEADS:
            return HeadAllocation.random(*size, self.sparsity, seed)
        gates[self.ranking].check_model(config)
        return HeadAllocation.from_gates(gates[self.ranking], self.sparsity)


def parse_methods(names: Sequence[str], rankings: list[str]) -> list[CompressionMethod]:
    """The methods ``names``, each of which may be named once; otherwise as :func:`parse_method`."""
    parsed = [parse_method(name, rankings) for name in names]
    for i, method in enumerate(parsed):
        if any(replace(method, name=other.name) == other for other in parsed[:i]):
            raise ValueError(f"--methods names {method.name!r} twice: leave one out")
    return parsed


def parse_method(name: str, rankings: list[str]) -> CompressionMethod:
    """The method ``name``; ``rankings`` are the names of the gates files.  A ``ValueError`` says what is known."""
    if name == FULL:
        return CompressionMethod(name, None, None, None)
    parts = name.split("+")
    heads = [part for part in parts if part.partition("@")[0] in (*rankings, RANDOM_HEADS)]
    policies = [part for part in parts if part.partition("@")[0] in POLICIES]
    if len(heads) > 1 or len(policies) > 1 or len(heads) + len(policies) != len(parts):
        known = ", ".join([FULL, *rankings, RANDOM_HEADS, *POLICIES])
        raise ValueError(
            f"method {name!r} is not understood: write full, HEADS@SPARSITY, POLICY@BUDGET or both joined by +, of "
            f"{known}"
        )
    ranking, sparsity = None, None
    if heads:
        ranking, _, text = heads[0].partition("@")
        sparsity = _number(text, name, f"{ranking}@0.5")
        if not 0 <= sparsity <= 1:
            raise ValueError(f"method {name!r}: sparsity {text} is not in [0, 1]")
    return CompressionMethod(name, ranking, sparsity, _parse_policy(policies[0], name) if policies else None)


def _parse_policy(part: str, name: str) -> EvictionPolicy:
    kind, _, text = part.partition("@")
    size, *fields = text.split(":")
    options = parse_options(fields)
    if size.startswith("ratio="):
        options["ratio"] = _number(size.removeprefix("ratio="), name, f"{kind}@ratio=0.5")
    elif size:
        if not size.isdigit():
            raise ValueError(f"method {name!r}: the budget {size!r} is not a number of entries: write {kind}@256")
        options["budget"] = int(size)
    return make_policy(kind, **options)


def _number(text: str, name: str, example: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"method {name!r}: {text!r} is not a number: write {example}") from None


def named_gates(items: Sequence[str], reserved: tuple[str, ...] = ()) -> dict[str, HeadGates]:
    """Gates files given as FILE or NAME=FILE, by names that are not ``reserved``; an existing file is taken whole."""
    named: dict[str, str] = {}
    for item in items:
        name, separator, file = item.partition("=")
        if Path(item).is_file() or not separator:
            name, file = Path(item).stem, item
        if not name.strip() or set(name) & set("/+@,:"):
            raise ValueError(f"--gates: {name!r} cannot name a ranking: give NAME=FILE, the name without / + @ , or :")
        if name in named or name in reserved:
            raise ValueError(f"--gates: the name {name!r} is used twice or reserved: give NAME=FILE")
        named[name] = file
    return {name: HeadGates.load(file) for name, file in named.items()}
