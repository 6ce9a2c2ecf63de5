"""Options of the check-up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """What breaks first on a new GPU, in about 20 minutes: a list of small checks, at the shape of
    Llama-8B.

    rlkv-bench check                   # on a GPU in bfloat16; on a CPU small and in float32, in under 2 minutes
    rlkv-bench check --only update decode

    Exit code 1 if a check fails.
    """

    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    output_dir: Path = Path("results/check")
    """Where check.json and check.md go."""
    only: tuple[str, ...] = ()
    """Names of checks; default: all."""
