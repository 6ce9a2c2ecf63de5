r"""Write problems with their answers to a JSONL file, unfiltered: a test set, or training data that nothing selected.

    python data_prep/draw_problems.py --num-problems 200 --definitions 3-12 --seed 2000003 --output problems.jsonl
    python data_prep/draw_problems.py --config configs/filter_tiny.yaml \
        --as-many-as results/curriculum_tiny/curriculum.jsonl --output raw.jsonl

With ``--as-many-as`` it draws, with the seed, as many problems as that curriculum has from the pool that the filter
with this ``--config`` starts from: neither chosen by what the model solves nor sampled by length.  This is the ablation
without self-distilled data (arXiv 2510.08525, figure 8).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

import typer

from rlkv.cli.errors import help_text, run_app
from rlkv.data.curriculum_file import read_rows
from rlkv.data.deepscaler import TINY, Problem, load_problems, write_problems
from rlkv.data.filter_config import FilterConfig
from rlkv.evaluation.run.cli_args import study_problems

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def load_pool(
    config: str | None, source: str | None, num_problems: int | None, seed: int | None, definitions: str | None
) -> tuple[list[Problem], int]:
    """The problems to draw from, and the seed that is meant.

    Raises:
        ValueError: for settings that give no problems, or problems without answers.
    """
    given = {"input": source, "num_problems": num_problems, "seed": seed}
    settings = FilterConfig.resolve(config, given if config or source else {**given, "model": TINY})
    assert settings.input is not None
    if definitions is not None:
        if settings.input != TINY:
            raise ValueError(f"--definitions {definitions} draws problems of the tiny task, not from {settings.input}")
        drawn = study_problems(None, settings.num_problems, settings.seed, definitions)
        return [Problem(p["problem"], p["answer"]) for p in drawn], settings.seed
    pool = load_problems(settings.input, settings.num_problems, settings.seed, settings.limit)
    return [problem for problem in pool if problem.answer.strip()], settings.seed


@app.command(help=help_text(__doc__))
def main(
    output: Annotated[Path, typer.Option(help=".jsonl file to write: problem, answer")],
    config: Annotated[str | None, typer.Option(help="the filter's YAML: its input, num_problems, seed, limit")] = None,
    input: Annotated[str | None, typer.Option(help=".jsonl or .parquet file, hub data set, or tiny (default)")] = None,
    num_problems: Annotated[int | None, typer.Option(help="how many problems tiny draws", min=1)] = None,
    definitions: Annotated[str | None, typer.Option(help="chain lengths of the drawn tiny problems, as 3-12")] = None,
    seed: Annotated[int | None, typer.Option(help="of the drawn tiny problems and of --as-many-as")] = None,
    as_many_as: Annotated[str | None, typer.Option(help="a curriculum: draw as many problems as it has")] = None,
) -> None:
    if output.suffix != ".jsonl":
        raise ValueError(f"--output {output} must end with .jsonl")
    pool, meant = load_pool(config, input, num_problems, seed, definitions)
    if as_many_as is not None:
        wanted = len(read_rows(as_many_as))
        if wanted > len(pool):
            raise ValueError(f"--as-many-as {as_many_as}: it has {wanted} problems, there are only {len(pool)} to draw")
        pool = random.Random(f"rlkv-raw-{meant}").sample(pool, wanted)
    write_problems(output, pool)
    print(f"{len(pool)} problems: {output}")


if __name__ == "__main__":
    run_app(app)
