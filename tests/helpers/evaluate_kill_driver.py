"""Kill rlkv-eval at random moments; used by test_evaluate_kill.py.

    python -m tests.helpers.evaluate_kill_driver FOLDER KILLS PROBLEMS

Every problem has the four samples of the preset modern.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlkv import tiny
from rlkv.cli.jobs import run_eval as evaluate
from rlkv.evaluation.runner import render_problems
from rlkv.evaluation.tasks.registry import TASKS, load_task
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.hf import HFEngine
from tests.helpers.kill_rounds import run_and_kill

METHODS = ("full", "random-heads@0.5+rkv@40:buffer=8")
OPTIONS = (
    "--preset",
    "modern",
    "--tasks",
    "tiny",
    "--max-new-tokens",
    "40",
    "--batch-size",
    "6",
    "--device",
    "cpu",
)
SAMPLES = 4


def main(root: Path, kills_wanted: int, problems: int) -> None:
    model, tokenizer = tiny.load()
    prompt = render_problems(TASKS["tiny"], load_task("tiny", None, 1), tokenizer)[0].prompt
    HFEngine(model, tokenizer).generate(
        [prompt], SamplingParams(2)
    )  # what generate imports on first use

    def job(folder: Path) -> None:
        options = ["--methods", *METHODS, "--limit", str(problems), "--sink", "4", "--window", "16"]
        evaluate(["--output-dir", str(folder), *OPTIONS, *options])

    run_and_kill(
        root, kills_wanted, job, "tiny/*/rows-0-of-1.jsonl", problems * SAMPLES * len(METHODS)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
