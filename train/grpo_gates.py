"""Train the gates: GRPO on problems that the model solves, with an L1 penalty that pulls every gate to 0.

    python train/grpo_gates.py --config configs/tiny.yaml --curriculum results/curriculum/curriculum.parquet
    accelerate launch --config_file configs/accelerate/ddp.yaml train/grpo_gates.py --config configs/llama8b.yaml

The config file sets defaults; every name in it is an option too (``--l1_beta 2e-3``), and so are those of trl's
GRPOConfig.  The run goes to ``--output_dir``: ``log.jsonl``, checkpoints every ``save_steps``, and at the end
``gates.pt``, ``gates.safetensors``, ``adapter_weights.tsv``, ``adapter/``, pictures and ``summary.json``.  A run that
was stopped, however hard, goes on from its last checkpoint when the same command is given again.
"""

from __future__ import annotations

import sys

import torch

from rlkv.cli.errors import run_app


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
    from rlkv.training.config import parse_config
    from rlkv.training.run import train_gates

    try:
        train_gates(*parse_config(sys.argv[1:]))
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_app(main)
