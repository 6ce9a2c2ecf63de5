"""Look at gates files, convert, plot, compare and share them, and report on their training.

A gates file is a .pt, .safetensors or .tsv file, a PEFT folder, hf://owner/name[@revision] on the
hub, or tiny or smol for the packaged gates of a built-in model.

    rlkv-gates inspect gates.pt                    what it holds, what a sparsity keeps
    rlkv-gates convert gates.pt gates.safetensors  another format, by the suffix
    rlkv-gates plot gates.pt heatmap.png           heat map of layers x KV heads
    rlkv-gates diff mine.pt hf://owner/theirs      do two files agree on the heads?
    rlkv-gates report outputs/gates                the page of a training run
    rlkv-gates push gates.pt hf://owner/name       publish, with a model card
    rlkv-gates pull hf://owner/name gates.pt       download
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from scipy.stats import spearmanr
from tyro.conf import Positional, arg

from rlkv.cli.app import parse_command, run_app
from rlkv.gates.allocation import SPARSITIES, HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.layout import ranges
from rlkv.models.shape import same_model
from rlkv.utils.files import check_new
from rlkv.utils.runtime import require

Address = Annotated[Positional[str], arg(metavar="hf://OWNER/NAME")]
Gates = Annotated[Positional[str], arg(metavar="GATES", help="Gates file, folder or hub address.")]
Out = Annotated[Positional[str], arg(metavar="OUT")]  # a path would lose the / of a folder


@dataclass(frozen=True)
class Report:
    """Write one HTML page of a training run: its alerts, figures, gates and texts.

    RUN_DIR is the output folder of rlkv-train (any finder) or rlkv-distill, also while it trains.

    rlkv-gates report outputs/gates
    """

    run_dir: Annotated[Positional[Path], arg(metavar="RUN_DIR")]
    """Output folder of the run."""
    out: Path | None = None
    """Page to write; default: report.html in RUN_DIR."""

    def run(self) -> None:
        require("trl", "train")
        require("peft", "train")
        from rlkv.evaluation.run_page import write_training_page

        out = self.out or self.run_dir / "report.html"
        write_training_page(self.run_dir, out)
        print(out)


@dataclass(frozen=True)
class Push:
    """Publish gates on the Hugging Face hub: a PEFT adapter, a model card and a heat map.

    rlkv-gates push outputs/gates/gates.pt hf://owner/name
    rlkv-gates push gates.pt hf://owner/name --evaluation results/eval/results.json --private
    """

    gates: Gates
    address: Address
    """Repository of the hub, which is made if it is absent."""
    evaluation: Path | None = None
    """results.json of rlkv-eval with these gates, for the card."""
    private: bool = False
    """Make a new repository private; one that exists stays as it is."""

    def run(self) -> None:
        from rlkv.gates.publish import push_gates

        print(push_gates(HeadGates.load(self.gates), self.address, self.evaluation, self.private))


@dataclass(frozen=True)
class Pull:
    """Download gates from the Hugging Face hub, in the format of OUT's suffix (none: PEFT folder).

    rlkv-gates pull hf://owner/name gates.pt
    rlkv-gates pull hf://owner/name@revision adapter/
    """

    address: Address
    """Repository of the hub, with @REVISION if wanted."""
    out: Out
    """File that ends with .pt, .safetensors or .tsv, or a folder (PEFT)."""
    overwrite: bool = False
    """Replace OUT if it exists."""

    def check(self) -> None:
        if not self.address.startswith("hf://"):
            raise ValueError(
                f"{self.address}: not on the hub: give hf://owner/name, or use rlkv-gates convert"
            )
        check_new(Path(self.out), self.overwrite)

    def run(self) -> None:
        loaded = HeadGates.load(self.address)
        loaded.save(self.out)
        print(f"{self.out}: {loaded!r}")


@dataclass(frozen=True)
class Inspect:
    """Show a gates file layer by layer, and how many heads of each layer a sparsity keeps full.

    rlkv-gates inspect results/demo/gates.pt
    rlkv-gates inspect gates.pt --sparsities 0.3 0.45 --scope layer
    """

    gates: Gates
    sparsities: tuple[float, ...] = SPARSITIES
    """Shares of compressible heads to show."""
    scope: str = "global"
    """Whether heads are ranked over the whole model (global) or within each layer (layer)."""

    def run(self) -> None:
        loaded = HeadGates.load(self.gates)
        choices = {s: HeadAllocation.from_gates(loaded, s, self.scope) for s in self.sparsities}
        _print_summary(loaded)
        print(f"\n{'':25}full heads at sparsity")
        print("layer   mean  at 0  at 1  " + "".join(f"{s:5g} " for s in choices) + "  gates")
        for layer in loaded.layers:
            own = loaded.gated[layer]
            row = loaded.alpha[layer, own]
            extremes = f"{int((row == 0).sum()):4d}  {int((row == 1).sum()):4d}"
            full = [int(choice.full[layer, own].sum()) for choice in choices.values()]
            counts = "".join(f"{count:5d} " for count in full)
            print(
                f"{layer:5d}  {row.mean():.3f}  {extremes}  {counts}  "
                f"{' '.join(f'{value:.2f}' for value in row)}"
            )
        print(
            "\nsparsity = share of KV heads that are compressible; heads are ranked by scope "
            f"{self.scope}:"
        )
        for asked, choice in choices.items():
            counted = f"{choice.num_full} full, {choice.num_compressible} compressible"
            print(f"  {asked:g}: {counted}, actual {choice.sparsity:.4f}")


@dataclass(frozen=True)
class _Writes:
    """Options of what makes OUT of GATES."""

    gates: Gates
    out: Out
    """What to write."""
    overwrite: bool = False
    """Replace OUT if it exists."""

    def check(self) -> None:
        check_new(Path(self.out), self.overwrite)


@dataclass(frozen=True)
class Convert(_Writes):
    """Write gates in another format, chosen by OUT's suffix: .pt, .safetensors or .tsv.

    A name without suffix is a PEFT folder.

    rlkv-gates convert adapter_weights.tsv gates.safetensors
    rlkv-gates convert gates.pt peft_adapter/
    """

    def run(self) -> None:
        loaded = HeadGates.load(self.gates)
        loaded.save(self.out)
        if self.out.endswith(".tsv"):
            print(
                "a .tsv holds the gates alone: mean gates, model, sizes and training summary are "
                "not in it"
            )
        print(f"{self.out}: {_heads_of(loaded)}, from {self.gates}")


@dataclass(frozen=True)
class Plot(_Writes):
    """Draw the gates as a heat map of layers x KV heads, or as a histogram: .png, .pdf or .svg.

    rlkv-gates plot gates.pt heatmap.png
    rlkv-gates plot gates.pt histogram.png --histogram
    """

    histogram: bool = False
    """A histogram instead of the heat map."""

    def run(self) -> None:
        from rlkv.gates.publish import plot_gates, plot_histogram

        plot = plot_histogram if self.histogram else plot_gates
        plot(HeadGates.load(self.gates), Path(self.out))
        print(self.out)


@dataclass(frozen=True)
class Diff:
    """Compare two gates files: rank correlation, common full heads per sparsity, largest changes.

    rlkv-gates diff seed0/gates.pt seed1/gates.pt
    rlkv-gates diff gates.pt full_attention_heads.tsv --changes 20
    """

    a: Annotated[Positional[str], arg(metavar="A")]
    """Gates file, folder or hub address."""
    b: Annotated[Positional[str], arg(metavar="B")]
    """Gates of the same number of layers and KV heads."""
    changes: int = 10
    """How many of the largest changes to list."""

    def check(self) -> None:
        if self.changes < 0:
            raise ValueError(f"--changes is {self.changes}: it must be 0 or more")

    def run(self) -> None:
        first = HeadGates.load(self.a)
        second = HeadGates.load(self.b)
        if not torch.equal(first.gated, second.gated):
            sizes = [_heads_of(gates) for gates in (first, second)]
            raise ValueError(
                f"cannot compare {self.a} ({sizes[0]}) with {self.b} ({sizes[1]}): they "
                "belong to different models"
            )
        names = [gates.model_id for gates in (first, second)]
        if all(names) and not same_model(*names):
            print(f"of two models: {names[0]}, {names[1]}")
        change = second.alpha - first.alpha
        print(f"Spearman correlation  {_correlation(first, second)}")
        own = change[first.gated]
        absolute = own.abs().mean()
        print(f"mean change           {own.mean():+.4f}, mean absolute change {absolute:.4f}")
        print("full heads in common  (two random draws would share 1 - sparsity)")
        for sparsity in SPARSITIES:
            mine = HeadAllocation.from_gates(first, sparsity)
            other = HeadAllocation.from_gates(second, sparsity)
            common = int((mine.full & other.full & mine.gated).sum())
            share = mine.overlap(other)
            print(f"  sparsity {sparsity:g}: {share:.3f}  ({common} of {mine.num_full})")
        largest = change.abs().flatten().sort(descending=True, stable=True).indices[: self.changes]
        listed = [int(i) for i in largest if change.flatten()[i] != 0]
        if listed:
            print("largest changes       layer  head       A       B  change")
        for index in listed:
            layer, head = divmod(index, first.num_kv_heads)
            old = first.alpha[layer, head]
            new = second.alpha[layer, head]
            print(f"{'':22}{layer:5d} {head:5d}  {old:6.3f}  {new:6.3f}  {new - old:+6.3f}")


def _correlation(first: HeadGates, second: HeadGates) -> str:
    """Return Spearman's rank correlation, which is not defined for constant gates."""
    values = [gates.alpha[gates.gated] for gates in (first, second)]
    for name, alpha in zip("AB", values, strict=True):
        if alpha.unique().numel() == 1:
            return f"not defined, since all gates of {name} are {alpha[0]:g}"
    return f"{spearmanr(*values).statistic:.4f}"


