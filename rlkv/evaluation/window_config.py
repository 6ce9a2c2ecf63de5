"""The options of ``rlkv-study window``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlkv.evaluation.evaluate import TaskOptions
from rlkv.gates.formats import SUFFIXES
from rlkv.inference.options import check_positive


@dataclass(frozen=True, kw_only=True)
class WindowConfig(TaskOptions):
    """Measure sinks, windows and a protected prompt at several sparsities."""

    gates: str
    """gates file, folder or hub address; 'tiny', 'smol': built in"""
    output_dir: Path
    """report.html, report.md, results.json, plots, rows/"""
    sinks: tuple[int, ...] = ()
    """sinks of the grid; default: 1, 2 and 4 times --sink"""
    windows: tuple[int, ...] = ()
    """windows of the grid; default: 1, 2 and 4 times --window"""
    sparsities: tuple[float, ...] = (0.4, 0.6, 0.8)
    """of the grid; one alone: sizes for it"""
    byte_budget: float | None = None
    """share of the full cache's bytes: recommend the most accurate setting within it; default:
    recommend the setting with the fewest bytes within --margin of the full cache
    """
    margin: float = 0.02
    """accuracy that the recommended setting may lose"""
    write_gates: Path | None = None
    """write the gates with the recommended sink, window and prompt to this file (.pt, .safetensors,
    or a folder)
    """

    def check(self) -> None:
        super().check()
        if self.protect_prompt is not None:
            raise ValueError(
                "--protect-prompt does not apply here: the grid has every window with and without "
                "it"
            )
        check_positive(self, "window")
        for name, least in (("sinks", 0), ("windows", 1)):
            if any(value < least for value in getattr(self, name)):
                raise ValueError(
                    f"--{name} {' '.join(map(str, getattr(self, name)))}: at least {least} tokens "
                    "each"
                )
        if not self.sparsities or not all(0 < value <= 1 for value in self.sparsities):
            raise ValueError("--sparsities must be numbers above 0 and up to 1, one or more")
        for name, share in (("margin", self.margin), ("byte-budget", self.byte_budget)):
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"--{name} is {share}: it is a share, from 0 to 1")
        if self.write_gates is not None and self.write_gates.suffix not in ("", *SUFFIXES[:2]):
            raise ValueError(
                f"--write-gates {self.write_gates}: sizes for serving cannot be stored there: give "
                "a name that ends "
                f"with {' or '.join(SUFFIXES[:2])}, or a folder"
            )
