"""One check: what it is, what it finds, and how it ends.

A check is a function of a :class:`Setting` and of :class:`Findings`, which it fills.  It *passes*
if it notes no problem and raises nothing, and *cannot run* if it raises :class:`CannotRun`.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from rlkv.benchmarks.check.fallback import (
    compiled_graphs,
    fallback_refused,
    is_fallback,
    why_fallback,
)
from rlkv.rollout.footprint import GIB

Outcome = Literal["passes", "fails", "cannot run"]


class CannotRun(Exception):
    """A check cannot run here; the message is the reason, in one sentence."""


@dataclass(frozen=True)
class Setting:
    """Where the checks run: at full size in bfloat16 on a GPU, small and in float32 on a CPU."""

    device: torch.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32


@dataclass
class Findings:
    """What a check found.

    Attributes:
        figures: numbers for the table, by name.
        details: rows of numbers for the JSON file alone.
        problems: what is wrong, a sentence each; none: the check passes.
        highest: most bytes on the GPU before the last :meth:`new_peak`.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    details: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    highest: int = 0

    def require(self, holds: bool, problem: str) -> None:
        """Note ``problem`` unless ``holds``."""
        if not holds:
            self.problems.append(problem)

    def new_peak(self, setting: Setting) -> int:
        """Count the most bytes on the GPU anew; returns those held now, and 0 on a CPU."""
        if not setting.on_gpu:
            return 0
        self.highest = max(self.highest, torch.cuda.max_memory_allocated(setting.device))
        torch.cuda.reset_peak_memory_stats(setting.device)
        return torch.cuda.memory_allocated(setting.device)


@dataclass(frozen=True)
class Check:
    """A check: its name, one sentence on what it shows, and what it does."""

    name: str
    shows: str
    run: Callable[[Setting, Findings], None]
    needs_gpu: bool = False


def run_one(check: Check, setting: Setting) -> dict[str, Any]:
    """The row of a check, whatever it raises, Ctrl-C aside.

    Memory and compiled code of earlier ones are dropped.
    """
    gc.collect()
    torch._dynamo.reset()
    if setting.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(setting.device)
    found, trace, started, graphs = Findings(), "", time.perf_counter(), compiled_graphs()
    outcome: Outcome = "fails"
    try:
        if check.needs_gpu and not setting.on_gpu:
            raise CannotRun("it needs a CUDA GPU")
        with fallback_refused():
            check.run(setting, found)
        outcome = "fails" if found.problems else "passes"
    except CannotRun as reason:
        outcome = "cannot run"
        found.problems = [str(reason)]
    except Exception as error:
        trace = traceback.format_exc()
        found.problems.append(
            why_fallback()
            if is_fallback(error)
            else f"{type(error).__name__}: {_first_line(error)}"
        )
    row: dict[str, Any] = {"check": check.name, "shows": check.shows, "outcome": outcome}
    row |= {"reason": "; ".join(found.problems), "seconds": time.perf_counter() - started}
    if setting.on_gpu:
        row["peak_gib"] = max(found.highest, torch.cuda.max_memory_allocated(setting.device)) / GIB
        row["compiled_graphs"] = compiled_graphs() - graphs
    return row | {"figures": found.figures, "details": found.details, "traceback": trace}


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "no message")


def device_error(setting: Setting) -> str:
    """Why the device computes no more, as after an illegal memory access; empty if it does."""
    try:
        torch.ones(1, device=setting.device).sum().item()
    except RuntimeError as error:
        return _first_line(error)
    return ""