def _heads_of(gates: HeadGates) -> str:
    """Say how many heads have gates, and in which layers, if not in all."""
    heads = f"{gates.num_layers} layers x {gates.num_kv_heads} KV heads"
    return heads if gates.heads is None else f"{heads}, gates in layers {ranges(gates.layers)}"


def _print_summary(gates: HeadGates) -> None:
    alpha = gates.alpha[gates.gated]
    model = gates.model
    print(f"model     {gates.model_id or 'not named in the file'}")
    heads = _heads_of(gates)
    if model and model.num_query_heads:
        heads += f", {model.num_query_heads} query heads of {model.head_dim}, {model.model_type}"
    print(f"shape     {heads}")
    print(f"training  sink {gates.sink}, window {gates.window} tokens")
    for key, value in gates.training.items():
        text = json.dumps(value)
        print(f"          {key}: {text if len(text) <= 100 else text[:97] + '...'}")
    prompt = ", and the whole prompt" if gates.deploy_protect_prompt else ""
    print(
        f"serving   sink {gates.deploy_sink}, window {gates.deploy_window} tokens{prompt} "
        "(recommended)"
    )
    chosen = {
        "at 0": alpha == 0,
        "below 0.1": alpha < 0.1,
        "below 0.5": alpha < 0.5,
        "at 1": alpha == 1,
    }
    text = ", ".join(f"{100 * of.float().mean():.1f}% {name}" for name, of in chosen.items())
    print(f"gates     mean {alpha.mean():.3f}; {text}; {alpha.unique().numel()} distinct values")


COMMANDS = {
    "inspect": Inspect,
    "convert": Convert,
    "plot": Plot,
    "diff": Diff,
    "report": Report,
    "push": Push,
    "pull": Pull,
}


def main() -> None:
    run_app(lambda: parse_command("rlkv-gates", COMMANDS, __doc__).run())


if __name__ == "__main__":
    main()
