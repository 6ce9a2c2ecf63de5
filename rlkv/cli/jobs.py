"""The commands `rlkv-filter`, `rlkv-eval`, `rlkv-study` and `rlkv-bench`: parse, run, print."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlkv.cli.app import parse, parse_command, run_app

FILTER = """Build a curriculum of problems that the full-cache model solves, by output length.

Decodes every problem greedily with the full KV cache, keeps the right answers, counts their tokens
and samples each length bucket.  Without options it does the paper's job: DeepScaleR from the hub
with DeepSeek-R1-Distill-Llama-8B, 7,168 tokens a completion, 600 + 600 + 1,000 + 800 problems.
vLLM decodes where it is installed, else transformers; a line says which, and about how long it
takes.

    rlkv-filter                                                   # the paper's job, on a GPU
    rlkv-filter --config filter_tiny                              # the built-in model, on a CPU
    torchrun --nproc_per_node 8 data_prep/filter_deepscaler.py    # on 8 GPUs, an engine each
    rlkv-filter --input problems.jsonl --model ./my-model --shard 0/4 --output-dir /shared/folder
    rlkv-filter --input problems.jsonl --outputs mine.jsonl       # outputs that you have

A run that was stopped resumes when it is started again with the same settings, with any number of
shards.  Started by torchrun or accelerate launch, every process decodes its part on a GPU of its
own.  Buckets, their seed and --fill-short-buckets may be changed afterwards: nothing is decoded
again.  Writes curriculum.parquet, curriculum.jsonl, report.json and report.md into --output-dir, by
default results/curriculum_MODEL: where the configs of rlkv-train look.
"""

EVAL = """Evaluate methods on benchmarks: every text in a file, tables with intervals and paired tests.

    rlkv-eval --model tiny --tasks tiny --limit 50 --methods full rlkv@0.5 rkv@ratio=0.5 \\
        --gates rlkv=results/demo/gates.pt --output-dir results/eval
    rlkv-eval --config eval_llama8b --output-dir results/llama8b
    rlkv-eval --preset modern --config eval_llama8b --output-dir results/llama8b_modern
    rlkv-eval --config eval_llama8b --gates rlkv=a.tsv duo=b.tsv --output-dir FOLDER \\
        --methods full rlkv@0.4 duo@0.4 random-heads@0.4 rkv@ratio=0.6 rlkv@0.4+rkv@256
    accelerate launch --num_processes 4 inference/evaluate.py --config eval_llama8b \\
        --output-dir FOLDER

Greedy by default; --preset modern (or rlkv, rkv, rpc) is a published protocol: tasks, samples,
temperature and limits.  The same command resumes where it was stopped, also with another number of
processes, and refuses to mix settings.  Methods are named as in rlkv/evaluation/evaluate.py.
Without --data the problems come from the hub.
"""

STUDY = """\
Study rankings of KV heads: sweep, paired comparison, threshold, sensitivity, error modes, lengths, budgets, gates.

    rlkv-study --model tiny --tasks tiny --data problems.jsonl \\
        --gates RLKV=results/demo/gates.pt DuoAttention=outputs/duo_tiny/gates.pt \\
        --oracle rlkv/tiny/model/ground_truth.json --sink 4 --window 16 --repetition 40 8 --max-new-tokens 208 \\
        --batch-size 100 --output-dir results/study/report
    rlkv-study --model deepseek-ai/DeepSeek-R1-Distill-Llama-8B --tasks math500 aime24 --data FOLDER \\
        --gates RLKV=rlkv.tsv DuoAttention=duo.tsv --buffer 128 --observation 8 --extra 80 \\
        --output-dir results/llama8b_study

Several files under one name are seeds of one method; the first name is compared with every other.  ``--ablation`` adds
variants that are compared with it alone.  Decoding is greedy, so every allocation of heads is measured once, however
many seeds and analyses ask for it.  Files: report.html (one file), report.md, table.md, plots, results.json with every
number, rows/ with every text.  The same command resumes a run that was stopped; rows that were measured with other
settings are refused by name.

rlkv-study window, with options of its own, studies what compressible heads should keep: sinks, window, prompt.
"""

WINDOW = """Study what compressible heads should keep: sinks, window and prompt, in accuracy per byte of KV.

    rlkv-study window --config window_tiny --data problems.jsonl --output-dir results/window --write-gates gates.pt
    rlkv-study window --model deepseek-ai/DeepSeek-R1-Distill-Llama-8B --gates rlkv.tsv --tasks math500 --data FOLDER \\
        --sinks 16 32 64 --windows 64 128 256 --sparsities 0.6 --output-dir results/llama8b_window

Every number of sinks x window x prompt kept or not, at every sparsity, decoded greedily; then the bytes that the prompt
takes, spent on it, on a bigger window, or on fewer compressible heads.  Files: report.html (one
file), report.md, plots, results.json with every number, rows/ with every text.  --write-gates writes what is
recommended into a copy of the gates, from which rlkv-infer takes it.  The same command resumes a run that was stopped.
"""

BENCH = """Speed and memory of the compressed cache.

    rlkv-bench decode        # a decode step against transformers' own caches, about 15 minutes on 2 cores
    rlkv-bench generation    # whole texts: memory, latency, throughput and the largest batch, a few minutes
    rlkv-bench attention     # one layer's attention: latency and GB/s against torch's own, a few minutes
    rlkv-bench compaction    # what an eviction costs with each policy, a few minutes
    rlkv-bench serving       # throughput of the vLLM plugin (needs vLLM), about an hour on 2 cores
    rlkv-bench check         # what breaks first on a new GPU, about 20 minutes there

