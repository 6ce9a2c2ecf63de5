"""rlkv-study on the tiny model: its input files, a command line that takes seconds, its results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlkv import tiny
from rlkv.cli.app import parse
from rlkv.evaluation.analyses import run_study
from rlkv.evaluation.study import StudyConfig
from rlkv.utils.files import write_jsonl
from tests.helpers.gates import tiny_gates

TOKENS = 45
NUM_PROBLEMS = 5


def write_inputs(folder: Path) -> Path:
    """Gates a, b (the same heads at 0.5 as a, in another order), c; five problems.

    A training log next to a.
    """
    gates = tiny_gates()
    alpha = gates.alpha
    for name, values in (("a", alpha), ("b", alpha.square()), ("c", 1 - alpha)):
        (folder / name).mkdir()
        replace(gates, alpha=values).save(folder / name / "gates.pt")
    (folder / "a" / "log.jsonl").write_text('{"time/step_s": 9.0, "time/step_cpu_s": 7.0}\n')
    problems = tiny.problems(NUM_PROBLEMS, seed=3, min_definitions=3, max_definitions=5)
    write_jsonl(folder / "problems.jsonl", problems)
    return folder


def config_of(inputs: Path, output: Path, *more: str) -> StudyConfig:
    """Return the options of a small study; ``more`` replaces those of the same name."""
    seeds = f"mine={inputs}/a/gates.pt mine={inputs}/b/gates.pt"
    words = f"""--gates {seeds} other={inputs}/c/gates.pt --ablation variant={inputs}/c/gates.pt
        --output-dir {output} --data {inputs}/problems.jsonl --oracle {tiny.GROUND_TRUTH}
        --random-draws 2 --sparsities 0.5 --compare-at 0.5 --top-heads 2
        --repetition 20 5 --policies rkv --savings 0.3 --buffer 4 --observation 2 --extra 8
        --batch-size 5 --max-new-tokens {TOKENS}"""
    found: dict[str, list[str]] = {}
    for word in [*words.split(), *more]:
        if word.startswith("--"):
            values = found[word] = []
        else:
            values.append(word)
    found["--gates"] = [value.replace("other=", "other <b>=") for value in found["--gates"]]
    return parse(
        StudyConfig, arguments=[word for name, of in found.items() for word in (name, *of)]
    )


def run(inputs: Path, output: Path, *more: str) -> None:
    """Run the study of :func:`config_of`."""
    run_study(config_of(inputs, output, *more))


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def analysis(folder: Path, name: str) -> dict[str, Any]:
    """Return what an analysis found on the tiny model's task."""
    return results(folder)["analyses"][name]["tasks"]["tiny"]
