r"""Find the heads, by GRPO with the packaged configs: for launchers, which start a file.

    python train/grpo_gates.py --config tiny
    accelerate launch --config_file configs/accelerate/ddp.yaml train/grpo_gates.py \
        --config configs/llama8b.yaml

The same as the command rlkv-train: see rlkv/cli/train.py, and --help for the options.
"""

from rlkv.cli.train import main

if __name__ == "__main__":
    main()
