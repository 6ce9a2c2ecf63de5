"""Train the tiny model's gates twice per seed, sampling with transformers and with vLLM, and compare the rankings.

    python rollout/compare_rollouts.py --output docs/results/tiny_vllm --steps 40 --seeds 0,1,2

Runs alternate between the engines, on one machine, each in a process of its own.  A run that is there already is not
made again, and one that was stopped goes on, so the command can be repeated.  Writes ``results.json``, ``table.md`` and
nothing else to the output folder; the runs themselves go to ``--runs``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from rlkv.cli.errors import help_text, run_app
from rlkv.utils.atomic import atomic_path

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
ROOT = Path(__file__).resolve().parents[1]
ENGINES = ("hf", "vllm")


def _train(folder: Path, engine: str, seed: int, steps: int, curriculum: Path, longest: int) -> None:
    if (folder / "summary.json").exists():
        return
    command = [sys.executable, str(ROOT / "train" / "grpo_gates.py"), "--config", str(ROOT / "configs" / "tiny.yaml")]
    command += ["--curriculum", str(curriculum), "--output_dir", str(folder), "--seed", str(seed), "--use_cpu", "true"]
    command += ["--max_steps", str(steps), "--max_completion_length", str(longest), "--image_steps", "0"]
    command += ["--rollout", engine, "--rollout_kv_gib", "0.5"]
    if subprocess.run(command).returncode:
        raise ValueError(f"the run in {folder} failed: its message is above")


@app.command(help=help_text(__doc__))
def main(
    output: Annotated[Path, typer.Option(help="folder for results.json and table.md")],
    runs: Annotated[Path, typer.Option(help="folder for the training runs")] = Path("outputs/compare_rollouts"),
    steps: Annotated[int, typer.Option(min=2, help="optimizer steps of a run")] = 40,
    seeds: Annotated[str, typer.Option(help="seeds, with commas")] = "0,1,2",
    num_problems: Annotated[int, typer.Option(min=16, help="problems to train on, drawn fresh")] = 320,
    max_definitions: Annotated[int, typer.Option(help="longest problems: so many definitions")] = 6,
) -> None:
    from rlkv.inference.engines import check_engine
    from rlkv.tiny import problems
    from rlkv.tiny.task import longest_solution
    from rlkv.training.rollout_comparison import compare, to_table
    from rlkv.utils.provenance import hardware_line, provenance

    check_engine("vllm")
    numbers = [int(part) for part in seeds.split(",")]
    runs.mkdir(parents=True, exist_ok=True)
    curriculum = runs / f"problems-{num_problems}-{max_definitions}.jsonl"
    lines = [json.dumps(p) + "\n" for p in problems(num_problems, 0, max_definitions=max_definitions)]
    with atomic_path(curriculum) as partial:
        partial.write_text("".join(lines))
    rows = {}
    for seed in numbers:
        folders = [runs / f"{engine}-{seed}-{steps}-{max_definitions}" for engine in ENGINES]
        for engine, folder in zip(ENGINES, folders, strict=True):
            _train(folder, engine, seed, steps, curriculum, longest_solution(max_definitions) + 20)
        rows[seed] = compare(folders[0], folders[1])
        print(f"seed {seed}: {json.dumps(rows[seed])}", flush=True)
    output.mkdir(parents=True, exist_ok=True)
    with atomic_path(output / "results.json") as partial:
        content = {
            "engines": ENGINES,
            "seeds": rows,
            "steps": steps,
            "max_definitions": max_definitions,
            **provenance(),
        }
        partial.write_text(json.dumps(content, indent=2) + "\n")
    with atomic_path(output / "table.md") as partial:
        partial.write_text(to_table(rows, ENGINES, hardware_line() + "."))
    print((output / "table.md").read_text())


if __name__ == "__main__":
    run_app(app)
