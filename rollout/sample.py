r"""Sample completions for the problems of a file with any model, and judge them where answers are known.

    python rollout/sample.py --model tiny --input tiny --num-problems 20 --output results/samples.jsonl
    python rollout/sample.py --model ./my-model --input problems.jsonl --samples 4 --temperature 1.0 \
        --max-new-tokens 2048 --output samples.jsonl

One line per completion, written when it ends: index of the problem, sample, problem, answer, output,
output_tokens, finish_reason, correct (null where the problem has no answer).  Repeat the command to resume a run
that was stopped.  The file can be given to rlkv-filter as --outputs.
"""

from rlkv.cli.errors import run_app
from rlkv.cli.options import parse


def main() -> None:
    from rlkv.data.sampling import SampleConfig, sample

    sample(parse(SampleConfig, __doc__))


if __name__ == "__main__":
    run_app(main)
