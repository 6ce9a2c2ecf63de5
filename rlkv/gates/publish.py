"""Plots of gates, and gates on the Hugging Face hub: a PEFT adapter with a model card."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from rlkv.gates.allocation import SPARSITIES, HeadAllocation
from rlkv.gates.formats import hub_address, write_gates
from rlkv.gates.head_gates import HeadGates
from rlkv.models.builtin import BUILT_IN
from rlkv.models.loading import is_path
from rlkv.models.shape import same_model
from rlkv.utils.files import (
    TEXT_SIZE,
    TITLE_SIZE,
    curve_figure,
    new_figure,
    read_json,
    save_figure,
    write_text,
)
from rlkv.utils.runtime import first_line

COLORS = "viridis"
CELL = 0.32  # inches per head in a heat map
MOST_LABELLED = 64  # heads up to which a heat map writes the numbers into its cells
# figures on problems that were not trained on, in the summary of the training
HELD_OUT = "held_out_figures"
_EVALUATED = {"task", "method", "accuracy", "ci_low", "ci_high", "n", "kv_bytes", "kv_bytes_full"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def gates_title(gates: HeadGates, what: str) -> str:
    """Return the title of a plot: ``what``, the model and the training sizes."""
    return f"{what}\n{gates.name} · sink {gates.sink}, window {gates.window}"


def plot_gates(gates: HeadGates, path: str | Path) -> None:
    """Plot a heat map of alpha: a column per layer, a row per KV head, colours fixed to [0, 1]."""
    layers, heads = gates.alpha.shape
    # places without a gate stay white
    shown = gates.alpha.masked_fill(~gates.gated, float("nan"))
    is_labelled = gates.alpha.numel() <= MOST_LABELLED
    cell = CELL * (1.8 if is_labelled else 1)
    figure, (axes,) = new_figure(max(4.2, layers * cell + 1.6), max(2.2, heads * cell + 1.3))
    image = axes.imshow(
        shown.T.numpy(), vmin=0, vmax=1, cmap=COLORS, aspect="auto", interpolation="nearest"
    )
    axes.set_title(gates_title(gates, "KV head gates"), fontsize=TITLE_SIZE)
    axes.set_xlabel("layer")
    axes.set_ylabel("KV head")
    axes.set_xticks(range(0, layers, 1 if layers <= 16 else 4))
    axes.set_yticks(range(0, heads, 1 if heads <= 16 else 4))
    axes.set_xticks([x - 0.5 for x in range(1, layers)], minor=True)
    axes.set_yticks([y - 0.5 for y in range(1, heads)], minor=True)
    axes.grid(which="minor", color="white", linewidth=0.6)
    axes.tick_params(which="minor", length=0)
    if is_labelled:
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": TEXT_SIZE}
        for layer, head in gates.gated.nonzero().tolist():
            value = gates.alpha[layer, head].item()
            color = "black" if value > 0.6 else "white"
            axes.text(layer, head, f"{value:.2f}", color=color, **style)
    figure.colorbar(image, ax=axes, label="gate", ticks=[0, 0.5, 1], fraction=0.05, pad=0.01)
    save_figure(figure, path)


def plot_histogram(gates: HeadGates, path: str | Path) -> None:
    """Plot the number of heads by gate in 20 bins of 0.05.

    The heads at exactly 0 and 1 are counted in the legend.
    """
    from matplotlib.ticker import MaxNLocator

    alpha = gates.alpha[gates.gated]
    title = gates_title(gates, "Histogram of KV head gates")
    figure, axes = curve_figure(title, "gate", "KV heads")
    label = (
        f"{alpha.numel()} heads, mean {alpha.mean():.3f}\n"
        f"{int((alpha == 0).sum())} at 0, {int((alpha == 1).sum())} at 1"
    )
    bins = [i / 20 for i in range(21)]
    axes.hist(alpha.numpy(), bins=bins, color="C0", edgecolor="white", label=label)
    axes.set_xlim(0, 1)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=TEXT_SIZE)
    save_figure(figure, path)


def push_gates(
    gates: HeadGates, address: str, evaluation: Path | None = None, private: bool = False
) -> str:
    """Commit ``gates`` with a card and a heat map to ``hf://owner/name``; return the commit's URL.

    The repository is made if it is absent; its earlier commits stay.

    Args:
        evaluation: ``results.json`` of rlkv-eval with these gates.
        private: make a new repository private.

    Raises:
        ValueError: for a wrong address or ``evaluation``, or if the hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError

    repo, revision = hub_address(address)
    if revision is not None:
        raise ValueError(f"{address}: gates are pushed to the main branch: leave @{revision} out")
    if evaluation is not None:
        check_evaluation(evaluation, gates)
    gates = without_path(gates)
    card = model_card(gates, repo, evaluation)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_gates(folder, gates.to_payload())
        plot_gates(gates, folder / "heat_map.png")
        write_text(folder / "README.md", card)
        try:
            HfApi().create_repo(repo, private=private or None, exist_ok=True)
            message = "KV head gates"
            commit = HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
        except (OSError, HFValidationError, HTTPError) as error:
            reason = first_line(error)
            raise ValueError(
                f"{address}: the gates could not be pushed ({reason}): log in with `hf auth login` "
                "as one who may write to this repository, and check the network"
            ) from error
    return commit.commit_url


def model_card(gates: HeadGates, repo: str, evaluation: Path | None = None) -> str:
    """Fill in the card of ``gates`` in ``repo`` (``owner/name``); arguments as in push_gates."""
    training = dict(gates.training)
    held_out = training.pop(HELD_OUT, {})
    model = gates.model_id
    environment = Environment(
        loader=PackageLoader("rlkv.gates", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("card.md.j2").render(
        base_model=model if _HUB_ID.fullmatch(model) else None,
        is_loadable=bool(_HUB_ID.fullmatch(model)) or model in BUILT_IN,
        model=model or "a model that the gates do not name",
        repo=repo,
        gates=gates,
        choices={share: HeadAllocation.from_gates(gates, share) for share in SPARSITIES},
        evaluated=[] if evaluation is None else _evaluated(evaluation),
        held_out=held_out,
        method=training.get("method", "unknown"),
        training=json.dumps(training, indent=2),
    )


def check_evaluation(path: Path, gates: HeadGates) -> None:
    """Raise ValueError if the results of an evaluation are of another model than the gates."""
    _evaluated(path)
    config = read_json(path).get("config")
    measured = config.get("model") if isinstance(config, dict) else None
    named = gates.model_id
    if not isinstance(measured, str) or not named or same_model(named, measured):
        return
    # a folder may be elsewhere by now: its name decides
    if Path(named).name != Path(measured).name:
        raise ValueError(
            f"{path} is an evaluation of {measured}, but these gates are of {named}: give the "
            "results.json of their own model"
        )


def _evaluated(path: Path) -> list[dict[str, Any]]:
    """Read the results of an evaluation, which the card shows."""
    try:
        rows = read_json(path)["results"]
        if all(row.keys() >= _EVALUATED for row in rows):
            return rows
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ValueError(
        f"{path}: not the results.json that rlkv-eval writes: give that file, or push without it"
    )


def without_path(gates: HeadGates) -> HeadGates:
    """Reduce a model's name that is a local path to its last part: the rest is private."""
    model = gates.model
    if model is None or not is_path(model.model_id):
        return gates
    return replace(gates, model=replace(model, model_id=Path(model.model_id).name))
