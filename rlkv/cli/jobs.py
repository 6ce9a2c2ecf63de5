"""The commands `rlkv-filter`, `rlkv-eval`, `rlkv-study` and `rlkv-bench`: parse, run, print."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

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
    rlkv-filter --input problems.jsonl --model ./my-model --template boxed \\
        --outputs mine.jsonl                                      # outputs that you have

A run that was stopped resumes when it is started again with the same settings, with any number of
shards.  Started by torchrun or accelerate launch, every process decodes its part on a GPU of its
own.  Buckets, their seed and --fill-short-buckets may be changed afterwards: nothing is decoded
again.  Writes curriculum.parquet, curriculum.jsonl, report.json and report.md into --output-dir, by
default results/curriculum_MODEL: where the configs of rlkv-train look.
"""

EVAL = """Evaluate methods on benchmarks: every text in a file, tables with intervals and tests.

    rlkv-eval --model tiny --tasks tiny --limit 50 --methods full rlkv@0.5 rkv@ratio=0.5 \\
        --gates rlkv=results/demo/gates.pt --output-dir results/eval
    rlkv-eval --config eval_llama8b --output-dir results/llama8b
    rlkv-eval --preset modern --config eval_llama8b --output-dir results/llama8b_modern
    rlkv-eval --config eval_llama8b --gates rlkv=a.tsv duo=b.tsv --output-dir FOLDER \\
        --methods full rlkv@0.4 duo@0.4 random-heads@0.4 rkv@ratio=0.6 rlkv@0.4+rkv@256
    rlkv-eval --engine vllm --model ./my-model --tasks gsm8k --gates mine=gates.safetensors \\
        --methods full mine@0.4 --output-dir FOLDER
    accelerate launch --num_processes 4 inference/evaluate.py --config eval_llama8b \\
        --output-dir FOLDER

Greedy by default; --preset modern (or rlkv, rkv, rpc) is a published protocol: tasks, samples,
temperature and limits.  The same command resumes where it was stopped, also with another number of
processes, and refuses to mix settings.  Methods are named as in rlkv/evaluation/evaluate.py.
Without --data the problems come from the hub.
"""

STUDY = """\
Study rankings of KV heads: sweep, paired comparison, threshold, sensitivity, error modes, lengths,
budgets, gates.

    rlkv-study --config study_tiny --data problems.jsonl \\
        --gates RLKV=results/demo/gates.pt DuoAttention=outputs/distilled_tiny/gates.pt \\
        --oracle rlkv/tiny/model/ground_truth.json --output-dir results/study/report
    rlkv-study --model deepseek-ai/DeepSeek-R1-Distill-Llama-8B --tasks math500 aime24 \\
        --data FOLDER --gates RLKV=rlkv.tsv DuoAttention=duo.tsv --buffer 128 --observation 8 \\
        --extra 80 --output-dir results/llama8b_study
    rlkv-study --config study_tiny --gates RLKV=tiny --analyses sweep \\
        --sizes 4+16 8+32 prompt+16 --output-dir results/sizes
    rlkv-study --config study_tiny --gates RLKV=tiny --analyses acceptance \\
        --sparsities 0.5 0.8 --output-dir results/acceptance

Several files under one name are seeds of one method; the first name is compared with every other.
--ablation adds variants that are compared with it alone.  Decoding is greedy, so every allocation
of heads is measured once, however many seeds and analyses ask for it.  --sizes adds rows to the
sweep: accuracy and bytes of the first method with other sinks and windows.  The acceptance, how
often a draft with compressed heads picks the full model's token, reads the full cache's texts and
decodes nothing else.  Files: report.html (one file), report.md, table.md, plots, results.json with
every number, rows/ with every text.  The same command resumes a run that was stopped; rows that
were measured with other settings are refused by name.
"""

