"""The options of a study; what its results file records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from rlkv.evaluation.run.options import TaskOptions
from rlkv.evaluation.study.rankings import RESERVED, group_by_name
from rlkv.eviction import POLICIES
from rlkv.inference.options import check_positive
from rlkv.utils.numbers import check_whole

MIN_EXTRA = 5
MOST_DRAWS = 10_000


@dataclass(frozen=True, kw_only=True)
class StudyConfig(TaskOptions):
    """Study rankings of KV heads."""

    gates: tuple[str, ...]
    """NAME=FILE; several files of one name are its seeds; the first name is compared with every other"""
    output_dir: Path
    """report.html, report.md, table.md, results.json, plots, rows/"""
    ablation: tuple[str, ...] = ()
    """NAME=FILE, variants of the first method, compared with it alone"""
    analyses: tuple[str, ...] = ()
    """sweep comparison threshold sensitivity modes lengths budget gates ablations; default: all that can be done"""
    oracle: Path | None = None
    """ground-truth JSON with a measured elimination order"""
    random_draws: int = 10
    """random orders of the heads, which share the problems; 0: no random heads"""
    sparsities: tuple[float, ...] = (0.2, 0.4, 0.5, 0.6, 0.8)
    """of the sweep, measured in this order"""
    compare_at: tuple[float, ...] = (0.4, 0.6)
    """sparsities of the paired comparison"""
    ablate_at: tuple[float, ...] = (0.4, 0.5, 0.6)
    """sparsities of the ablations"""
    margin: float = 0.02
    """accuracy that near-lossless may lose"""
    top_heads: tuple[float, ...] = ()
    """how many of the most needed heads the sensitivity compresses; below 1: shares of all heads; default: by size"""
    policies: Annotated[tuple[str, ...], tyro.conf.arg(help=f"of the budget analysis, of {', '.join(POLICIES)}")] = (
        "rkv",
        "h2o",
        "random",
    )
    prompt_variants: bool = True
    """budget analysis: each policy also with the other choice of a protected prompt"""
    fixed_budgets: bool = True
    """budget analysis: each policy also with a fixed share of the full-cache text"""
    savings: tuple[float, ...] = (0.2, 0.4, 0.6)
    """of the budget analysis, shares of the full cache's bytes"""
    head_share: float = 0.5
    """budget analysis: share of the mean budget that compressible heads keep under the first gates"""
    buffer: int | None = None
    """entries between two compactions (h2o, tova: always 1); default: the policies' own"""
    observation: int | None = None
    """observed tokens of rkv, snapkv and rpc; default: the policies' own"""
    extra: int | None = None
    """entries in addition to a budget's share of the text; default: sink + window, or what a policy always keeps"""
    published: str | None = None
    """model whose published numbers are shown; default: --model"""
    measure_only: bool = False
    """no report: share the work of another process of this study"""

    def check(self) -> None:
        super().check()
        for name in ("sparsities", "compare_at", "ablate_at", "savings"):
            values, most = getattr(self, name), 0.99 if name == "savings" else 1.0
            given = f"--{name.replace('_', '-')} {' '.join(f'{value:g}' for value in values)}"
            if not all(0 <= value <= most for value in values):
                raise ValueError(f"{given} contains a number outside 0 to {most:g}")
            if name != "savings" and not self.levels(name):
                raise ValueError(f"{given} contains no sparsity above 0")
        for name, share in (("margin", self.margin), ("head-share", self.head_share)):
            if not 0 <= share <= 1:
                raise ValueError(f"--{name} is {share}: it is a share, from 0 to 1")
        check_whole("--random-draws", self.random_draws, 0, MOST_DRAWS)
        check_positive(self, "buffer", "observation")
        if self.extra is not None and self.extra < MIN_EXTRA:
            raise ValueError(f"--extra is {self.extra}: policies need {MIN_EXTRA} or more entries besides the ratio")
        if not self.gates:
            raise ValueError("--gates needs at least one NAME=FILE")
        _ = self.gates_files, self.ablation_files

    def each(self, name: str) -> list[float]:
        """The values of a field, each once, in the order given."""
        return list(dict.fromkeys(getattr(self, name)))

    def levels(self, name: str) -> tuple[float, ...]:
        """The sparsities above 0 of a field, each once, in the order given."""
        return tuple(value for value in self.each(name) if value > 0)

    def ascending(self, name: str) -> tuple[float, ...]:
        """The sparsities above 0 of a field, each once, from the lowest on."""
        return tuple(sorted(self.levels(name)))

    @property
    def gates_files(self) -> dict[str, list[str]]:
        """Files by the names of ``gates``."""
        return group_by_name(self.gates, "--gates", RESERVED)

    @property
    def ablation_files(self) -> dict[str, list[str]]:
        """Files by the names of ``ablation``."""
        return group_by_name(self.ablation, "--ablation", [*RESERVED, *self.gates_files])
