"""Build a curriculum of problems that the full-cache model solves, sampled by output length.

Decodes every problem greedily with the full KV cache, keeps the right answers, counts their tokens and samples each
length bucket.  Without options it does the paper's job: DeepScaleR from the hub with DeepSeek-R1-Distill-Llama-8B,
7,168 tokens a completion, 600 + 600 + 1,000 + 800 problems.  vLLM decodes where it is installed, else transformers; a
line says which, and about how long it takes.

    rlkv-filter                                                   # the paper's job, on a GPU
    rlkv-filter --config filter_tiny                              # the built-in model, on a CPU
    torchrun --nproc_per_node 8 data_prep/filter_deepscaler.py    # on 8 GPUs, an engine each
    rlkv-filter --input problems.jsonl --model ./my-model --shard 0/4 --output-dir /shared/folder
    rlkv-filter --input problems.jsonl --outputs mine.jsonl       # outputs that you have

A run that was stopped resumes when it is started again with the same settings, with any number of shards.  Started by
torchrun or accelerate launch, every process decodes its part on a GPU of its own.  Buckets, their seed and
--fill-short-buckets may be changed afterwards: nothing is decoded again.  Writes curriculum.parquet, curriculum.jsonl,
report.json and report.md into --output-dir, by default results/curriculum_MODEL: where the configs of rlkv-train look.
"""

from __future__ import annotations

from rlkv.cli.errors import run_app


def _filter() -> None:
    from rlkv.cli.options import parse
    from rlkv.data.filter_config import FilterConfig
    from rlkv.utils.launcher import leave_launcher

    config = parse(FilterConfig, __doc__).of_process(*leave_launcher()).resolved()
    from rlkv.data.filter_job import run_filter
    from rlkv.data.filtering import STATUSES

    result = run_filter(config)
    if result.report is None:
        total = config.shard.partition("/")[2]
        listed = ", ".join(f"{i}/{total} ({n} problems)" for i, n in result.open_shards.items())
        print(
            f"Shard {config.shard} is complete. Not complete yet: {listed}. Run them with the same settings: "
            "the last one to finish writes the curriculum."
        )
        return
    for note in result.report["notes"]:
        print(note)
    counts = ", ".join(f"{status} {result.report[status]}" for status in STATUSES)
    print(f"{result.report['loaded']} problems: {counts}; {result.report['selected']} selected.")
    print(f"Curriculum and report: {config.output_dir}")


def main() -> None:
    run_app(_filter)


if __name__ == "__main__":
    main()
