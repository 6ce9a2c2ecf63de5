r"""Write problems with their answers to a JSONL file, unfiltered: a test set, or training data that
nothing selected.

    python data_prep/draw_problems.py --num-problems 200 --steps 3-12 --seed 2000003 \
        --output problems.jsonl
    python data_prep/draw_problems.py --config filter_tiny \
        --as-many-as results/curriculum_tiny/curriculum.jsonl --output raw.jsonl

With ``--as-many-as`` it draws, with the seed, as many problems as that curriculum has from the pool
that the filter with this ``--config`` starts from: neither chosen by what the model solves nor
sampled by length.  This is the ablation without self-distilled data (arXiv 2510.08525, figure 8).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from rlkv.cli.app import parse, run_app
from rlkv.data.filter import FilterConfig
from rlkv.data.problems import DRAWN, Problem, load_problems, read_curriculum
from rlkv.models.builtin import SMOL, TINY
from rlkv.smol import MAX_STEPS, MIN_STEPS
from rlkv.smol import problems as smol_problems
from rlkv.tiny import problems as tiny_problems
from rlkv.utils.files import check_new, write_jsonl
from rlkv.verifier import has_answer


@dataclass(frozen=True, kw_only=True)
class DrawConfig(FilterConfig):
    """The filter's options, of which input, num_problems, seed and limit say what to draw from."""

    model: str = TINY
    """says which input is the default: tiny, smol, or DeepScaleR for every other model"""
    output: Path
    """.jsonl file to write: problem, answer"""
    steps: str | None = None
    """length of the chains, such as 3-12: definitions of a tiny problem, computations of a smol one
    """
    held_out_names: bool = False
    """smol: take the names that fine-tuning never saw"""
    as_many_as: str | None = None
    """a curriculum: draw as many problems as it has"""
    overwrite: bool = False
    """replace --output if it exists"""


def load_pool(config: DrawConfig) -> list[Problem]:
    """Load the problems to draw from."""
    source = config.resolved().input or TINY
    if config.held_out_names and source != SMOL:
        raise ValueError(f"--held-out-names belongs to the problems of smol, not to {source}")
    if config.steps is None and not config.held_out_names:
        pool = load_problems(source, config.num_problems, config.seed, config.limit)
        return [problem for problem in pool if has_answer(problem.answer)]
    if source not in (TINY, SMOL):
        raise ValueError(
            f"--steps {config.steps} belongs to the problems of tiny and smol, not to {source}"
        )
    low, high = (MIN_STEPS, MAX_STEPS) if config.steps is None else parse_range(config.steps)
    count = config.num_problems or DRAWN
    if source == TINY:
        drawn = tiny_problems(count, config.seed, low, high)
    else:
        drawn = smol_problems(count, config.seed, low, high, config.held_out_names)
    return [Problem(**problem) for problem in drawn[: config.limit]]


def parse_range(text: str) -> tuple[int, int]:
    """Return the two numbers of ``--steps 3-12``."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal()):
        raise ValueError(f"--steps {text!r} is not a range: write it as 3-12")
    return int(low), int(high)


def main() -> None:
    config = parse(DrawConfig, __doc__)
    if config.output.suffix != ".jsonl":
        raise ValueError(f"--output {config.output} must end with .jsonl")
    check_new(config.output, config.overwrite)
    pool = load_pool(config)
    if config.as_many_as is not None:
        wanted = len(read_curriculum(config.as_many_as))
        if wanted > len(pool):
            raise ValueError(
                f"--as-many-as {config.as_many_as}: it has {wanted} problems, there are only "
                f"{len(pool)} to draw"
            )
        pool = random.Random(f"rlkv-raw-{config.seed}").sample(pool, wanted)
    write_jsonl(config.output, [{"problem": p.problem, "answer": p.answer} for p in pool])
    print(f"{len(pool)} problems: {config.output}")


if __name__ == "__main__":
    run_app(main)
