r"""The whole pipeline on a built-in model, on a CPU: filter, find gates, export, compare, plot.

    make demo            # the tiny model, gates by GRPO; or: python inference/demo.py
    make smol            # the language model, gates by distillation; or: python inference/demo.py --model smol
    make demo FRESH=1    # drop the results of an earlier run
    make demo QUICK=1    # every stage at a tenth of the size, into results/demo_quick

Each stage is one of the project's own programs, printed as it starts, with its output in ``results/demo/logs/``.  A
stage that has ended does not run again unless something that it needs is newer; one that was stopped resumes.  Other
settings, configs or another version than the folder's are refused.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from rlkv.cli.errors import run_app
from rlkv.cli.options import parse
from rlkv.utils.stages import Stage, StagesConfig, below, run_stages, words

ROOT = Path(__file__).resolve().parents[1]


class DemoConfig(StagesConfig):
    """Filter, find gates, compare."""


@dataclass(frozen=True)
class Size:
    """How much of everything; ``training`` is the program that finds gates, with its options."""

    filtered: int
    training: str
    chains: str
    held_out: int
    method: str
    sparsities: str
    random_draws: int


def size_of(model: str, quick: bool) -> Size:
    """The demo of a built-in model."""
    if model == "tiny":
        grpo = f"train/grpo_gates.py --config configs/tiny.yaml --max_steps {4 if quick else 100}"
        if quick:
            return Size(60, grpo, "3-12", 20, "RLKV", "0.5", 2)
        return Size(400, grpo, "3-12", 100, "RLKV", "0.2 0.4 0.5 0.6 0.8", 5)
    distil = f"train/distill_gates.py --config configs/distill_smol_traces.yaml --steps {4 if quick else 40}"
    if quick:
        return Size(24, distil, "4-10", 10, "traces", "0.5", 1)
    return Size(160, distil, "4-10", 100, "traces", "0.5 0.7", 2)


def plan(folder: Path, model: str, quick: bool) -> list[Stage]:
    """The stages of the demo; ``quick`` shrinks every one of them."""
    size = size_of(model, quick)
    report, problems = folder / "curriculum" / "report.md", folder / "problems.jsonl"
    gates, page = folder / "training" / "gates.pt", folder / "study" / "report.html"
    oracle = "--oracle rlkv/tiny/model/ground_truth.json" if model == "tiny" else ""
    commands = {
        "filter": f"""data_prep/filter_deepscaler.py --config configs/filter_{model}.yaml
            --num-problems {size.filtered} --output-dir {{folder}}/curriculum""",
        "held-out problems": f"""data_prep/draw_problems.py --model {model} --num-problems {size.held_out}
            --steps {size.chains} --seed 2000003 --overwrite --output {{folder}}/problems.jsonl""",
        "find gates": f"""{size.training} --curriculum {{folder}}/curriculum/curriculum.parquet
            --output_dir {{folder}}/training""",
        "compare heads": f"""inference/study.py --config configs/study_{model}.yaml
            --gates {size.method}={{folder}}/training/gates.pt --data {{folder}}/problems.jsonl {oracle}
            --random-draws {size.random_draws} --analyses sweep gates --sparsities {size.sparsities}
            --output-dir {{folder}}/study""",
    }
    files = [(report, ()), (problems, ()), (gates, (report,)), (page, (gates, problems))]
    return [
        Stage(name, words(command, folder=folder), done, needs)
        for (name, command), (done, needs) in zip(commands.items(), files, strict=True)
    ]


def collect(folder: Path, model: str) -> None:
    """Bring what a reader looks for to the top of the results folder."""
    shutil.copy2(folder / "study" / f"sweep-{model}.png", folder / "accuracy.png")
    for source in ("results.json", "table.md"):
        shutil.copy2(folder / "study" / source, folder / source)
    for source in ("gates.pt", "gates.safetensors", "heat_map.png", "training_curves.png"):
        shutil.copy2(folder / "training" / source, folder / source)


def main() -> None:
    config = parse(DemoConfig, __doc__)
    started = time.monotonic()
    shown = config.folder(tiny="demo", smol="smol")
    folder = shown.resolve()
    run_stages(plan(below(ROOT, folder), config.model, config.quick), ROOT, folder, fresh=config.fresh)
    collect(folder, config.model)
    print((folder / "table.md").read_text(encoding="utf-8"))
    print(f"{time.monotonic() - started:.0f} s; everything is in {shown}/")
    print(f"next: rlkv-infer --gates {shown}/gates.pt --sparsity 0.5")


if __name__ == "__main__":
    run_app(main)
