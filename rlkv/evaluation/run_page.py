"""The page of a training run, from the logs in its folder: one static HTML file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rlkv.evaluation.report import (
    ACCURACY_LIMITS,
    PAGE_POLICY,
    Page,
    Panel,
    html_page,
    plot_curves,
)
from rlkv.gates.allocation import HeadAllocation, is_decided
from rlkv.gates.head_gates import HeadGates
from rlkv.gates.publish import plot_gates
from rlkv.training.logs import alerts
from rlkv.training.run_folder import RunLogs
from rlkv.utils.files import write_text
from rlkv.utils.progress import duration

MOST_COMPARED = 150  # steps whose full heads are compared with the last ones
MOST_MARKED = 40  # points up to which a curve has a mark at each
MOST_SAMPLES = 24
SPARSITIES = (0.4, 0.5, 0.6)  # of a run that names no target
Curves = dict[str, list[tuple[float, float]]]  # (step, value) by name
PLACES = ("step", "epoch", "layer", "head")  # what a record of the log stands for


def write_training_page(run: Path, out: Path) -> None:
    """Write one HTML file.

    Raises:
        ValueError: if ``run`` is not the folder of a run, or ``out`` is there and no page of ours.
    """
    if out.exists() and PAGE_POLICY.encode() not in out.read_bytes():
        raise ValueError(f"{out} is no page that rlkv wrote: take another --out, or remove it")
    logs = RunLogs.read(run)
    with TemporaryDirectory() as folder:
        text = training_page(logs, Path(folder)).markdown()
        write_text(out, html_page(text, Path(folder)))


def training_page(logs: RunLogs, folder: Path) -> Page:
    """Return the page, with its plots in ``folder``."""
    config = logs.config
    page = Page(f"Training: {logs.folder.resolve().name}")
    page.paragraph(_progress(logs), strong=True)
    found = alerts(logs.records)
    if found:
        page.table(["alert", "what the log shows"], [[alert.title, alert.text] for alert in found])
    elif logs.records:
        page.paragraph("No sign of a collapse.")
    if logs.records:
        page.heading("Figures of the log")
        _write_figures(page, logs.records, folder)
    if logs.gates:
        page.heading("Gates")
        _write_gates(page, logs, folder)
    if logs.samples:
        page.heading("Sampled texts")
        _write_samples(page, logs.samples)
    if config:
        page.heading("Settings")
        page.code("\n".join(f"{name}: {json.dumps(value)}" for name, value in config.items()))
    return page


def _progress(logs: RunLogs) -> str:
    if not logs.records:
        return "No step has ended yet."
    last = logs.records[-1]["step"]
    total = max(logs.config.get("max_steps", logs.config.get("steps", 0)), 0)
    text = f"Step {last} of {total}" if total else f"Step {last}"
    if logs.finished:
        return f"{text}: finished, the gates are exported."
    seconds = [record["time/step_s"] for record in logs.records if "time/step_s" in record][-10:]
    if total > last and seconds:
        left = sum(seconds) / len(seconds) * (total - last)
        text += f", about {duration(left)} left at the last steps' speed"
    return f"{text}."


def _panel(title: str, curves: Curves, is_share: bool) -> Panel:
    points = {}
    styles = {}
    for label, curve in curves.items():
        points[label] = [(step, value, value, value) for step, value in curve]
        if len(curve) > MOST_MARKED:
            styles[label] = {"marker": ""}
    limits = ACCURACY_LIMITS if is_share else None
    return Panel(title, "step", points, ylabel="", styles=styles, limits=limits, ticks=False)


def _write_figures(page: Page, records: list[dict[str, Any]], folder: Path) -> None:
    """Add a plot for each group of figures, such as ``reward/``, and range, and a table of all."""
    figures: Curves = {}
    last = {}
    for record in records:
        for name, value in record.items():
            if not isinstance(value, int | float) or name in PLACES:
                continue
            last[name] = value
            if math.isfinite(value):
                figures.setdefault(name, []).append((record["step"], value))
    groups: dict[tuple[str, bool], Curves] = {}
    rows = []
    for name, curve in figures.items():
        values = [value for _, value in curve]
        is_share = min(values) >= 0 and max(values) <= 1
        groups.setdefault((name.partition("/")[0], is_share), {})[name] = curve
        shown = (values[0], min(values), max(values), last[name])  # NaN may be the last
        rows.append([name, *(f"{value:.4g}" for value in shown)])
    for number, ((group, is_share), curves) in enumerate(groups.items()):
        panel = _panel(f"{group}, from 0 to 1" if is_share else group, curves, is_share)
        page.picture(plot_curves(folder / f"figures_{number}.png", panel), panel.title)
    page.table(["figure", "first", "lowest", "highest", "last"], rows)


def _write_gates(page: Page, logs: RunLogs, folder: Path) -> None:
    """Add a heat map, how long the full heads have been the same, and which they are."""
    alphas = torch.tensor([record["alpha"] for record in logs.gates])
    steps = [record["step"] for record in logs.gates]
    # gates with their means up to each step: some, the first and the last among them
    means = alphas.double().cumsum(0) / torch.arange(1, len(alphas) + 1)[:, None, None]
    number = min(len(alphas), MOST_COMPARED)
    places = torch.linspace(0, len(alphas) - 1, number).round().int().tolist()
    heads = logs.gates[-1].get("heads")
    by_step = {steps[i]: HeadGates(alphas[i], means[i].float(), heads=heads) for i in places}
    last = by_step[steps[-1]]
    plot_gates(last, folder / "heat_map.png")
    page.picture(folder / "heat_map.png", f"Gates after step {steps[-1]}")
    curves = {}
    chosen = {}
    for sparsity in logs.config.get("target_sparsity") or SPARSITIES:
        allocation = HeadAllocation.from_gates(last, sparsity)
        curve = []
        for step, gates in by_step.items():
            full = HeadAllocation.from_gates(gates, sparsity)
            curve.append((float(step), full.overlap(allocation)))
        curves[f"sparsity {sparsity:g}"] = curve
        if is_decided(last, allocation.full):
            chosen[f"sparsity {sparsity:g}"] = allocation.full & last.gated
    panel = _panel("Share of the last full heads that were full before", curves, is_share=True)
    page.picture(plot_curves(folder / "settled.png", panel), panel.title)
    if not chosen:
        return
    rows = []
    for layer in last.layers:
        heads = [full[layer].nonzero()[:, 0].tolist() for full in chosen.values()]
        rows.append([f"layer {layer}", *(" ".join(map(str, numbers)) for numbers in heads)])
    page.table(["", *chosen], rows, "Full heads after the last step, where the gates decide")


def _write_samples(page: Page, samples: list[dict[str, Any]]) -> None:
    newest = [row for row in samples if row["step"] == samples[-1]["step"]]
    rows = []
    for row in newest[:MOST_SAMPLES]:
        verdict = "right" if row["right"] else "wrong"
        cells = (row["step"], verdict, row["answer"], row["tokens"], row["problem"], row["text"])
        rows.append([str(cell) for cell in cells])
    columns = ["step", "verdict", "answer", "tokens", "problem", "text"]
    page.table(columns, rows, f"The newest of {len(samples)} texts")
