"""Sample completions for the problems of a file with any model, and judge them where answers are known.

    python rollout/sample.py --model tiny --input tiny --num-problems 20 --output results/samples.jsonl
    python rollout/sample.py --model ./my-model --input problems.jsonl --samples 4 --temperature 1.0 \\
        --max-new-tokens 2048 --output samples.jsonl

One line per completion, written as batches finish: index of the problem, sample, problem, answer, output,
output_tokens, finish_reason, correct (null where the problem has no answer).  The file can be given to
data_prep/filter_deepscaler.py as --outputs.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from rlkv.cli.errors import help_text, run_app
from rlkv.data.deepscaler import load_problems
from rlkv.inference.engines import load_engine
from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import SamplingParams
from rlkv.utils.progress import progress_bar
from rlkv.verifier.verifier import Verifier

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(help=help_text(__doc__))
def main(
    output: Annotated[Path, typer.Option(help="JSONL file to write; must not exist")],
    model: Annotated[str, typer.Option(help="hub id, local folder, or tiny (built in)")] = "tiny",
    input: Annotated[
        str, typer.Option(help=".jsonl or .parquet file, hub data set, or tiny (fresh problems)")
    ] = "tiny",
    num_problems: Annotated[int, typer.Option(help="how many problems --input tiny draws")] = 20,
    samples: Annotated[int, typer.Option(min=1, help="completions per problem")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="tokens of a completion")] = 440,
    temperature: Annotated[float, typer.Option(help="0 is greedy decoding")] = 0.0,
    top_p: Annotated[float, typer.Option(help="share of probability that may be drawn from")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 means no limit")] = 0,
    seed: Annotated[int, typer.Option(help="seed of the draws, and of --input tiny")] = 0,
    template: Annotated[str, typer.Option(help="prompt template: rlkv, boxed or plain")] = "rlkv",
    engine: Annotated[str, typer.Option(help="hf or vllm")] = "hf",
    batch_size: Annotated[int, typer.Option(help="completions decoded together")] = 16,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    limit: Annotated[int | None, typer.Option(help="only the first so many problems")] = None,
) -> None:
    if samples > 1 and temperature == 0:
        raise ValueError(
            f"--samples {samples} at temperature 0 would give equal completions: set --temperature above 0"
        )
    sampling = SamplingParams(max_new_tokens, temperature, top_p, top_k, seed)
    problems = load_problems(input, num_problems, seed, limit)
    loaded = load_engine(engine, model, dtype, device, batch_size)
    prompts = [render_prompt(loaded.tokenizer, p.problem, template) for p in problems for _ in range(samples)]
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = output.open("x")
    except FileExistsError:
        raise ValueError(f"{output} exists: name another --output, or remove it") from None
    with file, progress_bar("sample", "completions", len(prompts)) as bar, closing(Verifier()) as verifier:
        for row, completion in loaded.stream(prompts, sampling):
            problem = problems[row // samples]
            correct = verifier.is_correct(completion.text, problem.answer) if problem.answer else None
            record = {
                "index": row // samples,
                "sample": row % samples,
                "problem": problem.problem,
                "answer": problem.answer,
                "output": completion.text,
                "output_tokens": len(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "correct": correct,
            }
            file.write(json.dumps(record) + "\n")
            file.flush()
            bar.advance({"unknown" if correct is None else "correct" if correct else "wrong": 1})


if __name__ == "__main__":
    run_app(app)
