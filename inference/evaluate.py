r"""Evaluate methods on benchmarks: the command ``rlkv-eval``, for launchers that start a file.

    accelerate launch --num_processes 4 inference/evaluate.py --config eval_llama8b \
        --output-dir results/llama8b
    torchrun --nproc_per_node 4 inference/evaluate.py --config eval_llama8b \
        --output-dir results/llama8b
"""

from rlkv.cli.jobs import eval_main as main

if __name__ == "__main__":
    main()
