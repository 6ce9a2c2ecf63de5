"""``rlkv-gates``: look at gates files, convert, plot and compare them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from scipy.stats import spearmanr

from rlkv.cli.errors import run_app
from rlkv.gates.allocation import SCOPES, HeadAllocation
from rlkv.gates.head_gates import HeadGates

SPARSITIES = (0.2, 0.4, 0.5, 0.6, 0.8)

app = typer.Typer(
    help="""Look at gates files, convert, plot and compare them.

A gates file is a .pt, .safetensors or .tsv file, a PEFT folder, or hf://owner/name[@revision] on the hub.

\b
rlkv-gates inspect gates.pt                    what it holds, what a sparsity keeps
rlkv-gates convert gates.pt gates.safetensors  another format, by the suffix
rlkv-gates plot gates.pt heatmap.png           heat map of layers x KV heads
rlkv-gates diff mine.pt hf://owner/theirs      do two files agree on the heads?
""",
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
)

GatesArgument = Annotated[
    str, typer.Argument(metavar="GATES", help="Gates file, folder or hf://owner/name[@revision].")
]


def _print_summary(gates: HeadGates) -> None:
    alpha, model = gates.alpha, gates.model
    print(f"model     {model.model_id if model else 'not named in the file'}")
    heads = f"{gates.num_layers} layers x {gates.num_kv_heads} KV heads"
    if model and model.num_query_heads:
        heads += f", {model.num_query_heads} query heads of {model.head_dim}, {model.model_type}"
    print(f"shape     {heads}")
    print(f"training  sink {gates.sink}, window {gates.window} tokens")
    for key, value in gates.training.items():
        text = json.dumps(value)
        print(f"          {key}: {text if len(text) <= 100 else text[:97] + '...'}")
    print(f"serving   sink {gates.deploy_sink}, window {gates.deploy_window} tokens (recommended)")
    shares = [("at 0", alpha == 0), ("below 0.1", alpha < 0.1), ("below 0.5", alpha < 0.5), ("at 1", alpha == 1)]
    text = ", ".join(f"{100 * chosen.float().mean():.1f}% {name}" for name, chosen in shares)
    print(f"gates     mean {alpha.mean():.3f}; {text}; {alpha.unique().numel()} distinct values")


@app.command(short_help="What a gates file holds and what a sparsity would keep.")
def inspect(
    gates: GatesArgument,
    sparsity: Annotated[
        list[float] | None, typer.Option(help="Show this sparsity (may be repeated; default: 0.2 to 0.8).")
    ] = None,
    scope: Annotated[str, typer.Option(help=f"How heads are ranked: {' or '.join(SCOPES)}.")] = "global",
) -> None:
    """What a gates file holds, layer by layer, and how many heads of each layer a sparsity keeps full.

    \b
    rlkv-gates inspect results/demo/gates.pt
    rlkv-gates inspect gates.pt --sparsity 0.3 --sparsity 0.45 --scope layer
    """
    loaded = HeadGates.load(gates)
    choices = {s: HeadAllocation.from_gates(loaded, s, scope) for s in sparsity or SPARSITIES}
    _print_summary(loaded)
    print(f"\n{'':25}full heads at sparsity")
    print("layer   mean  at 0  at 1  " + "".join(f"{s:5g} " for s in choices) + "  gates")
    for layer, row in enumerate(loaded.alpha):
        counts = "".join(f"{int(choice.full[layer].sum()):5d} " for choice in choices.values())
        values = " ".join(f"{value:.2f}" for value in row)
        print(
            f"{layer:5d}  {row.mean():.3f}  {int((row == 0).sum()):4d}  {int((row == 1).sum()):4d}  {counts}  {values}"
        )
    print(f"\nsparsity = share of KV heads that are compressible; heads are ranked by scope {scope}:")
    for asked, choice in choices.items():
        print(
            f"  {asked:g}: {choice.num_full} full, {choice.num_compressible} compressible, actual {choice.sparsity:.4f}"
        )


@app.command(short_help="Write gates in another format.")
def convert(
    gates: GatesArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help=".pt, .safetensors, .tsv, or a folder (PEFT).")],
) -> None:
    """Write gates in another format, chosen by OUT's suffix; a name without suffix is a PEFT folder.

    \b
    rlkv-gates convert adapter_weights.tsv gates.safetensors
    rlkv-gates convert gates.pt peft_adapter/
    """
    loaded = HeadGates.load(gates)
    loaded.save(out)
    if out.suffix == ".tsv":
        print("a .tsv holds the gates alone: mean gates, model, sizes and training summary are not in it")
    print(f"{out}: {loaded.num_layers} layers x {loaded.num_kv_heads} KV heads, from {gates}")


@app.command(short_help="Draw gates as a heat map or a histogram.")
def plot(
    gates: GatesArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Picture to write: .png, .pdf or .svg.")],
    histogram: Annotated[bool, typer.Option("--histogram", help="A histogram instead of the heat map.")] = False,
) -> None:
    """Draw the gates as a heat map of layers x KV heads, or as a histogram.

    \b
    rlkv-gates plot gates.pt heatmap.png
    rlkv-gates plot gates.pt histogram.png --histogram
    """
    from rlkv.gates.plots import plot_gates, plot_histogram  # matplotlib is slow to load

    (plot_histogram if histogram else plot_gates)(HeadGates.load(gates), out)
    print(out)


@app.command(short_help="Compare two gates files.")
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Gates file, folder or hub address.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Gates of the same number of layers and KV heads.")],
    changes: Annotated[int, typer.Option(min=0, help="How many of the largest changes to list.")] = 10,
) -> None:
    """Compare two gates files: rank correlation, common full heads per sparsity, largest changes.

    \b
    rlkv-gates diff seed0/gates.pt seed1/gates.pt
    rlkv-gates diff gates.pt full_attention_heads.tsv --changes 20
    """
    first, second = HeadGates.load(a), HeadGates.load(b)
    if first.alpha.shape != second.alpha.shape:
        raise ValueError(
            f"cannot compare {a} ({first.num_layers} layers x {first.num_kv_heads} KV heads) with {b} "
            f"({second.num_layers} x {second.num_kv_heads}): they belong to different models"
        )
    change = second.alpha - first.alpha
    print(f"Spearman correlation  {spearmanr(first.alpha.flatten(), second.alpha.flatten()).statistic:.4f}")
    print(f"mean change           {change.mean():+.4f}, mean absolute change {change.abs().mean():.4f}")
    print("full heads in common  (two random draws would share 1 - sparsity)")
    for sparsity in SPARSITIES:
        pair = [HeadAllocation.from_gates(gates, sparsity) for gates in (first, second)]
        common = int((pair[0].full & pair[1].full).sum())
        print(f"  sparsity {sparsity:g}: {pair[0].overlap(pair[1]):.3f}  ({common} of {pair[0].num_full})")
    largest = change.abs().flatten().sort(descending=True, stable=True).indices[:changes]
    listed = [int(i) for i in largest if change.flatten()[i] != 0]
    if listed:
        print("largest changes       layer  head       A       B  change")
    for index in listed:
        layer, head = divmod(index, first.num_kv_heads)
        old, new = first.alpha[layer, head], second.alpha[layer, head]
        print(f"{'':22}{layer:5d} {head:5d}  {old:6.3f}  {new:6.3f}  {new - old:+6.3f}")


def main() -> None:
    """Entry point of the console script."""
    run_app(app)


if __name__ == "__main__":
    main()
