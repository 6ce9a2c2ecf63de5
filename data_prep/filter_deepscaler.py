"""Build a curriculum of problems that the full-cache model solves, sampled by output length.

Decodes every problem greedily with the full KV cache, keeps the right answers, counts their tokens and
samples each length bucket.  Without arguments it does the paper's job: DeepScaleR from the hub with
DeepSeek-R1-Distill-Llama-8B, 7,168 tokens a completion, 600 + 600 + 1,000 + 800 problems.

    python data_prep/filter_deepscaler.py                                       # the paper's job, on a GPU
    python data_prep/filter_deepscaler.py --config configs/filter_tiny.yaml     # the built-in model, on a CPU
    python data_prep/filter_deepscaler.py --input problems.jsonl --model ./my-model --shard 0/4
    python data_prep/filter_deepscaler.py --input problems.jsonl --outputs mine.jsonl    # outputs you have

A run that was stopped, however, goes on where it was when it is started again with the same settings.
Buckets, their seed and --fill-short-buckets may be changed afterwards: nothing is decoded again.
Writes curriculum.parquet, curriculum.jsonl, report.json and report.md into --output-dir.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rlkv.cli.errors import help_text, run_app
from rlkv.data.filter_config import FilterConfig
from rlkv.data.filter_job import run_filter
from rlkv.data.filtering import STATUSES

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
Text = str | None
Count = int | None


@app.command(help=help_text(__doc__))
def main(
    config: Annotated[Text, typer.Option(help="YAML file with these options as keys; options given here win")] = None,
    model: Annotated[Text, typer.Option(help="hub id, local folder, or tiny (built in)")] = None,
    input: Annotated[Text, typer.Option(help=".jsonl or .parquet file, hub data set, or tiny (fresh problems)")] = None,
    num_problems: Annotated[Count, typer.Option(help="how many problems --input tiny draws")] = None,
    outputs: Annotated[
        Text, typer.Option(help="recorded outputs (problem + output) to filter, nothing is decoded")
    ] = None,
    outputs_field: Annotated[Text, typer.Option(help="field of --outputs that holds the output, e.g. solution")] = None,
    output_dir: Annotated[Text, typer.Option(help="where shards, curriculum and report go")] = None,
    buckets: Annotated[Text, typer.Option(help="output tokens LOW-HIGH:COUNT,... (above LOW, at most HIGH)")] = None,
    fill_short_buckets: Annotated[
        bool | None, typer.Option("--fill-short-buckets", help="fill short buckets from what others have left over")
    ] = None,
    engine: Annotated[Text, typer.Option(help="hf or vllm")] = None,
    template: Annotated[Text, typer.Option(help="prompt template: rlkv, boxed or plain")] = None,
    batch_size: Annotated[Count, typer.Option(help="problems decoded together")] = None,
    max_length: Annotated[Count, typer.Option(help="tokens of prompt and completion together")] = None,
    max_new_tokens: Annotated[Count, typer.Option(help="tokens of a completion")] = None,
    dtype: Annotated[Text, typer.Option(help="auto, float32, bfloat16 or float16")] = None,
    device: Annotated[Text, typer.Option(help="auto, cpu, cuda or cuda:N")] = None,
    seed: Annotated[Count, typer.Option(help="seed of the sampling, and of --input tiny")] = None,
    shard: Annotated[Text, typer.Option(help="i/n: do every n-th problem from the i-th, counted from 0")] = None,
    limit: Annotated[Count, typer.Option(help="only the first so many problems")] = None,
) -> None:
    overrides = {name: value for name, value in locals().items() if name != "config"}
    settings = FilterConfig.resolve(config, overrides)
    result = run_filter(settings)
    if result.report is None:
        listed = ", ".join(f"{i}/{settings.num_shards} ({n} problems)" for i, n in result.open_shards.items())
        typer.echo(
            f"Shard {settings.shard} is complete. Not complete yet: {listed}. Run them with the same settings: "
            "the last one to finish writes the curriculum."
        )
        return
    for note in result.report["notes"]:
        typer.echo(note)
    counts = ", ".join(f"{status} {result.report[status]}" for status in STATUSES)
    typer.echo(f"{result.report['loaded']} problems: {counts}; {result.report['selected']} selected.")
    typer.echo(f"Curriculum and report: {settings.output_dir}")


if __name__ == "__main__":
    run_app(app)
