r"""Study rankings of KV heads: sweep, paired comparison, threshold, sensitivity, error modes, lengths, budgets, gates.

    rlkv-study --model tiny --tasks tiny --data problems.jsonl \
        --gates RLKV=results/demo/gates.pt DuoAttention=outputs/duo_tiny/gates.pt \
        --oracle rlkv/tiny/model/ground_truth.json --sink 4 --window 16 --repetition 40 8 --max-new-tokens 208 \
        --batch-size 100 --output-dir results/study/report
    rlkv-study --model deepseek-ai/DeepSeek-R1-Distill-Llama-8B --tasks math500 aime24 --data FOLDER \
        --gates RLKV=rlkv.tsv DuoAttention=duo.tsv --buffer 128 --observation 8 --extra 80 \
        --output-dir results/llama8b_study

Several files under one name are seeds of one method; the first name is compared with every other.  ``--ablation`` adds
variants that are compared with it alone.  Decoding is greedy, so every allocation of heads is measured once, however
many seeds and analyses ask for it.  Files: report.html (one file), report.md, table.md, plots, results.json with every
number, rows/ with every text.  The same command resumes a run that was stopped; rows that were measured with other
settings are refused by name.

rlkv-study window, with options of its own, studies what compressible heads should keep: sinks, window, prompt.
"""

from __future__ import annotations

import sys

from rlkv.cli.errors import run_app
from rlkv.cli.options import parse

WINDOW = """Study what compressible heads should keep: sinks, window and prompt, in accuracy per byte of KV.

    rlkv-study window --config window_tiny --data problems.jsonl --output-dir results/window --write-gates gates.pt
    rlkv-study window --model deepseek-ai/DeepSeek-R1-Distill-Llama-8B --gates rlkv.tsv --tasks math500 --data FOLDER \\
        --sinks 16 32 64 --windows 64 128 256 --sparsities 0.6 --output-dir results/llama8b_window

Every number of sinks x window x prompt kept or not, at every sparsity, decoded greedily; then the bytes that the prompt
takes, spent on it, on a bigger window, or on fewer compressible heads.  Files: report.html (one
file), report.md, plots, results.json with every number, rows/ with every text.  --write-gates writes what is
recommended into a copy of the gates, from which rlkv-infer takes it.  The same command resumes a run that was stopped.
"""


def study() -> None:
    """Parse the options and run."""
    if sys.argv[1:2] == ["window"]:
        return window()
    from rlkv.evaluation.study.config import StudyConfig
    from rlkv.evaluation.study.run import run_study
    from rlkv.evaluation.study.text import SEEDS_FIXED

    config = parse(StudyConfig, __doc__, prog="rlkv-study")
    findings = run_study(config)
    if findings is not None:
        print(f"{config.output_dir / 'report.html'}, report.md, table.md, results.json")
        print("\n".join([*(f"- {line}" for line in findings), SEEDS_FIXED]))


def window() -> None:
    """``rlkv-study window``."""
    from rlkv.evaluation.study.window.config import WindowConfig
    from rlkv.evaluation.study.window.run import run_window_study

    config = parse(WindowConfig, WINDOW, sys.argv[2:], prog="rlkv-study window")
    lines = run_window_study(config)
    print(f"{config.output_dir / 'report.html'}, report.md, results.json")
    print("\n".join(f"- {line}" for line in lines))
    if config.write_gates is not None:
        print(f"{config.write_gates}: the gates with the recommended sizes")


def main() -> None:
    run_app(study)


if __name__ == "__main__":
    main()
