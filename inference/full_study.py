r"""All analyses on a built-in model, on a CPU: find heads in every way, with several seeds, then compare them.

    make study            # the tiny model; or: python inference/full_study.py
    make study FRESH=1    # drop the results of an earlier run
    make study QUICK=1    # every stage at a tenth of the size, into results/study_quick
    python inference/full_study.py --model smol    # the language model: many hours on two cores

RLKV is configs/tiny.yaml (or smol.yaml) with fewer steps; next to it elimination with and without a distillation
before, distillation on the model's own solutions and on DuoAttention's recall task, and the heads of RLKV and of the
solutions re-ranked.  The tiny model has also the ablations of RLKV's paper (arXiv 2510.08525, figure 8: without
adaptive weighting, without self-distilled data, the penalty times 0.2 and 5; no other setting is tuned for them).
Other sinks and windows are ``rlkv-study window``'s.  ``inference/study.py`` then measures all of them on held-out
problems, and writes the report.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rlkv.cli.errors import run_app
from rlkv.cli.options import parse
from rlkv.utils.stages import Stage, StagesConfig, below, run_stages, words

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class FullStudyConfig(StagesConfig):
    """Find heads in every way, then compare them."""

    jobs: int = 0
    """stages at once; 0: one a core, at most 4"""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much of everything: seeds per method, of a distillation alone ``distill_seeds``, ``variant_seeds`` per
    ablation, solutions of elimination (``traces``), and of the one after a distillation (``few_traces``) of
    ``first_steps``, up to the sparsity ``eliminated``.

    ``sparsities``: of the sweep; a study that is stopped has measured the first of them.  ``grpo``: further options of
    RLKV's runs.
    """

    model: str = "tiny"
    dtype: str = "float32"
    filtered: int = 400
    chains: str = "3-12"
    grpo_steps: int = 40
    grpo: str = "--save_steps 10"
    distill_steps: int = 120
    distill_seeds: int = 3
    seeds: int = 3
    variant_seeds: int = 2
    traces: int = 32
    few_traces: int = 32
    first_steps: int = 40
    eliminated: float = 0.8
    held_out: int = 200
    random_draws: int = 10
    sparsities: str = "0.2 0.4 0.5 0.6 0.8"
    study: str = "--oracle rlkv/tiny/model/ground_truth.json"


TINY = Size()
SMOL = Size(
    model="smol",
    dtype="fast",  # as in its configs
    filtered=240,
    chains="4-10",
    grpo="--save_steps 2",
    distill_steps=40,
    seeds=2,
    variant_seeds=0,
    traces=8,
    few_traces=16,
    eliminated=0.7,
    sparsities="0.5 0.6 0.4 0.7 0.2 0.8 0.3",
    study="",
)
_TENTH: Any = {
    "grpo_steps": 5,
    "seeds": 2,
    "distill_seeds": 2,
    "traces": 10,
    "few_traces": 8,
    "first_steps": 8,
    "held_out": 20,
    "random_draws": 2,
}
QUICK = {
    "tiny": replace(TINY, filtered=60, distill_steps=12, variant_seeds=1, sparsities="0.4 0.6", **_TENTH),
    "smol": replace(
        SMOL, filtered=24, distill_steps=4, sparsities="0.4 0.6", **{**_TENTH, "traces": 2, "few_traces": 2}
    ),
}


DISTILLED = ("traces", "DuoAttention")
RERANKED = ("RLKV", "traces")
# the first is compared with the others
METHODS = (
    "RLKV",
    "RLKV re-ranked",
    "elimination",
    "distilled elimination",
    "traces",
    "traces re-ranked",
    "DuoAttention",
)


