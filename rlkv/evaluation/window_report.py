"""The page of a window study."""

from __future__ import annotations

from pathlib import Path

from rlkv.evaluation.measurements import Metrics
from rlkv.evaluation.report import Cell, Page, Panel, curve, plot_curves, point
from rlkv.evaluation.study_text import (
    BYTES_NOTE,
    LEGEND,
    NOT_AVAILABLE,
    accuracy_cell,
    difference_cell,
    levels,
    p_text,
    plural,
    verdict,
)
from rlkv.evaluation.window_metrics import WAYS

SHARE = "bytes of KV / bytes of the full cache, on the full cache's texts"
MARKERS = "os^vD"
HELD_OUT = "Chosen on one half of the problems and measured on the other, both ways"


def findings(metrics: Metrics) -> list[str]:
    """Sentences for the top of the page."""
    lines = [recommendation_text(metrics)]
    for task, found in metrics["tasks"].items():
        pooled = found["pooled"]
        if pooled is None:
            lines.append(
                f"{task}: at no sparsity do the bytes of the prompt suffice for one more head and "
                "token."
            )
            continue
        n = found["full"]["n"]
        bought = ", ".join(f"{name} {_rate(pooled['ways'][name])}" for name in WAYS)
        pairs = [
            f"{of['first']} minus {of['second']} {verdict(of['difference'])}"
            for of in pooled["pairs"]
        ]
        lines.append(
            f"{task}, n = {n}: points of accuracy per percent of the full cache's bytes, from "
            f"{metrics['base']} on, "
            f"mean over {pooled['steps']} sparsities: {bought}. Accuracy for the bytes of the "
            "prompt: "
            f"{'; '.join(pairs)}."
        )
    return lines


def recommendation_text(metrics: Metrics) -> str:
    """What to serve with, and on what grounds."""
    found, budget, margin = metrics["recommendation"], metrics["byte_budget"], metrics["margin"]
    points = f"{100 * margin:g} points"
    rule = (
        f"the most accurate within {budget:.0%} of the bytes"
        if budget is not None
        else f"within {points} of full"
    )
    if found is None:
        return f"Recommended: none, no setting of the grid is {rule}."
    accuracy = ", ".join(
        f"{task} {value:.3f} (full cache {found['full'][task]:.3f}, n = "
        f"{metrics['tasks'][task]['full']['n']}) with "
        f"{found['share'][task]:.1%} of the bytes"
        for task, value in found["accuracy"].items()
    )
    by_sparsity = [
        f"{s:g} {name or 'none'}"
        for s, name in zip(metrics["sparsities"], metrics["by_sparsity"], strict=True)
    ]
    fewest = "" if budget is not None else "the fewest bytes "
    text = (
        f"Recommended: {found['name']} at sparsity {found['sparsity']:g}, {fewest}{rule}: "
        f"{accuracy}."
    )
    if found["alike"] is not None:
        text += (
            f" No significant difference to {plural(found['alike'], 'other setting')} within "
            "these bytes."
        )
    held_out = found["held_out"]
    if held_out is not None:
        text += (
            f" {HELD_OUT} ({' and '.join(held_out['chosen'])}): {held_out['accuracy']:.3f}, full "
            "cache "
            f"{held_out['full']:.3f}."
        )
    return f"{text} By the same rule at each sparsity alone: {', '.join(by_sparsity)}."


def _rate(way: Metrics) -> str:
    of = way["per_percent"]
    return (
        NOT_AVAILABLE if of is None else f"{of['mean']:+.2f} [{of['low']:+.2f}, {of['high']:+.2f}]"
    )


