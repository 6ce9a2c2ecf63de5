r"""The whole pipeline on the built-in tiny model, on a CPU: filter, train gates, export, compare, plot.

    make demo            # or: python inference/demo.py
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
from rlkv.utils.stages import Stage, below, run_stages, words

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Filter, train, compare."""

    output_dir: Path = Path("results/demo")
    """where everything goes"""
    fresh: bool = False
    """drop the results of an earlier run"""
    quick: bool = False
    """every stage at a tenth of the size"""


def plan(folder: Path, quick: bool) -> list[Stage]:
    """The stages of the demo; ``quick`` shrinks every one of them."""
    num_problems, steps, held_out, draws = (60, 4, 20, 2) if quick else (400, 100, 100, 5)
    sparsities = "0.5" if quick else "0.2 0.4 0.5 0.6 0.8"
    report, problems = folder / "curriculum" / "report.md", folder / "problems.jsonl"
    gates, page = folder / "training" / "gates.pt", folder / "study" / "report.html"
    commands = {
        "filter": f"""data_prep/filter_deepscaler.py --config configs/filter_tiny.yaml
            --num-problems {num_problems} --output-dir {{folder}}/curriculum""",
        "held-out problems": f"""data_prep/draw_problems.py --num-problems {held_out} --steps 3-12
            --seed 2000003 --output {{folder}}/problems.jsonl""",
        "train gates": f"""train/grpo_gates.py --config configs/tiny.yaml --max_steps {steps}
            --curriculum {{folder}}/curriculum/curriculum.parquet --output_dir {{folder}}/training""",
        "compare heads": f"""inference/study.py --gates RLKV={{folder}}/training/gates.pt
            --data {{folder}}/problems.jsonl --oracle rlkv/tiny/model/ground_truth.json --random-draws {draws}
            --analyses sweep gates --sparsities {sparsities} --max-new-tokens 208 --batch-size 100
            --output-dir {{folder}}/study""",
    }
    files = [(report, ()), (problems, ()), (gates, (report,)), (page, (gates, problems))]
    return [
        Stage(name, words(command, folder=folder), done, needs)
        for (name, command), (done, needs) in zip(commands.items(), files, strict=True)
    ]


def collect(folder: Path) -> None:
    """Bring what a reader looks for to the top of the results folder."""
    shutil.copy2(folder / "study" / "sweep-tiny.png", folder / "accuracy.png")
    for source in ("results.json", "table.md"):
        shutil.copy2(folder / "study" / source, folder / source)
    for source in ("gates.pt", "gates.safetensors", "heat_map.png", "training_curves.png"):
        shutil.copy2(folder / "training" / source, folder / source)


def main() -> None:
    config = parse(DemoConfig, __doc__)
    started = time.monotonic()
    folder = config.output_dir.resolve()
    run_stages(plan(below(ROOT, folder), config.quick), ROOT, folder, fresh=config.fresh)
    collect(folder)
    print((folder / "table.md").read_text())
    print(f"{time.monotonic() - started:.0f} s; everything is in {config.output_dir}/")
    print(f"next: rlkv-infer --gates {config.output_dir}/gates.pt --sparsity 0.5")


if __name__ == "__main__":
    run_app(main)
