"""The page of a training run, from the logs in its folder: is it collapsing, is it converging,
which heads are left?
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from rlkv.evaluation.report import ACCURACY_LIMITS, Page, Panel, html_page, plot_curves
from rlkv.gates.allocation import HeadAllocation, is_decided
from rlkv.gates.head_gates import HeadGates
from rlkv.gates.publish import plot_gates
from rlkv.training.run_folder import SAMPLES_LOG, RunLogs, alerts
from rlkv.utils.files import write_text
from rlkv.utils.progress import duration

MOST_COMPARED = 150  # steps whose full heads are compared with the last ones
MOST_MARKED = 40  # points up to which a curve has a mark at each
MOST_SAMPLES = 24
SPARSITIES = (0.4, 0.5, 0.6)  # of a run that names no target


class Chart(NamedTuple):
    """Figures of the log on one pair of axes: labels by name, and whether all of them lie in [0,
    1].
    """

    title: str
    lines: Mapping[str, str]
    share: bool = False

    def drawn(self, names: Iterable[str]) -> dict[str, str]:
        """Labels of those of ``names`` that belong here.

        ``NAME_at_0.5`` is NAME at a sparsity of 0.5.
        """
        found = {}
        for name in names:
            base, _, sparsity = name.partition("_at_")
            if name in self.lines:
                found[name] = self.lines[name]
            elif base in self.lines and sparsity:
                found[name] = f"{self.lines[base]} at sparsity {sparsity}"
        return found


# question and charts by the name that the section has in W&B
SECTIONS: dict[str, tuple[str, tuple[Chart, ...]]] = {
    "collapse": (
        "Is it collapsing?",
        (
            Chart(
                "Reward against sparsity",
                {
                    "reward/mean": "mean reward",
                    "gates/below_0.5": "gates below 0.5",
                    "held_out/accuracy": "held-out accuracy",
                    "teacher/right": "teacher's accuracy",
                    "traces/kept": "exp(-loss): solutions that stay as they are",
                },
                share=True,
            ),
            Chart(
                "Groups and completions",
                {
                    "reward/zero_spread_share": "groups without spread",
                    "response/truncated_share": "truncated completions",
                    "held_out/truncated_share": "truncated held-out completions",
                },
                share=True,
            ),
            Chart(
                "Length of completions, tokens",
                {
                    "response/length_mean": "mean",
                    "response/length_max": "longest",
                    "held_out/length_mean": "held-out mean",
                },
            ),
            Chart("Steps left out", {"train/skipped_steps": "gradients not finite, so far"}),
        ),
    ),
    "convergence": (
        "Is it converging?",
        (
            Chart("Penalty", {"penalty/beta_prime": "beta'", "penalty/value": "beta' * mean gate"}),
            Chart(
                "Loss",
                {
                    "policy/loss": "policy",
                    "loss/distill": "distillation",
                    "loss": "loss of the solutions",
                },
            ),
            Chart("Gradient of the gates", {"gates/grad_norm": "norm"}),
            Chart("Standard deviation of rewards", {"reward/std": "over the step"}),
            Chart(
                "Rollout against trainer, log-probabilities",
                {
                    "rollout/logprob_diff_mean": "mean difference",
                    "rollout/truncated_share": "weights above the cap",
                },
            ),
        ),
    ),
    "heads": (
        "Which heads are left?",
        (
            Chart(
                "Gates",
                {
                    "gates/mean": "mean",
                    "gates/below_0.1": "below 0.1",
                    "gates/at_0": "at 0",
                    "gates/at_1": "at 1",
                },
                share=True,
            ),
        ),
    ),
    "time": (
        "Where does the time go?",
        (
            Chart(
                "Seconds per step",
                {
                    "time/step_s": "step",
                    "time/rollout_s": "rollout",
                    "time/reward_s": "reward",
                    "time/update_s": "update",
                    "time/held_out_s": "held-out problems",
                },
            ),
            Chart("CPU seconds per step", {"time/step_cpu_s": "all threads"}),
        ),
    ),
}


def write_training_page(run: Path, out: Path) -> None:
    """Write one HTML file; ``ValueError`` if ``run`` is not the folder of a run."""
    logs = RunLogs.read(run)
    with TemporaryDirectory() as folder:
        text = training_page(logs, Path(folder)).markdown(Path(folder))
        write_text(out, html_page(text, Path(folder)))


def training_page(logs: RunLogs, folder: Path) -> Page:
    """The whole page; its plots go to ``folder``."""
    config, page = logs.config, Page(f"Training: {logs.folder.resolve().name}")
    method = config.get("finder") or config.get("data", "")
    facts = [f"Model {config['model']}."] if "model" in config else []
    page.paragraph(
        " ".join([*facts, *([f"Finder: {method}."] if method else []), _progress(logs)]),
        strong=True,
    )
    found = alerts(logs.records)
    if found:
        page.table(["alert", "what the log shows"], [[alert.title, alert.text] for alert in found])
    elif logs.records:
        page.paragraph("No sign of a collapse.")
    for section, (question, _) in SECTIONS.items():
        panels = _panels(logs, section)
        if section == "convergence" and logs.gates:
            panels.append(_settled(logs))
        has_gates = section == "heads" and bool(logs.gates)
        if not panels and not has_gates:
            continue
        page.heading(question)
        for number, panel in enumerate(panels):
            page.picture(plot_curves(folder / f"{section}_{number}.png", panel), panel.title)
        if has_gates:
            _heads(page, logs, folder)
    _figures(page, logs)
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
        left = sum(seconds) / len(seconds) * (total - last["step"])
        text += f", about {duration(left)} left at the last steps' speed"
    return f"{text}."


def _panel(
    logs: RunLogs, title: str, curves: dict[str, list[tuple[float, float]]], share: bool
) -> Panel:
    """One plot; values that are not finite are left out."""
    xlabel = "removed heads" if "traces/kept" in logs.names else "optimizer step"
    points = {
        label: [(step, value, value, value) for step, value in curve if math.isfinite(value)]
        for label, curve in curves.items()
    }
    styles = {label: {"marker": ""} for label, curve in points.items() if len(curve) > MOST_MARKED}
    limits = ACCURACY_LIMITS if share else None
    return Panel(title, xlabel, points, ylabel="", styles=styles, limits=limits, ticks=False)


def _panels(logs: RunLogs, section: str) -> list[Panel]:
    """Plots of a section that the log has figures for.

    Counts and seconds that are all 0 are left out.
    """
    found = []
    for chart in SECTIONS[section][1]:
        curves = {label: logs.curve(name) for name, label in chart.drawn(logs.names).items()}
        if curves and (
            chart.share or any(value for curve in curves.values() for _, value in curve)
        ):
            found.append(_panel(logs, chart.title, curves, chart.share))
    return found


def _gates(logs: RunLogs) -> dict[int, HeadGates]:
    """Gates by step, with their means up to it: at most :data:`MOST_COMPARED`, the first and the
    last among them.
    """
    alphas = torch.tensor([record["alpha"] for record in logs.gates])
    means = alphas.double().cumsum(0) / torch.arange(1, len(alphas) + 1)[:, None, None]
    chosen = (
        torch.linspace(0, len(alphas) - 1, min(len(alphas), MOST_COMPARED)).round().int().tolist()
    )
    return {logs.gates[i]["step"]: HeadGates(alphas[i], means[i].float()) for i in chosen}


def _targets(logs: RunLogs) -> list[float]:
    return list(logs.config.get("target_sparsity") or SPARSITIES)


def _settled(logs: RunLogs) -> Panel:
    """How long the full heads have been the same."""
    gates = _gates(logs)
    curves = {}
    for sparsity in _targets(logs):
        full = {step: HeadAllocation.from_gates(of, sparsity) for step, of in gates.items()}
        *_, last = full.values()
        curves[f"sparsity {sparsity:g}"] = [
            (float(step), of.overlap(last)) for step, of in full.items()
        ]
    return _panel(logs, "Share of the last full heads that were full before", curves, share=True)


def _heads(page: Page, logs: RunLogs, folder: Path) -> None:
    """A heat map of the last gates, and the full heads at the target sparsities."""
    last = list(_gates(logs).values())[-1]
    file = folder / "heat_map.png"
    plot_gates(last, file)
    page.picture(file, f"Gates after step {logs.gates[-1]['step']}")
    found = {
        sparsity: HeadAllocation.from_gates(last, sparsity).full for sparsity in _targets(logs)
    }
    chosen = {sparsity: full for sparsity, full in found.items() if is_decided(last, full)}
    if not chosen:
        return
    rows = [
        [
            f"layer {layer}",
            *(" ".join(map(str, full[layer].nonzero()[:, 0].tolist())) for full in chosen.values()),
        ]
        for layer in range(last.num_layers)
    ]
    caption = (
        "Full heads after the last step, by their numbers, at sparsities where the gates decide"
    )
    page.table(["", *(f"sparsity {s:g}" for s in chosen)], rows, caption)


def _figures(page: Page, logs: RunLogs) -> None:
    """A table of every figure of the log."""
    rows = []
    for name in logs.names:
        values = [value for _, value in logs.curve(name) if isinstance(value, int | float)]
        if name != "step" and values:
            rows.append(
                [
                    name,
                    *(
                        f"{value:.4g}"
                        for value in (values[0], min(values), max(values), values[-1])
                    ),
                ]
            )
    if rows:
        page.heading("Figures of the log")
        page.table(["figure", "first", "lowest", "highest", "last"], rows)


def _samples(page: Page, logs: RunLogs) -> None:
    if not logs.samples:
        return
    newest = logs.samples[-1]["step"]
    page.heading("Sampled texts")
    rows = []
    for row in [row for row in logs.samples if row["step"] == newest][:MOST_SAMPLES]:
        verdict = "right" if row["right"] else "wrong"
        rows.append(
            [
                str(newest),
                verdict,
                str(row["answer"]),
                str(row["tokens"]),
                row["problem"],
                row["text"],
            ]
        )
    columns = ["step", "verdict", "answer", "tokens", "problem", "text"]
    page.table(columns, rows, f"The newest of {len(logs.samples)} texts in {SAMPLES_LOG}")