class Plan:
    """The stages of a study below ``folder``, which is relative to the repository where it lies in it.

    ``gates`` and ``ablations`` have the gates files by method, a file per seed.
    """

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder, self.size, self.report = folder, size, folder / "report"
        self.filtered, self.raw = folder / "curriculum" / "report.md", folder / "unfiltered.jsonl"
        self.curriculum, self.problems = self.filtered.with_name("curriculum.parquet"), folder / "problems.jsonl"
        self.gates: dict[str, list[Path]] = {}
        self.ablations: dict[str, list[Path]] = {}
        self.stages = self._data()
        distil = f"train/distill_gates.py --steps {size.distill_steps} --config configs/distill_{size.model}"
        config = f"configs/{size.model}.yaml"
        self._train("traces", f"{distil}_traces.yaml --curriculum {{curriculum}}", (self.filtered,))
        finder = f"train/grpo_gates.py --config {config} --finder elimination --curriculum {{curriculum}}"
        measured = f"--elimination_distillation 0 --elimination_sparsity 0.8 --elimination_traces {size.traces}"
        self._train("elimination", f"{finder} {measured}", (self.filtered,))
        steps = f"--elimination_distillation {size.first_steps} --elimination_sparsity {size.eliminated}"
        start = f"{finder} {steps} --elimination_traces {size.few_traces}"
        self._train("distilled elimination", start, (self.filtered,))
        self._train("DuoAttention", f"{distil}.yaml")
        grpo = f"train/grpo_gates.py --config {config} --max_steps {size.grpo_steps} {size.grpo} --curriculum "
        self._train("RLKV", f"{grpo}{{curriculum}}", (self.filtered,))
        beta = yaml.safe_load((ROOT / config).read_text())["l1_beta"]
        for name, options in {
            "no self-distilled data": "{raw}",
            "no adaptive weight": "{curriculum} --adaptive false",
            "beta x 0.2": f"{{curriculum}} --l1_beta {0.2 * beta:g}",
            "beta x 5": f"{{curriculum}} --l1_beta {5 * beta:g}",
        }.items():
            needs = (self.filtered, self.raw) if options == "{raw}" else (self.filtered,)
            self._train(name, grpo + options, needs, is_ablation=True)
        for method in RERANKED:
            self._rerank(method)
        self._study()

    def _words(self, template: str, **values: object) -> list[str]:
        return words(template, curriculum=self.curriculum, raw=self.raw, problems=self.problems, **values)

    def _data(self) -> list[Stage]:
        pool = f"--config configs/filter_{self.size.model}.yaml --num-problems {self.size.filtered}"
        keep = self._words(f"data_prep/filter_deepscaler.py {pool} --output-dir {{out}}", out=self.filtered.parent)
        raw = self._words(f"data_prep/draw_problems.py {pool} --as-many-as {{curriculum}} --overwrite --output {{raw}}")
        held_out = f"--num-problems {self.size.held_out} --steps {self.size.chains} --seed 2000003"
        draw = self._words(
            f"data_prep/draw_problems.py --model {self.size.model} {held_out} --overwrite --output {{problems}}"
        )
        stages = [Stage("filter", keep, self.filtered), Stage("held-out problems", draw, self.problems)]
        if self.size.variant_seeds:
            stages.append(Stage("unfiltered problems", raw, self.raw, (self.filtered,)))
        return stages

    def _train(self, method: str, command: str, needs: tuple[Path, ...] = (), is_ablation: bool = False) -> None:
        """A training per seed, each with a gates file."""
        folder, short = self.folder / "runs", method.lower().replace(" ", "_")
        found = (self.ablations if is_ablation else self.gates).setdefault(method, [])
        seeds = self.size.distill_seeds if method in DISTILLED else self.size.seeds
        for seed in range(self.size.variant_seeds if is_ablation else seeds):
            run = folder / f"{short}_{seed}"
            found.append(run / "gates.pt")
            filled = self._words(f"{command} --seed {seed} --output_dir {{run}}", run=run)
            self.stages.append(Stage(f"{method}, seed {seed}", filled, found[-1], needs))

    def _rerank(self, method: str) -> None:
        files, name = self.gates[method][: self.size.seeds], f"{method} re-ranked"
        self.gates[name] = [file.with_name("reranked.pt") for file in files]
        options = f"--dtype {self.size.dtype} --num-traces {self.size.traces}"
        command = f"inference/rerank_heads.py --curriculum {{curriculum}} {options}"
        for seed, (gates, done) in enumerate(zip(files, self.gates[name], strict=True)):
            filled = self._words(
                f"{command} --seed {seed} --gates {{gates}} --overwrite --output {{out}}", gates=gates, out=done
            )
            self.stages.append(Stage(f"{name}, seed {seed}", filled, done, (gates,)))

    def _study(self) -> None:
        size = self.size
        study = f"inference/study.py --config configs/study_{size.model}.yaml --data {{problems}} --output-dir {{out}} "
        sweep = f"--random-draws {size.random_draws} --sparsities {size.sparsities} {size.study}"
        command = self._words(study + sweep, out=self.report)
        command += self._files("--gates", {name: self.gates[name] for name in METHODS})
        if size.variant_seeds:
            command += self._files("--ablation", self.ablations)
        needs = tuple(stage.done for stage in self.stages)
        # two processes of the same study share its conditions; with one job the first measures all of them
        self.stages += [
            Stage("conditions", [*command, "--measure-only"], self.report / "measured.json", needs),
            Stage("analyses and report", command, self.report / "report.html", needs),
        ]

    def _files(self, option: str, found: dict[str, list[Path]]) -> list[str]:
        return [option, *(f"{name}={file}" for name, files in found.items() for file in files)]


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
    config = parse(FullStudyConfig, __doc__)
    started = time.monotonic()
    shown = config.folder(tiny="study", smol="study_smol")
    folder = shown.resolve()
    size = QUICK[config.model] if config.quick else {"tiny": TINY, "smol": SMOL}[config.model]
    plan = Plan(below(ROOT, folder), size)
    run_stages(plan.stages, ROOT, folder, config.jobs or min(4, usable_cores()), threads=1, fresh=config.fresh)
    collect(plan)
    for lines in json.loads((folder / "results.json").read_text())["findings"].values():
        print("\n".join(f"- {line}" for line in lines))
    print(f"{time.monotonic() - started:.0f} s; everything is in {shown}/")
    print(f"next: open {shown}/report.html")


if __name__ == "__main__":
    run_app(main)