decode: a random Llama of about 100 M parameters (8 KV heads of 64, two query heads each) decodes with
HeadReallocationCache at several sparsities and with transformers' DynamicCache and StaticCache (sdpa), taking turns in
one run.

generation: the same model writes whole texts with each method of compression and batch size; with --memory-gib also
with the largest batch whose weights and KV fit.

attention: one token through one attention layer, by batch, length and sparsity, against torch's attention over a full
cache; a speed-up is given only where the output is right.

compaction: one eviction of every policy against one decode step of that model, and its memory.

serving: offline throughput of the stock engine and of the plugin at several sparsities, with the same requests, output
lengths and bytes of KV pool, where memory is the limit and where it is not. With --eviction each sparsity is also run
with that policy in the compressible heads. Every run has a process of its own; finished ones are kept and not repeated.

check: attention, cache and eviction against float64 on the CPU, a gate update, a rollout and decoding at the shape of
Llama-8B, and the Triton kernels. Each check passes, fails or says why it cannot run. Exit code 1 if one fails.
On a CPU the same runs at small sizes, in under 2 minutes.

Each writes NAME.json, NAME.md and, except check, NAME.png.
"""


def run_filter_job() -> None:
    """Build a curriculum, or say which shards are still open."""
    from rlkv.data.filter import STATUSES, FilterConfig, run_filter
    from rlkv.utils.runtime import leave_launcher

    config = parse(FilterConfig, FILTER).of_process(*leave_launcher()).resolved()
    result = run_filter(config)
    if result.report is None:
        total = config.shard.partition("/")[2]
        listed = ", ".join(f"{i}/{total} ({n} problems)" for i, n in result.open_shards.items())
        print(
            f"Shard {config.shard} is complete. Not complete yet: {listed}. Run them with the same "
            "settings: "
            "the last one to finish writes the curriculum."
        )
        return
    for note in result.report["notes"]:
        print(note)
    counts = ", ".join(f"{status} {result.report[status]}" for status in STATUSES)
    print(f"{result.report['loaded']} problems: {counts}; {result.report['selected']} selected.")
    print(f"Curriculum and report: {config.output_dir}")


def run_eval(arguments: Sequence[str] | None = None) -> None:
    """Evaluate, and print the report."""
    from rlkv.evaluation.evaluate import EvalConfig, evaluate
    from rlkv.evaluation.report import write_report

    config = parse(EvalConfig, EVAL, arguments)
    done = evaluate(config)
    if done is not None:
        write_report(config.output_dir, done)
        print((config.output_dir / "report.md").read_text(encoding="utf-8"))


def run_study_job() -> None:
    """Run every analysis, or the sweep over sizes, and name the files."""
    if sys.argv[1:2] == ["window"]:
        return run_window()
    from rlkv.evaluation.analyses import run_study
    from rlkv.evaluation.study import StudyConfig
    from rlkv.evaluation.study_text import SEEDS_FIXED

    config = parse(StudyConfig, STUDY, prog="rlkv-study")
    findings = run_study(config)
    if findings is not None:
        print(f"{config.output_dir / 'report.html'}, report.md, table.md, results.json")
        print("\n".join([*(f"- {line}" for line in findings), SEEDS_FIXED]))


def run_window() -> None:
    """``rlkv-study window``."""
    from rlkv.evaluation.window_config import WindowConfig
    from rlkv.evaluation.window_run import run_window_study

    config = parse(WindowConfig, WINDOW, sys.argv[2:], prog="rlkv-study window")
    lines = run_window_study(config)
    print(f"{config.output_dir / 'report.html'}, report.md, results.json")
    print("\n".join(f"- {line}" for line in lines))
    if config.write_gates is not None:
        print(f"{config.write_gates}: the gates with the recommended sizes")


def run_bench() -> None:
    """Run the benchmark that the command line names."""
    from rlkv.benchmarks.attention import AttentionConfig
    from rlkv.benchmarks.check.config import CheckConfig
    from rlkv.benchmarks.compaction import CompactionConfig
    from rlkv.benchmarks.decode import DecodeConfig
    from rlkv.benchmarks.generation import GenerationConfig
    from rlkv.benchmarks.serving import ServingConfig
    from rlkv.benchmarks.serving_page import run_serving
    from rlkv.utils.runtime import require
    from rlkv.utils.store import check_results

    commands = {
        "decode": DecodeConfig,
        "generation": GenerationConfig,
        "attention": AttentionConfig,
        "compaction": CompactionConfig,
        "serving": ServingConfig,
        "check": CheckConfig,
    }
    config = parse_command("rlkv-bench", commands, BENCH)
    name = next(name for name, kind in commands.items() if type(config) is kind)
    check_results(config.output_dir, f"{name}.json", (f"{name}.md", f"{name}.png"), {"results"})
    if isinstance(config, ServingConfig):
        return run_serving(config)
    if not isinstance(config, CheckConfig):
        return config.run()
    require("peft", "train")
    from rlkv.benchmarks.check.run import run_checks

    sys.exit(run_checks(config))


def filter_main() -> None:
    """Run ``rlkv-filter``."""
    run_app(run_filter_job)


def eval_main() -> None:
    """Run ``rlkv-eval``."""
    run_app(run_eval)


def study_main() -> None:
    """Run ``rlkv-study``."""
    run_app(run_study_job)


def bench_main() -> None:
    """Run ``rlkv-bench``."""
    run_app(run_bench)
