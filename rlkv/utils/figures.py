"""Figures as files, through matplotlib without pyplot: no global state, no display, safe in a training loop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlkv.utils.atomic import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
TITLE_SIZE = 10
TEXT_SIZE = 8


def new_figure(width: float = 7.0, height: float = 4.2) -> tuple[Figure, Axes]:
    """An empty figure (inches) with one pair of axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def curve_figure(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """Axes for curves or bars: labelled, with a light grid."""
    figure, axes = new_figure()
    axes.set_title(title, fontsize=TITLE_SIZE)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure atomically; the suffix is the format (``.png``, ``.pdf``, ``.svg``).

    Raises:
        ValueError: for a suffix that matplotlib does not write.
    """
    kind = Path(path).suffix.lstrip(".").lower()
    known = figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise ValueError(f"{path}: no figure format {kind!r}, expected a name that ends with .png, .pdf or .svg")
    with atomic_path(path) as partial:
        figure.savefig(partial, format=kind, dpi=DPI)
