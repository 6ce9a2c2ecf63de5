"""What a finished training run leaves: the gates in every format, figures, and a summary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlkv.gates.head_gates import HeadGates
from rlkv.gates.plots import plot_gates, plot_histogram
from rlkv.utils.atomic import atomic_path
from rlkv.utils.figures import TEXT_SIZE, curve_figure, save_figure
from rlkv.utils.provenance import provenance

GATES = "gates.pt"
CURVES = (
    ("reward/mean", "mean reward"),
    ("gates/mean", "mean gate"),
    ("gates/below_0.5", "gates below 0.5"),
    ("reward/zero_spread_share", "groups without spread"),
)


def plot_training_curves(
    records: Sequence[dict[str, Any]], path: Path, curves: Sequence[tuple[str, str]] = CURVES
) -> None:
    """Shares and means of a log (``curves``: key and label) over its steps, all on one axis from 0 to 1."""
    figure, axes = curve_figure("Training of the gates", "optimizer step", "share or mean, 0 to 1")
    steps = [record["step"] for record in records]
    for key, label in curves:
        axes.plot(steps, [record[key] for record in records], label=label)
    axes.set_ylim(-0.02, 1.02)
    axes.legend(fontsize=TEXT_SIZE)
    save_figure(figure, path)


def export_run(
    folder: Path,
    gates: HeadGates,
    records: Sequence[dict[str, Any]],
    config: dict[str, Any],
    curves: Sequence[tuple[str, str]] = CURVES,
) -> None:
    """Write everything into ``folder``; ``gates.pt`` comes last, so that its presence says the export is whole.

    ``gates.safetensors``, ``adapter_weights.tsv`` (the published layout, alpha alone), ``adapter/`` (for
    ``PeftModel.from_pretrained``), ``heat_map.png``, ``histogram.png``, ``training_curves.png``, ``summary.json``,
    ``gates.pt``.
    """
    for name in ("gates.safetensors", "adapter_weights.tsv", "adapter"):
        gates.save(folder / name)
    plot_gates(gates, folder / "heat_map.png")
    plot_histogram(gates, folder / "histogram.png")
    plot_training_curves(records, folder / "training_curves.png", curves)
    summary = {"training": gates.training, "config": config, **provenance()}
    with atomic_path(folder / "summary.json") as partial:
        partial.write_text(json.dumps(summary, indent=2) + "\n")
    gates.save(folder / GATES)
