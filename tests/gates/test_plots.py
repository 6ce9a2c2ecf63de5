"""Pictures of gates: real PNG files of a legible size, without pyplot."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch

from rlkv.gates.head_gates import HeadGates
from rlkv.gates.publish import gates_title, plot_gates, plot_histogram
from rlkv.models.shape import ModelShape
from rlkv.utils.files import curve_figure, save_figure


def make_gates(layers: int, heads: int) -> HeadGates:
    alpha = torch.linspace(0, 1, layers * heads).view(layers, heads)
    return HeadGates(
        alpha, model=ModelShape("owner/model", "llama", layers, heads, heads, 32), sink=4, window=16
    )


@pytest.mark.parametrize("plot", [plot_gates, plot_histogram])
@pytest.mark.parametrize("shape", [(1, 1), (4, 6), (28, 4), (36, 8)])
def test_pictures(
    plot: Callable[[HeadGates, Path], None], shape: tuple[int, int], tmp_path: Path
) -> None:
    plot(make_gates(*shape), tmp_path / "folder" / "gates.png")
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["gates.png"]
    image = matplotlib.image.imread(tmp_path / "folder" / "gates.png")[..., :3]
    height, width = image.shape[:2]
    assert 300 <= height <= 1600
    assert 600 <= width <= 2400


@pytest.mark.parametrize("shape", [(4, 6), (36, 8)])
def test_a_heat_map_shows_every_gate_in_its_colour(shape: tuple[int, int], tmp_path: Path) -> None:
    pictures = []
    for alpha in (torch.zeros(shape), torch.ones(shape)):
        plot_gates(HeadGates(alpha), tmp_path / "gates.png")
        pictures.append(matplotlib.image.imread(tmp_path / "gates.png")[..., :3])
    ends = [np.array(matplotlib.colormaps["viridis"](end)[:3]) for end in (0.0, 1.0)]
    share = [(np.abs(p - end).max(-1) < 0.02).mean() for p, end in zip(pictures, ends, strict=True)]
    assert (
        min(share) > 0.25
    )  # the map fills the picture, at the colours of 0 and 1 however uniform the gates are
    one = torch.zeros(shape)
    one[0, 1] = 1
    plot_gates(HeadGates(one), tmp_path / "gates.png")
    single = matplotlib.image.imread(tmp_path / "gates.png")[..., :3]
    rows, columns = np.nonzero(np.abs(single - pictures[0]).max(-1) > 0.3)
    assert columns.mean() < single.shape[1] / 4  # layer 0 is at the left
    assert rows.mean() < single.shape[0] / 2  # head 1 is near the top


def test_titles_name_model_and_sizes() -> None:
    assert (
        gates_title(make_gates(4, 6), "KV head gates")
        == "KV head gates\nowner/model · sink 4, window 16"
    )
    assert "runs/gates.tsv" in gates_title(
        HeadGates(torch.rand(2, 2), source="/a/b/runs/gates.tsv"), "x"
    )


def test_other_plots_share_the_style(tmp_path: Path) -> None:
    figure, axes = curve_figure("title", "x", "y")
    axes.plot([0, 1], [0, 1])
    for suffix in (".png", ".svg", ".pdf"):
        save_figure(figure, tmp_path / f"curve{suffix}")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"'txt'.*.png"):
        save_figure(figure, tmp_path / "curve.txt")


def test_pyplot_stays_unloaded(tmp_path: Path) -> None:
    code = (
        "import sys, torch\n"
        "from rlkv import HeadGates\nfrom rlkv.gates import publish as plots\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"plots.plot_gates(HeadGates(torch.rand(2, 2)), {str(tmp_path / 'a.png')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
