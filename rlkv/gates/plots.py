"""Plots of gates: heat map and histogram."""

from __future__ import annotations

import itertools
from pathlib import Path

from rlkv.gates.head_gates import HeadGates
from rlkv.utils.figures import TEXT_SIZE, TITLE_SIZE, curve_figure, new_figure, save_figure

COLORS = "viridis"
CELL = 0.32  # inches per head in a heat map
MOST_LABELLED = 64  # heads up to which a heat map writes the numbers into its cells


def gates_title(gates: HeadGates, what: str) -> str:
    """``what``, the model and the training sizes: the title of every plot of gates."""
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
        for layer, head in itertools.product(range(layers), range(heads)):
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
