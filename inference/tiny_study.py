r"""All analyses on the built-in tiny model, on a CPU: find heads in every way, with several seeds, then compare them.

    make study            # or: python inference/tiny_study.py
    make study FRESH=1    # drop the results of an earlier run
    make study QUICK=1    # every stage at a tenth of the size, into results/study_quick

RLKV is configs/tiny.yaml with fewer steps; beside it the ablations of its paper (arXiv 2510.08525, figure 8: without
adaptive weighting, without self-distilled data, the penalty times 0.2 and 5; no other setting is tuned for them),
RLKV's heads re-ranked, distillation on the model's own solutions and on DuoAttention's recall task.
``inference/study.py`` then measures all of them on problems that none has seen, and writes the report.

Every stage is one of the project's own commands, printed as it starts, with its output in ``results/study/logs/``.
Stages that find heads run ``--jobs`` at a time, on one thread each, so that their CPU seconds can be compared.  A stage
that has ended is not run again, if what it needs is older; one that was stopped goes on where it was.  Other settings,
configs or another version than the folder's are refused.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from rlkv.cli.errors import help_text, run_app
from rlkv.evaluation.study.report import MEASURED
from rlkv.gates.head_gates import HeadGates
from rlkv.utils.pipeline import Pipeline, Stage, count_lines, results_folder, words

app = typer.Typer(add_completion=False, rich_markup_mode=None)
PROGRAMS = Path(__file__).resolve().parents[1]
FILTER, GRPO = "configs/filter_tiny.yaml", "configs/tiny.yaml"
DISTILLED = {"traces": "configs/distill_tiny_traces.yaml", "DuoAttention": "configs/distill_tiny.yaml"}
START_SECONDS = 12  # of a training program


@dataclass(frozen=True)
class Size:
    """How much of everything.

    Attributes:
        seeds: per method; variant_seeds: per ablation.
        cells: about as many decodings of all held-out problems are left when seeds that agree share theirs; for the
            estimate of the time left only.
    """

    filtered: int = 400
    grpo_steps: int = 40
    distill_steps: int = 120
    seeds: int = 3
    variant_seeds: int = 2
    traces: int = 100
    held_out: int = 200
    random_draws: int = 5
    sparsities: str = "0.2,0.4,0.5,0.6,0.8"
    cells: int = 145


QUICK = Size(60, 5, 12, 2, 1, 10, 20, 2, "0.4,0.6", 75)


@dataclass(frozen=True)
class Run:
    """Heads found by one method with one seed: a row of the study."""

    method: str
    seed: int
    folder: Path
    is_ablation: bool = False

    @property
    def title(self) -> str:
        return f"{self.method}, seed {self.seed}"

    @property
    def gates(self) -> Path:
        return self.folder / "gates.pt"


class Plan:
    """The stages of a study below ``folder``, which is relative to the repository where it lies in it."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder, self.size = folder, size
        self.curriculum = folder / "curriculum" / "curriculum.parquet"
        self.raw = folder / "unfiltered.jsonl"
        self.problems = folder / "problems.jsonl"
        self.report = folder / "report"
        self.runs: list[Run] = []
        self.stages = [
            *self._data(),
            *self._distilled("DuoAttention", 0.5),
            *self._rlkv(),
            *self._ablations(),
            *self._distilled("traces", 0.7),
            *self._reranked(),
        ]
        self.stages += self._study()

    def _data(self) -> list[Stage]:
        folder, size = self.folder / "curriculum", self.size
        filtered = words(
            "data_prep/filter_deepscaler.py --config {config} --num-problems {n} --output-dir {out}",
            config=FILTER,
            n=size.filtered,
            out=folder,
        )
        raw = words(
            """data_prep/draw_problems.py --config {config} --num-problems {n} --as-many-as {curriculum}
                --output {out}""",
            config=FILTER,
            n=size.filtered,
            curriculum=self.curriculum,
            out=self.raw,
        )
        held_out = words(
            "data_prep/draw_problems.py --num-problems {n} --definitions 3-12 --seed 2000003 --output {out}",
            n=size.held_out,
            out=self.problems,
        )
        done = folder / "report.md"
        progress = partial(self._share, folder, "**/shard*.jsonl", size.filtered)
        return [
            Stage("filter", filtered, done, progress, 50, threads=1),
            Stage("held-out problems", held_out, self.problems, lambda: 0.0, 2, threads=1),
            Stage("unfiltered problems", raw, self.raw, lambda: 0.0, 2, (done,), threads=1),
        ]

    def _rlkv(self) -> list[Stage]:
        return [self._grpo(run, [], self.curriculum, 3.2) for run in self._add("RLKV", self.size.seeds)]

    def _ablations(self) -> list[Stage]:
        beta = yaml.safe_load((PROGRAMS / GRPO).read_text())["l1_beta"]
        variants = {
            "no self-distilled data": ([], self.raw, 5.7),
            "no adaptive weight": (["--adaptive", "false"], self.curriculum, 3.2),
            "beta x 0.2": (["--l1_beta", f"{0.2 * beta:g}"], self.curriculum, 3.2),
            "beta x 5": (["--l1_beta", f"{5 * beta:g}"], self.curriculum, 3.2),
        }
        return [
            self._grpo(run, options, problems, seconds)
            for method, (options, problems, seconds) in variants.items()
            for run in self._add(method, self.size.variant_seeds, is_ablation=True)
        ]

    def _grpo(self, run: Run, options: list[str], problems: Path, step_seconds: float) -> Stage:
        steps = self.size.grpo_steps
        command = words(
            """train/grpo_gates.py --config {config} --curriculum {problems} --max_steps {steps} --seed {seed}
                --save_steps 10 --output_dir {out}""",
            config=GRPO,
            problems=problems,
            steps=steps,
            seed=run.seed,
            out=run.folder,
        )
        needs = (self.folder / "curriculum" / "report.md", *([self.raw] if problems == self.raw else []))
        expected = START_SECONDS + steps * step_seconds
        progress = partial(self._share, run.folder, "log.jsonl", steps)
        return Stage(run.title, command + options, run.gates, progress, expected, needs, threads=1)

    def _distilled(self, method: str, step_seconds: float) -> list[Stage]:
        steps, stages = self.size.distill_steps, []
        for run in self._add(method, self.size.seeds):
            command = words(
                "train/distill_gates.py --config {config} --steps {steps} --seed {seed} --output_dir {out}",
                config=DISTILLED[method],
                steps=steps,
                seed=run.seed,
                out=run.folder,
            )
            needs: tuple[Path, ...] = ()
            if method == "traces":
                command += ["--curriculum", str(self.curriculum)]
                needs = (self.folder / "curriculum" / "report.md",)
            progress = partial(self._share, run.folder, "log.jsonl", steps)
            expected = START_SECONDS + steps * step_seconds
            stages.append(Stage(run.title, command, run.gates, progress, expected, needs, threads=1))
        return stages

    def _reranked(self) -> list[Stage]:
        stages = []
        for run in [run for run in self.runs if run.method == "RLKV"]:
            output = run.folder / "reranked.pt"
            command = words(
                """inference/rerank_heads.py --gates {gates} --output {output} --curriculum {curriculum}
                    --num-traces {n} --seed {seed}""",
                gates=run.gates,
                output=output,
                curriculum=self.curriculum,
                n=self.size.traces,
                seed=run.seed,
            )
            title = f"RLKV re-ranked, seed {run.seed}"
            stages.append(Stage(title, command, output, lambda: 0.0, 45, (run.gates,), threads=1))
        return stages

    def _study(self) -> list[Stage]:
        size = self.size
        command = words(
            """inference/study.py --model tiny --tasks tiny --data {problems} --oracle rlkv/tiny/model/ground_truth.json
                --random-draws {draws} --sparsities {sparsities} --sink 4 --window 16 --repetition 40,8
                --max-new-tokens 208 --batch-size 100 --output-dir {out}""",
            problems=self.problems,
            draws=size.random_draws,
            sparsities=size.sparsities,
            out=self.report,
        )
        rlkv = [run for run in self.runs if run.method == "RLKV"]
        others = [run for run in self.runs if run.method in DISTILLED]
        for name, file in [
            *[("RLKV", run.gates) for run in rlkv],
            *[("RLKV re-ranked", run.folder / "reranked.pt") for run in rlkv],
            *[(run.method, run.gates) for run in sorted(others, key=lambda run: run.method, reverse=True)],
        ]:
            command += ["--gates", f"{name}={file}"]
        for run in [run for run in self.runs if run.is_ablation]:
            command += ["--ablation", f"{run.method}={run.gates}"]
        needs = (self.problems, *(stage.done for stage in self.stages))
        expected = 0.03 * size.cells * size.held_out

        def progress() -> float:  # counts files: reading all texts again and again costs half a core
            return len(list((PROGRAMS / self.report / "rows").glob("*.jsonl"))) / size.cells

        # two processes of the same study share its cells; with one job the first measures all of them
        measured = Stage(
            "cells", [*command, "--measure-only"], self.report / MEASURED, progress, expected / 2, needs, threads=1
        )
        report = Stage(
            "analyses and report", command, self.report / "report.html", progress, expected / 2, needs, threads=1
        )
        return [measured, report]

    def _add(self, method: str, seeds: int, is_ablation: bool = False) -> list[Run]:
        short = method.lower().replace(" ", "_")
        added = [Run(method, seed, self.folder / "runs" / f"{short}_{seed}", is_ablation) for seed in range(seeds)]
        self.runs += added
        return added

    @staticmethod
    def _share(folder: Path, pattern: str, total: int) -> float:
        return count_lines(PROGRAMS / folder, pattern) / total


