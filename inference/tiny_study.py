r"""All analyses on the built-in tiny model, on a CPU: find heads in every way, with several seeds, then compare them.

    make study            # or: python inference/tiny_study.py
    make study FRESH=1    # drop the results of an earlier run
    make study QUICK=1    # every stage at a tenth of the size, into results/study_quick

RLKV is configs/tiny.yaml with fewer steps; next to it the ablations of its paper (arXiv 2510.08525, figure 8: without
adaptive weighting, without self-distilled data, the penalty times 0.2 and 5; no other setting is tuned for them),
RLKV's heads re-ranked, distillation on the model's own solutions and on DuoAttention's recall task.
``inference/study.py`` then measures all of them on held-out problems, and writes the report.

Every stage is one of the project's own programs, printed as it starts, with its output in ``results/study/logs/``.
Stages run ``--jobs`` at a time, on one thread each, so that their CPU seconds can be compared.  A stage that has ended
does not run again unless something that it needs is newer; one that was stopped resumes.  Other settings, configs or
another version than the folder's are refused.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from rlkv.cli.errors import run_app
from rlkv.cli.options import parse
from rlkv.utils.stages import Stage, below, run_stages

ROOT = Path(__file__).resolve().parents[1]
FILTER, GRPO = "configs/filter_tiny.yaml", "configs/tiny.yaml"
DISTILLED = {"traces": "configs/distill_tiny_traces.yaml", "DuoAttention": "configs/distill_tiny.yaml"}


@dataclass(frozen=True, kw_only=True)
class TinyStudyConfig:
    """Find heads in every way, then compare them."""

    output_dir: Path = Path("results/study")
    """where everything goes"""
    fresh: bool = False
    """drop the results of an earlier run"""
    quick: bool = False
    """every stage at a tenth of the size"""
    jobs: int = 0
    """stages at once; 0: one a core, at most 4"""


@dataclass(frozen=True)
class Size:
    """How much of everything; ``seeds`` per method, ``variant_seeds`` per ablation."""

    filtered: int = 400
    grpo_steps: int = 40
    distill_steps: int = 120
    seeds: int = 3
    variant_seeds: int = 2
    traces: int = 100
    held_out: int = 200
    random_draws: int = 5
    sparsities: tuple[str, ...] = ("0.2", "0.4", "0.5", "0.6", "0.8")


QUICK = Size(60, 5, 12, 2, 1, 10, 20, 2, ("0.4", "0.6"))


class Plan:
    """The stages of a study below ``folder``, which is relative to the repository where it lies in it.

    ``gates`` and ``ablations`` have the gates files by method, a file per seed.
    """

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder, self.size, self.report = folder, size, folder / "report"
        self.curriculum, self.filtered = folder / "curriculum" / "curriculum.parquet", folder / "curriculum/report.md"
        self.raw, self.problems = folder / "unfiltered.jsonl", folder / "problems.jsonl"
        self.gates: dict[str, list[Path]] = {}
        self.ablations: dict[str, list[Path]] = {}
        duo = self._distilled("DuoAttention", [])
        rlkv = self._grpo("RLKV", size.seeds, self.gates)
        beta = yaml.safe_load((ROOT / GRPO).read_text())["l1_beta"]
        variants: dict[str, list[str]] = {
            "no self-distilled data": ["--curriculum", str(self.raw)],
            "no adaptive weight": ["--adaptive", "false"],
            "beta x 0.2": ["--l1_beta", f"{0.2 * beta:g}"],
            "beta x 5": ["--l1_beta", f"{5 * beta:g}"],
        }
        trained = [self._grpo(name, size.variant_seeds, self.ablations, of) for name, of in variants.items()]
        traces = self._distilled("traces", ["--curriculum", str(self.curriculum)], (self.filtered,))
        found = [*duo, *rlkv, *(stage for stages in trained for stage in stages), *traces, *self._reranked()]
        self.stages = [*self._data(), *found]
        self.stages += self._study(tuple(stage.done for stage in self.stages))

    def _run(self, method: str, seed: int) -> Path:
        return self.folder / "runs" / f"{method.lower().replace(' ', '_')}_{seed}"

    def _data(self) -> list[Stage]:
        draw, n = ["data_prep/draw_problems.py", "--num-problems"], str(self.size.filtered)
        kept = ["data_prep/filter_deepscaler.py", "--config", FILTER, "--num-problems", n]
        kept += ["--output-dir", str(self.filtered.parent)]
        raw = [*draw, n, "--config", FILTER, "--as-many-as", str(self.curriculum), "--output", str(self.raw)]
        held_out = [*draw, str(self.size.held_out), "--definitions", "3-12", "--seed", "2000003"]
        return [
            Stage("filter", kept, self.filtered),
            Stage("held-out problems", [*held_out, "--output", str(self.problems)], self.problems),
            Stage("unfiltered problems", raw, self.raw, (self.filtered,)),
        ]

    def _grpo(self, method: str, seeds: int, files: dict[str, list[Path]], more: Sequence[str] = ()) -> list[Stage]:
        options = more if "--curriculum" in more else ["--curriculum", str(self.curriculum), *more]
        needs = (self.filtered, self.raw) if str(self.raw) in options else (self.filtered,)
        command = ["train/grpo_gates.py", "--config", GRPO, "--max_steps", str(self.size.grpo_steps)]
        return self._seeds(method, seeds, files, [*command, "--save_steps", "10", *options], needs)

    def _distilled(self, method: str, more: list[str], needs: tuple[Path, ...] = ()) -> list[Stage]:
        command = ["train/distill_gates.py", "--config", DISTILLED[method], "--steps", str(self.size.distill_steps)]
        return self._seeds(method, self.size.seeds, self.gates, [*command, *more], needs)

    def _seeds(
        self, method: str, seeds: int, files: dict[str, list[Path]], command: list[str], needs: tuple[Path, ...]
    ) -> list[Stage]:
        """A training per seed, whose gates files are added to ``files``."""
        files[method] = [self._run(method, seed) / "gates.pt" for seed in range(seeds)]
        return [
            Stage(
                f"{method}, seed {seed}", [*command, "--seed", str(seed), "--output_dir", str(file.parent)], file, needs
            )
            for seed, file in enumerate(files[method])
        ]

    def _reranked(self) -> list[Stage]:
        stages = []
        for seed, gates in enumerate(self.gates["RLKV"]):
            command = ["inference/rerank_heads.py", "--curriculum", str(self.curriculum), "--gates", str(gates)]
            command += ["--num-traces", str(self.size.traces), "--seed", str(seed)]
            done = gates.with_name("reranked.pt")
            stages.append(Stage(f"RLKV re-ranked, seed {seed}", [*command, "--output", str(done)], done, (gates,)))
        self.gates["RLKV re-ranked"] = [stage.done for stage in stages]
        return stages

    def _study(self, needs: tuple[Path, ...]) -> list[Stage]:
        size, order = self.size, ("RLKV", "RLKV re-ranked", "traces", "DuoAttention")
        command = ["inference/study.py", "--model", "tiny", "--tasks", "tiny", "--data", str(self.problems)]
        command += ["--oracle", "rlkv/tiny/model/ground_truth.json", "--random-draws", str(size.random_draws)]
        command += ["--sparsities", *size.sparsities, "--sink", "4", "--window", "16", "--repetition", "40", "8"]
        command += ["--max-new-tokens", "208", "--batch-size", "100", "--output-dir", str(self.report)]
        command += ["--gates", *(f"{name}={file}" for name in order for file in self.gates[name])]
        command += ["--ablation", *(f"{name}={file}" for name, files in self.ablations.items() for file in files)]
        # two processes of the same study share its conditions; with one job the first measures all of them
        return [
            Stage("conditions", [*command, "--measure-only"], self.report / "measured.json", needs),
            Stage("analyses and report", command, self.report / "report.html", needs),
        ]


def collect(plan: Plan) -> None:
    """Bring what a reader looks for to the top of the folder: the report, its plots, every gates file."""
    from rlkv.gates.head_gates import HeadGates

    folder, report = ROOT / plan.folder, ROOT / plan.report
    for pattern in ("report.*", "table.md", "results.json", "*.png"):
        for source in report.glob(pattern):
            shutil.copy2(source, folder / source.name)
    (folder / "gates").mkdir(exist_ok=True)
    for file in [file for files in (*plan.gates.values(), *plan.ablations.values()) for file in files]:
        name = file.parent.name if file.stem == "gates" else f"{file.parent.name}_{file.stem}"
        HeadGates.load(ROOT / file).save(folder / "gates" / f"{name}.safetensors")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    config = parse(TinyStudyConfig, __doc__)
    started = time.monotonic()
    folder = config.output_dir.resolve()
    plan = Plan(below(ROOT, folder), QUICK if config.quick else Size())
    run_stages(plan.stages, ROOT, folder, config.jobs or min(4, usable_cores()), threads=1, fresh=config.fresh)
    collect(plan)
    for lines in json.loads((folder / "results.json").read_text())["findings"].values():
        print("\n".join(f"- {line}" for line in lines))
    print(f"{time.monotonic() - started:.0f} s; everything is in {config.output_dir}/")
    print(f"next: open {config.output_dir}/report.html")


if __name__ == "__main__":
    run_app(main)
