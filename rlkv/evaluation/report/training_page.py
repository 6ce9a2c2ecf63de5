"""The page of a training run, from the logs in its folder: is it collapsing, is it converging, which heads are left?"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from rlkv.evaluation.report.page import Cell, Page
from rlkv.evaluation.report.svg import LEVELS, heat_map, line_chart, palette
from rlkv.gates.allocation import HeadAllocation, is_decided
from rlkv.gates.head_gates import HeadGates
from rlkv.training.collapse import alerts
from rlkv.training.logs import SAMPLES_LOG, RunLogs
from rlkv.training.sections import SECTIONS
from rlkv.utils.progress import duration

SCRIPT = Path(__file__).parent / "templates" / "training.js"
MOST_FRAMES = 150  # of the heat map over time
MOST_SAMPLES = 24
SPARSITIES = (0.4, 0.5, 0.6)  # of a run that names no target


def training_page(logs: RunLogs, reload_seconds: float | None = None) -> Page:
    """The whole page.

    Args:
        reload_seconds: after which the page reloads itself in the browser; None: never.
    """
    script = SCRIPT.read_text(encoding="utf-8")
    config, page = logs.config, Page(f"Training: {logs.folder.resolve().name}", script=script)
    method = config.get("finder") or config.get("data", "")
    facts = [f"Model {config['model']}."] if "model" in config else []
    page.paragraph(" ".join([*facts, *([f"Finder: {method}."] if method else []), _progress(logs)]), strong=True)
    if reload_seconds is not None:
        page.drawing(f'<p id="reload" data-seconds="{reload_seconds:g}">Reloads every {reload_seconds:g} seconds.</p>')
    found = alerts(logs.records)
    if found:
        page.table(["alert", "what the log shows"], [[Cell(a.title, "worse"), Cell(a.text, "worse")] for a in found])
    elif logs.records:
        page.paragraph("No sign of a collapse.")
    frames = _frames(logs)
    for section, (question, _) in SECTIONS.items():
        charts = _charts(logs, section)
        if section == "convergence" and frames:
            charts.append(_settled(logs, frames))
        if section == "heads" and frames:
            charts.append(_by_layer(logs, frames))
        if not charts:
            continue
        page.heading(question)
        page.drawing("<div class='charts'>" + "\n".join(charts) + "</div>")
        if section == "heads" and frames:
            _heads(page, logs, frames)
    _samples(page, logs)
    if config:
        page.heading("Settings")
        page.code("\n".join(f"{name}: {json.dumps(value)}" for name, value in config.items()))
    return page


def _progress(logs: RunLogs) -> str:
    if not logs.records:
        return "No step has ended yet."
    last, config = logs.records[-1], logs.config
    total = max(config.get("max_steps", config.get("steps", 0)), 0)
    text = f"Step {last['step']}" + (f" of {total}" if total else "")
    if logs.finished:
        return f"{text}: finished, the gates are exported."
    seconds = [value for _, value in logs.curve("time/step_s")][-10:]
    if total > last["step"] and seconds:
        text += (
            f", about {duration(sum(seconds) / len(seconds) * (total - last['step']))} left at the last steps' speed"
        )
    return f"{text}."


def _axis(logs: RunLogs) -> str:
    return "removed heads" if "traces/kept" in logs.names else "optimizer step"


def _charts(logs: RunLogs, section: str) -> list[str]:
    """Charts of a section that the log has figures for; counts and seconds that are all 0 are left out."""
    found = []
    for chart in SECTIONS[section][1]:
        curves = {label: logs.curve(name) for name, label in chart.drawn(logs.names).items()}
        if curves and (chart.share or any(value for curve in curves.values() for _, value in curve)):
            found.append(line_chart(chart.title, _axis(logs), curves, chart.share))
    return found


class _Frame:
    """Gates after a step, and their means up to it: float32 ``[num_layers, num_kv_heads]``."""

    def __init__(self, step: int, alpha_LH: Tensor, mean_LH: Tensor) -> None:
        self.step, self.gates = step, HeadGates(alpha_LH, mean_LH)

    def full(self, sparsity: float) -> HeadAllocation:
        return HeadAllocation.from_gates(self.gates, sparsity)


def _frames(logs: RunLogs) -> list[_Frame]:
    """At most :data:`MOST_FRAMES`, evenly spread, the first and the last among them."""
    records = logs.gates
    if not records:
        return []
    alphas = torch.tensor([record["alpha"] for record in records])
    means = alphas.double().cumsum(0) / torch.arange(1, len(records) + 1)[:, None, None]
    number = min(len(records), MOST_FRAMES)
    chosen = torch.linspace(0, len(records) - 1, number).round().int().tolist()
    return [_Frame(records[i]["step"], alphas[i], means[i].float()) for i in chosen]


def _targets(logs: RunLogs) -> list[float]:
    return list(logs.config.get("target_sparsity") or SPARSITIES)


def _settled(logs: RunLogs, frames: list[_Frame]) -> str:
    curves = {}
    for sparsity in _targets(logs):
        now = frames[-1].full(sparsity)
        curves[f"sparsity {sparsity:g}"] = [(frame.step, frame.full(sparsity).overlap(now)) for frame in frames]
    return line_chart("Share of today's full heads that were full before", _axis(logs), curves, share=True)


def _by_layer(logs: RunLogs, frames: list[_Frame]) -> str:
    layers = frames[0].gates.num_layers
    curves = {
        f"layer {layer}": [(frame.step, frame.gates.alpha[layer].mean().item()) for frame in frames]
        for layer in range(layers)
    }
    return line_chart("Mean gate of each layer", _axis(logs), curves, share=True)


def _heads(page: Page, logs: RunLogs, frames: list[_Frame]) -> None:
    """The heat map with its slider, and the full heads at the target sparsities."""
    last = frames[-1].gates
    levels = [(frame.gates.alpha.flatten() * LEVELS).round().int().tolist() for frame in frames]
    data = json.dumps({"steps": [frame.step for frame in frames], "frames": levels, "colours": palette()})
    slider = (
        f'<p><input type="range" id="step" aria-label="step" min="0" max="{len(frames) - 1}" '
        f'value="{len(frames) - 1}"> <output id="step-label"></output></p>'
        f'<script type="application/json" id="frames">{data}</script>'
    )
    page.drawing(heat_map(levels[-1], last.num_layers, last.num_kv_heads) + slider, "Gates at a step: move the slider.")
    found = {sparsity: frames[-1].full(sparsity).full for sparsity in _targets(logs)}
    chosen = {sparsity: full for sparsity, full in found.items() if is_decided(last, full)}
    if not chosen:
        return
    rows = [
        [f"layer {layer}", *(" ".join(map(str, full[layer].nonzero()[:, 0].tolist())) for full in chosen.values())]
        for layer in range(last.num_layers)
    ]
    caption = "Full heads after the last step, by their numbers, at sparsities where the gates decide"
    page.table(["", *(f"sparsity {s:g}" for s in chosen)], rows, caption)


def _samples(page: Page, logs: RunLogs) -> None:
    if not logs.samples:
        return
    newest = logs.samples[-1]["step"]
    rows = [row for row in logs.samples if row["step"] == newest][:MOST_SAMPLES]
    page.heading("Sampled texts")
    cells = [
        [
            str(row["step"]),
            Cell("right" if row["right"] else "wrong", "better" if row["right"] else "worse"),
            str(row["answer"]),
            str(row["tokens"]),
            row["problem"],
            row["text"],
        ]
        for row in rows
    ]
    columns = ["step", "verdict", "answer", "tokens", "problem", "text"]
    page.table(columns, cells, f"The newest of {len(logs.samples)} texts in {SAMPLES_LOG}")
