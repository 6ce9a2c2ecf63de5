"""Train the tiny model's gates twice per seed, sampling with transformers and with vLLM, and compare the rankings.

    python rollout/compare_rollouts.py --output docs/results/rollouts --steps 40 --seeds 0 1 2

Runs alternate between the engines, on one machine, each in a process of its own.  A finished run is not repeated, and
one that was stopped resumes, so the command can be repeated.  Writes results.json and table.md to the output folder;
the runs themselves go to --runs.
"""

from rlkv.cli.errors import run_app
from rlkv.cli.options import parse


def main() -> None:
    from rlkv.data.filter_config import DecodeOptions
    from rlkv.training.rollout_comparison import CompareConfig, compare_engines

    config = parse(CompareConfig, __doc__)
    DecodeOptions(engine="vllm").check()  # before the first run, if it is not installed
    print(compare_engines(config))


if __name__ == "__main__":
    run_app(main)
