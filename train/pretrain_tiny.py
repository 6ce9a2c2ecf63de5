"""Pretrain the built-in tiny reasoning model from scratch, and write its package folder.

    python train/pretrain_tiny.py                      # 4,000 steps, about 40 minutes on 2 CPU cores
    python train/pretrain_tiny.py --output-dir my_tiny --steps 200

Seeded; resumes from checkpoint.pt in the work folder after a kill.  At the end it measures greedy accuracy on held-out
problems of the full length range and writes the figure into pretraining.json.
"""

import json

from rlkv.cli.errors import run_app
from rlkv.cli.options import parse


def main() -> None:
    from rlkv.training.tiny_pretraining_run import PretrainRunConfig, run_pretraining

    print(json.dumps(run_pretraining(parse(PretrainRunConfig, __doc__)), indent=2))


if __name__ == "__main__":
    run_app(main)
