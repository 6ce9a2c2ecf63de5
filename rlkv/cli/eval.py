r"""Evaluate methods on benchmarks: every generation in a file, tables with intervals and paired differences.

    rlkv-eval --model tiny --tasks tiny --limit 50 --methods full rlkv@0.5 rkv@ratio=0.5 \
        --gates rlkv=results/demo/gates.pt --output-dir results/eval
    rlkv-eval --model deepseek-ai/DeepSeek-R1-Distill-Llama-8B --tasks math500 aime24 \
        --data FOLDER --gates rlkv=a.tsv duo=b.tsv \
        --methods full rlkv@0.4 duo@0.4 random-heads@0.4 rkv@ratio=0.6 rlkv@0.4+rkv@256 --output-dir results/llama8b
    rlkv-eval --config eval_llama8b --output-dir results/llama8b
    rlkv-eval --preset modern --config eval_llama8b --output-dir results/llama8b_modern
    accelerate launch --num_processes 4 inference/evaluate.py --config eval_llama8b --output-dir FOLDER

Greedy by default; --preset modern (or rlkv, rkv, rpc) is a published protocol: tasks, samples, temperature and limits.
The same command resumes where it was stopped, also with another number of processes, and refuses to mix settings.
Methods are named as in rlkv/evaluation/run/methods.py.  Without --data the problems come from the hub.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlkv.cli.errors import run_app
from rlkv.cli.options import parse
from rlkv.evaluation.report.eval_report import write_report
from rlkv.evaluation.run.evaluation import EvalConfig, evaluate


def run(arguments: Sequence[str] | None = None) -> None:
    """Evaluate, and print the report."""
    config = parse(EvalConfig, __doc__, arguments)
    done = evaluate(config)
    if done is not None:
        write_report(config.output_dir, done)
        print((config.output_dir / "report.md").read_text(encoding="utf-8"))


def main() -> None:
    run_app(run)


if __name__ == "__main__":
    main()
