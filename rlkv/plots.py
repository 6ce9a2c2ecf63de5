"""Pictures of gates: heat map and histogram. The figure helpers at the top are shared by other plots.

Figures are matplotlib objects without pyplot: no global state, no display, safe in a training loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlkv.atomic import atomic_path
from rlkv.gates import HeadGates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
TITLE_SIZE = 10
TEXT_SIZE = 8
COLORS = "viridis"
CELL = 0.32  # inches per head in a heat map
MOST_LABELLED = 64  # heads up to which a heat map writes the numbers into its cells


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
    """Write a figure in one move; the suffix is the format (``.png``, ``.pdf``, ``.svg``).

    Raises:
        ValueError: for a suffix that matplotlib does not write.
    """
    kind = Path(path).suffix.lstrip(".").lower()
    known = figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise ValueError(f"{path}: no picture format {kind!r}, expected a name that ends with .png, .pdf or .svg")
    with atomic_path(path) as partial:
        figure.savefig(partial, format=kind, dpi=DPI)


def gates_title(gates: HeadGates, what: str) -> str:
    """``what``, the model and the training sizes: the title of every picture of gates."""
    return f"{what}\n{gates.name} · sink {gates.sink}, window {gates.window}"


def plot_gates(gates: HeadGates, path: str | Path) -> None:
    """Heat map of alpha: one column per layer, one row per KV head, colours fixed to [0, 1]."""
    layers, heads = gates.alpha.shape
    labelled = gates.alpha.numel() <= MOST_LABELLED
    cell = CELL * (1.8 if labelled else 1)
    figure, axes = new_figure(max(4.2, layers * cell + 1.6), max(2.2, heads * cell + 1.3))
    image = axes.imshow(gates.alpha.T.numpy(), vmin=0, vmax=1, cmap=COLORS, aspect="auto", interpolation="nearest")
    axes.set_title(gates_title(gates, "KV head gates"), fontsize=TITLE_SIZE)
    axes.set_xlabel("layer")
    axes.set_ylabel("KV head")
    axes.set_xticks(range(0, layers, 1 if layers <= 16 else 4))
    axes.set_yticks(range(0, heads, 1 if heads <= 16 else 4))
    axes.set_xticks([x - 0.5 for x in range(1, layers)], minor=True)
    axes.set_yticks([y - 0.5 for y in range(1, heads)], minor=True)
    axes.grid(which="minor", color="white", linewidth=0.6)
    axes.tick_params(which="minor", length=0)
    if labelled:
        for layer in range(layers):
            for head in range(heads):
                value = gates.alpha[layer, head].item()
                color = "black" if value > 0.6 else "white"
                axes.text(layer, head, f"{value:.2f}", ha="center", va="center", fontsize=TEXT_SIZE, color=color)
    figure.colorbar(image, ax=axes, label="gate", ticks=[0, 0.5, 1], fraction=0.05, pad=0.01)
    save_figure(figure, path)


def plot_histogram(gates: HeadGates, path: str | Path) -> None:
    """Number of heads by gate in 20 bins of 0.05; the heads at exactly 0 and 1 are counted in the legend."""
    from matplotlib.ticker import MaxNLocator

    alpha = gates.alpha.flatten()
    figure, axes = curve_figure(gates_title(gates, "Histogram of KV head gates"), "gate", "KV heads")
    label = (
        f"{alpha.numel()} heads, mean {alpha.mean():.3f}\n"
        f"{int((alpha == 0).sum())} at 0, {int((alpha == 1).sum())} at 1"
    )
    axes.hist(alpha.numpy(), bins=[i / 20 for i in range(21)], color="C0", edgecolor="white", label=label)
    axes.set_xlim(0, 1)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=TEXT_SIZE)
    save_figure(figure, path)