BENCH = """Speed and memory of the compressed cache.

    rlkv-bench decode     # a decode step against transformers' own caches, 15 minutes on 2 cores
    rlkv-bench serving    # throughput of the vLLM plugin (needs vLLM), half an hour on 2 cores
    rlkv-bench check      # what breaks first on a GPU: the tests in tests/gpu of a checkout
"""


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Run what breaks first on a GPU: three parts of under three minutes on an H100, small on CPUs.

    Writes hardware, versions, every figure and outcome.  The exit code is 1 if a test fails.

    rlkv-bench check --part 1    # SDPA backends, kernels, cache and eviction
    rlkv-bench check --part 2    # mixed and local attention (FlexAttention)
    rlkv-bench check --part 3    # a gate update, a rollout, decoding
    """

    part: Literal["1", "2", "3"] | None = None
    """Default: all three, one after another."""
    output_dir: Path = Path("results/check")
    """Where part1.json, part2.json and part3.json go."""


CHECK_FILES = {
    "1": ("test_kernels.py", "test_cache.py"),
    "2": ("test_attention.py",),
    "3": ("test_training.py", "test_decoding.py"),
}


def run_filter_job() -> None:
    """Build a curriculum, or say which shards are still open."""
    from rlkv.data.filter import STATUSES, FilterConfig, run_filter
    from rlkv.utils.runtime import leave_launcher

    config = parse(FilterConfig, FILTER)
    config = config.of_process(*leave_launcher(config.device))
    result = run_filter(config)
    if result.report is None:
        total = config.shard.partition("/")[2]
        listed = ", ".join(f"{i}/{total} ({n} problems)" for i, n in result.open_shards.items())
        print(
            f"Shard {config.shard} is complete. Not complete yet: {listed}. Run them with the same "
            "settings: the last one to finish writes the curriculum."
        )
        return
    for note in result.report["notes"]:
        print(note)
    counts = ", ".join(f"{status} {result.report[status]}" for status in STATUSES)
    print(f"{result.report['loaded']} problems: {counts}; {result.report['selected']} selected.")
    print(f"Curriculum and report: {result.report['config']['output_dir']}")


def run_eval(arguments: Sequence[str] | None = None) -> None:
    """Evaluate, and print the report; of several processes the last one to finish does."""
    from rlkv.evaluation.eval_report import write_report
    from rlkv.evaluation.evaluate import EvalConfig, evaluate

    config = parse(EvalConfig, EVAL, arguments)
    done = evaluate(config)
    if done is None:
        print(
            "This share is complete. The last process to finish writes the report; if one of them "
            "failed, run the same command again."
        )
        return
    write_report(config.output_dir, done)
    print((config.output_dir / "report.md").read_text(encoding="utf-8"))


def run_study_job() -> None:
    """Run the analyses, print the table of the sweep and name the files."""
    from rlkv.evaluation.analyses import run_study
    from rlkv.evaluation.study import StudyConfig

    config = parse(StudyConfig, STUDY, prog="rlkv-study")
    run_study(config)
    if config.measure_only:
        return
    if "sweep" in config.chosen_analyses:
        table = config.output_dir / "table.md"
        print(table.read_text(encoding="utf-8"))
    print(f"{config.output_dir / 'report.html'}, report.md, results.json")


def run_bench() -> None:
    """Run the benchmark that the command line names."""
    from rlkv.benchmarks.serving import ServingConfig, run_serving
    from rlkv.benchmarks.turns import DecodeConfig
    from rlkv.utils.store import check_results

    commands = {"decode": DecodeConfig, "serving": ServingConfig, "check": CheckConfig}
    config = parse_command("rlkv-bench", commands, BENCH)
    if isinstance(config, CheckConfig):
        sys.exit(run_check(config))
    name = config.name if isinstance(config, DecodeConfig) else "serving"
    check_results(config.output_dir, f"{name}.json", (f"{name}.md", f"{name}.png"), {"results"})
    if isinstance(config, ServingConfig):
        run_serving(config)
        return
    import torch

    from rlkv.benchmarks.decode import measure_steps
    from rlkv.benchmarks.texts import measure_evictions, measure_texts

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.manual_seed(0)
    measure = measure_steps
    if config.texts:
        measure = measure_texts
    elif config.eviction:
        measure = measure_evictions
    measure(config.sized())


def run_check(config: CheckConfig) -> int:
    """Run the tests of a part, or of all; return 1 if one fails, else 0."""
    import rlkv
    from rlkv.utils.runtime import ROOT, require
    from rlkv.utils.store import check_results

    folder = ROOT / "tests" / "gpu"
    if not folder.is_dir():
        raise ValueError(
            "rlkv-bench check runs tests/gpu, which is not in the wheel: get the checkout of rlkv "
            f"{rlkv.__version__} (its tag is v{rlkv.__version__}) and run pip install -e "
            "'.[train,dev]' there"
        )
    require("pytest", "dev")
    parts = list(CHECK_FILES) if config.part is None else [config.part]
    for part in parts:
        check_results(config.output_dir, f"part{part}.json", (), {"results"})
    codes = []
    for part in parts:
        file = config.output_dir.resolve() / f"part{part}.json"
        tests = [str(folder / name) for name in CHECK_FILES[part]]
        command = [sys.executable, "-m", "pytest", "-v", "-o", "timeout=600"]
        command += ["--figures", str(file), *tests]
        codes.append(subprocess.run(command, cwd=ROOT, check=False).returncode)
    return int(any(codes))


filter_main = partial(run_app, run_filter_job)
eval_main = partial(run_app, run_eval)
study_main = partial(run_app, run_study_job)
bench_main = partial(run_app, run_bench)