def collect(plan: Plan) -> None:
    """Bring what a reader looks for to the top of the folder: the report, its pictures, every gates file."""
    folder, report = PROGRAMS / plan.folder, PROGRAMS / plan.report
    for pattern in ("report.*", "results.json", "*.png"):
        for source in report.glob(pattern):
            shutil.copy2(source, folder / source.name)
    for run in plan.runs:
        for source in (PROGRAMS / run.folder).glob("*.pt"):
            name = run.folder.name if source.stem == "gates" else f"{run.folder.name}_{source.stem}"
            target = folder / "gates" / f"{name}.safetensors"
            target.parent.mkdir(exist_ok=True)
            HeadGates.load(source).save(target)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@app.command(help=help_text(__doc__))
def main(
    output_dir: Annotated[Path, typer.Option(help="where everything goes")] = Path("results/study"),
    fresh: Annotated[bool, typer.Option(help="drop the results of an earlier run")] = False,
    quick: Annotated[bool, typer.Option(help="every stage at a tenth of the size")] = False,
    jobs: Annotated[int, typer.Option(help="trainings at once; 0: one a core, at most 4", min=0)] = 0,
) -> None:
    console = Console()
    started = time.monotonic()
    size = QUICK if quick else Size()
    folder = output_dir.resolve()
    # relative names where it can be: commands are written into result files
    plan = Plan(folder.relative_to(PROGRAMS) if folder.is_relative_to(PROGRAMS) else folder, size)
    kept = {name: value for name, value in asdict(size).items() if name != "cells"}  # an estimate binds no results
    with results_folder(output_dir, "study", kept, fresh):
        Pipeline(plan.stages, PROGRAMS, folder, console, jobs or min(4, usable_cores())).run()
        collect(plan)
    for lines in json.loads((folder / "results.json").read_text())["findings"].values():
        for line in lines:
            console.print(f"- {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{time.monotonic() - started:.0f} s; everything is in {output_dir}/", highlight=False)
    console.print(f"next: open {output_dir}/report.html", highlight=False)


if __name__ == "__main__":
    run_app(app)