def write_task(task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path) -> None:
    """The grid, the comparison at equal bytes, and a plot of both."""
    page.heading(f"Accuracy and bytes: {task}")
    full = found["full"]
    page.table(
        ["sinks + window", *levels(metrics["sparsities"])],
        [[name, *map(_grid_cell, cells)] for name, cells in found["cells"].items()],
        f"{task}: greedy accuracy on {full['n']} problems, in parentheses the difference to the "
        "full cache "
        f"({full['mean']:.3f}); then its 95% interval (Wilson), and bytes of KV over the full "
        "cache's: at the end of "
        "the full-cache run's texts, which are the same for all settings / held at the end of the "
        "setting's own. "
        f"prompt: compressible heads keep all of it in place of the sinks. {LEGEND} {BYTES_NOTE}.",
    )
    page.heading(f"The same bytes, spent in three ways: {task}", level=3)
    page.table(
        [
            "sparsity",
            f"{metrics['base']}",
            *WAYS,
            *(f"{a} minus {b}" for a, b in _pair_names(found)),
        ],
        [_step_row(step) for step in found["steps"]],
        f"{task}: the bytes that a protected prompt adds to {metrics['base']} at each sparsity, "
        "spent on it, on the "
        "longest window or on the most full heads that hold at most as much. Accuracy; then the "
        "gain in points per "
        "percent of the full cache's bytes with its 95% interval (paired bootstrap over problems), "
        "what is kept, and "
        "its bytes. Last columns: paired differences in accuracy (▲: the first is better). "
        f"{NOT_AVAILABLE}: not one more head or token fits.",
    )
    file = folder / f"window-{task.replace(':', '_')}.png"
    plot_curves(file, _grid_panel(task, found, metrics), _bytes_panel(task, found))
    page.picture(
        file,
        f"{task}: accuracy over bytes, 95% intervals. Left: the grid, a curve for each size over "
        "the sparsities "
        "(dashed: prompt kept). Right: the bytes of the prompt, spent in three ways.",
    )


def _grid_cell(of: Metrics) -> Cell:
    cell = accuracy_cell(of)
    return Cell(cell.text, cell.sign, f"{cell.note}\n{of['share']:.1%} / {of['kv_share']:.1%}")


def _pair_names(found: Metrics) -> list[tuple[str, str]]:
    """Each two ways, in the order of :data:`WAYS`."""
    return [(a, b) for i, a in enumerate(WAYS) for b in WAYS[i + 1 :]]


def _step_row(step: Metrics) -> list[Cell | str]:
    base, title = step["base"], f"s = {step['sparsity']:g}"
    cells: list[Cell | str] = [
        title,
        Cell(f"{base['accuracy']['mean']:.3f}", "", f"{base['share']:.1%}"),
    ]
    for name in WAYS:
        way = step["ways"].get(name)
        if way is None:
            cells.append(NOT_AVAILABLE)
            continue
        kept = f"{way['sizes']} @ {way['sparsity']:.3g}, {way['share']:.1%}"
        cells.append(Cell(f"{way['accuracy']['mean']:.3f}", "", f"{_rate(way)}\n{kept}"))
    tests = {(of["first"], of["second"]): of["difference"] for of in step["pairs"]}
    for pair in _pair_names(step):
        test = tests.get(pair)
        cells.append(
            NOT_AVAILABLE if test is None else difference_cell(test, p_text(test["p_value"]))
        )
    return cells


def _grid_panel(task: str, found: Metrics, metrics: Metrics) -> Panel:
    curves = {
        name: curve([of["share"] for of in cells], cells) for name, cells in found["cells"].items()
    }
    styles = _size_styles(list(curves))
    return Panel(
        f"{task}: the grid",
        SHARE,
        curves,
        styles=styles,
        reference=found["full"]["mean"],
        ticks=False,
    )


def _size_styles(names: list[str]) -> dict[str, dict[str, str]]:
    """A colour for each window, a marker for each number of sinks, dashes for a prompt."""
    parts = [name.rpartition(" + ") for name in names]
    firsts, windows = (list(dict.fromkeys(part[place] for part in parts)) for place in (0, 2))
    return {
        name: {
            "color": f"C{windows.index(window) % 10}",
            "marker": MARKERS[firsts.index(first) % len(MARKERS)],
            "linestyle": "--" if first.startswith("prompt") else "-",
        }
        for name, (first, _, window) in zip(names, parts, strict=True)
    }


def _bytes_panel(task: str, found: Metrics) -> Panel:
    curves = {
        name: [
            point(of["share"], of["accuracy"])
            for step in found["steps"]
            if (of := step["ways"].get(name))
        ]
        for name in WAYS
    }
    curves = {name: points for name, points in curves.items() if points}
    styles = dict(zip(WAYS, ({"color": "black"}, {"color": "C8"}, {"color": "C9"}), strict=True))
    title, full = f"{task}: the bytes of the prompt", found["full"]["mean"]
    return Panel(title, SHARE, curves, styles=styles, reference=full, ticks=False)
