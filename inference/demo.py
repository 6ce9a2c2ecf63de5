r"""The whole pipeline on the built-in tiny model, on a CPU: filter, train, export, compare, draw.

    make demo            # or: python inference/demo.py
    make demo FRESH=1    # drop the results of an earlier run
    make demo QUICK=1    # every stage at a tenth of the size, into results/demo_quick

Each stage is one of the project's own commands, printed as it starts, with its output in
``results/demo/logs/``.  A stage that has ended is not run again, if what it needs is older; one that was stopped
goes on where it was.  Other settings, configs or another version than the folder's are refused.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rlkv.cli.errors import help_text, run_app
from rlkv.utils.pipeline import Pipeline, Stage, count_lines, results_folder, words

app = typer.Typer(add_completion=False, rich_markup_mode=None)
PROGRAMS = Path(__file__).resolve().parents[1]


def plan(folder: Path, quick: bool) -> list[Stage]:
    """The stages of the demo; ``quick`` shrinks every one of them."""
    num_problems, steps, held_out, draws = (60, 4, 20, 2) if quick else (400, 100, 100, 5)
    sparsities = "0.5" if quick else "0.2,0.4,0.5,0.6,0.8"
    cells = 1 + len(sparsities.split(",")) * (draws + 2)
    curriculum, training, sweep = folder / "curriculum", folder / "training", folder / "sweep"
    filtered, gates = curriculum / "report.md", training / "gates.pt"
    filter_command = words(
        """data_prep/filter_deepscaler.py --config configs/filter_tiny.yaml --num-problems {problems}
            --output-dir {out}""",
        problems=num_problems,
        out=curriculum,
    )
    train_command = words(
        """train/grpo_gates.py --config configs/tiny.yaml --curriculum {curriculum}/curriculum.parquet
            --max_steps {steps} --output_dir {out}""",
        curriculum=curriculum,
        steps=steps,
        out=training,
    )
    sweep_command = words(
        """inference/sweep_heads.py --gates RLKV={gates} --oracle rlkv/tiny/model/ground_truth.json
            --random-draws {draws} --sparsities {sparsities} --num-problems {n} --definitions 3-12
            --max-new-tokens 208 --batch-size 100 --output-dir {out}""",
        gates=gates,
        draws=draws,
        sparsities=sparsities,
        n=held_out,
        out=sweep,
    )
    return [
        Stage(
            "filter",
            filter_command,
            filtered,
            lambda: count_lines(PROGRAMS / curriculum, "**/shard*.jsonl") / num_problems,
            40,
        ),
        Stage(
            "train gates",
            train_command,
            gates,
            lambda: count_lines(PROGRAMS / training, "log.jsonl") / steps,
            240,
            (filtered,),
        ),
        Stage(
            "compare heads",
            sweep_command,
            sweep / "problems.jsonl",
            lambda: count_lines(PROGRAMS / sweep, "rows.jsonl") / (cells + 1),
            150,
            (gates,),
        ),
    ]


def collect(folder: Path) -> None:
    """Bring what a reader looks for to the top of the results folder."""
    for source in ("results.json", "table.md", "accuracy.png", "problems.jsonl"):
        shutil.copy2(folder / "sweep" / source, folder / source)
    for source in ("gates.pt", "gates.safetensors", "heat_map.png", "training_curves.png"):
        shutil.copy2(folder / "training" / source, folder / source)


@app.command(help=help_text(__doc__))
def main(
    output_dir: Annotated[Path, typer.Option(help="where everything goes")] = Path("results/demo"),
    fresh: Annotated[bool, typer.Option(help="drop the results of an earlier run")] = False,
    quick: Annotated[bool, typer.Option(help="every stage at a tenth of the size")] = False,
) -> None:
    console = Console()
    started = time.monotonic()
    folder = output_dir.resolve()
    # relative names where it can be: commands are written into result files
    named = folder.relative_to(PROGRAMS) if folder.is_relative_to(PROGRAMS) else folder
    with results_folder(output_dir, "demo", {"quick": quick}, fresh):
        Pipeline(plan(named, quick), PROGRAMS, folder, console).run()
        collect(folder)
    console.print((folder / "table.md").read_text(), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{time.monotonic() - started:.0f} s; everything is in {output_dir}/", highlight=False)
    console.print(f"next: rlkv-infer --gates {output_dir}/gates.pt --sparsity 0.5", highlight=False)


if __name__ == "__main__":
    run_app(app)
