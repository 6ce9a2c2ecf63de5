"""Find the heads by distillation instead of reinforcement learning.

    python train/distill_gates.py --config distill_tiny

The same as the command rlkv-distill: see rlkv/cli/train.py, and --help for the options.
"""

from rlkv.cli.train import distill_main as main

if __name__ == "__main__":
    main()
