"""Find the heads on problems that the model solves: by a short distillation and elimination, or by
GRPO.

    rlkv-train --config tiny --finder elimination --curriculum results/curriculum/curriculum.parquet
    rlkv-train --config tiny                                     # GRPO; the built-in model on problems of its own task
    accelerate launch train/grpo_gates.py --config configs/llama8b.yaml
    rlkv-train --config llama8b --plan --plan_gpus 8xh100        # what that takes: steps, memory, engine, time

--finder elimination, the default, distils and then measures: heads go one by one, each time the one that the
curriculum's recorded solutions need least.  It reads the options of the model, the curriculum, the
sizes for serving, the rows of a pass, gradient_checkpointing and elimination_*.

--finder rlkv, which all packaged configs name, is GRPO with an L1 penalty that pulls every gate to 0.

--config takes a file or the name of a packaged one.  It sets defaults; every name in it is an option too
(--l1_beta 2e-3), and so are those of trl's GRPOConfig.  --verbose shows what other libraries print.

The run goes to --output_dir: log.jsonl, checkpoints every save_steps, and at the end gates.pt,
gates.safetensors, adapter_weights.tsv, adapter/, figures and summary.json.  A run that was stopped
or killed resumes from its last checkpoint when the same command is given again.
"""

from __future__ import annotations

import sys

from rlkv.cli.app import run_app

DISTILL = """Find the heads by distillation instead of reinforcement learning: no rollouts, dense gradients, one device.

    rlkv-distill --config distill_tiny
    rlkv-distill --config distill_tiny_traces --curriculum curriculum.parquet
    rlkv-distill --config distill_llama8b --haystack book.txt

Mixed attention is pulled to what full attention computes, while an L1 term pulls the gates to 0.

--data recall is DuoAttention (arXiv 2410.10819): hidden states on the answers of a multi-passkey recall task.  The task
is word sequences hidden in text (--haystack FILE, or random words of the tokenizer's vocabulary); the tiny model has no
such words, so it gets bindings like k=3 hidden among definitions of its own task.

--data traces: next-token distributions (KL) on the model's own correct outputs, which rlkv-filter has recorded.  --loss
puts either loss on either data.

--config takes a file or the name of a packaged one; --verbose shows what other libraries print.  The run goes to
--output_dir: log.jsonl, checkpoints, and at the end gates.pt in every format with figures and summary.json.  A run that
was stopped resumes when the same command is given again.  The gates can be the start of reinforcement learning:
rlkv-train --finder rlkv --init_gates gates.pt.
"""


def _train() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
    import torch

    from rlkv.utils.runtime import require

    require("trl", "train")
    from rlkv.training.config import parse_config
    from rlkv.training.elimination import eliminate_heads
    from rlkv.training.grpo import prompt_tokens, train_gates

    settings, args = parse_config(sys.argv[1:])
    if settings.plan:
        from rlkv.training.plan import describe_plan

        if args.process_index == 0:
            print(describe_plan(settings, args, prompt_tokens(settings, args)))
        return
    find = {"rlkv": train_gates, "elimination": eliminate_heads}[settings.finder]
    try:
        find(settings, args)
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _distill() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(DISTILL)
    from rlkv.utils.runtime import require

    require("trl", "train")
    from rlkv.training.config import parse_distill_config
    from rlkv.training.distillation import distill_gates

    distill_gates(parse_distill_config(sys.argv[1:]))


def distill_main() -> None:
    run_app(_distill)


def main() -> None:
    run_app(_train)


if __name__ == "__main__":
    main()
