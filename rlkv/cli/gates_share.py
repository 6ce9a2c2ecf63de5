"""rlkv-gates push and pull: gates on the Hugging Face hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from rlkv.gates.head_gates import HeadGates
from rlkv.utils.atomic import check_new

Address = Annotated[Positional[str], arg(metavar="hf://OWNER/NAME")]


@dataclass(frozen=True)
class Push:
    """Publish gates on the Hugging Face hub: a PEFT adapter, a model card and a heat map, in one commit.

    rlkv-gates push outputs/gates/gates.pt hf://owner/name
    rlkv-gates push gates.pt hf://owner/name --evaluation results/eval/results.json --private
    """

    gates: Annotated[Positional[str], arg(metavar="GATES")]
    """Gates file, folder or hub address."""
    address: Address
    """Repository of the hub, which is made if it is absent."""
    evaluation: Path | None = None
    """results.json of rlkv-eval with these gates, for the card."""
    private: bool = False
    """Make a new repository private; one that exists stays as it is."""

    def run(self) -> None:
        from rlkv.gates.share import push_gates  # matplotlib is slow to load

        print(push_gates(HeadGates.load(self.gates), self.address, self.evaluation, self.private))


@dataclass(frozen=True)
class Pull:
    """Download gates from the Hugging Face hub, in the format of OUT's suffix (none: a PEFT folder).

    rlkv-gates pull hf://owner/name gates.pt
    rlkv-gates pull hf://owner/name@revision adapter/
    """

    address: Address
    """Repository of the hub, with @REVISION if wanted."""
    out: Annotated[Positional[Path], arg(metavar="OUT")]
    """File that ends with .pt, .safetensors or .tsv, or a folder (PEFT)."""
    overwrite: bool = False
    """Replace OUT if it exists."""

    def check(self) -> None:
        if not self.address.startswith("hf://"):
            raise ValueError(f"{self.address}: not on the hub: give hf://owner/name, or use rlkv-gates convert")
        check_new(self.out, self.overwrite)

    def run(self) -> None:
        loaded = HeadGates.load(self.address)
        loaded.save(self.out)
        print(f"{self.out}: {loaded!r}")
