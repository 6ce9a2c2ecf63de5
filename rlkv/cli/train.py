"""The commands `rlkv-train` and `rlkv-distill`: find the heads that need the full KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from rlkv.cli.app import parse_groups, run_app

if TYPE_CHECKING:
    from rlkv.training.config import DistillSettings, GateTrainingArguments, RLKVSettings

TRAIN = """Find the heads on problems that the model solves: by GRPO, elimination, or attention.

    rlkv-train --config tiny                              # GRPO on the built-in model
    rlkv-train --config tiny --finder elimination --curriculum results/curriculum/curriculum.parquet
    rlkv-train --config llama8b --plan --plan-gpus 8xh100 # what that takes: steps, memory, time
    accelerate launch train/grpo_gates.py --config configs/llama8b.yaml

--finder rlkv, the default, is the paper's method: GRPO with an L1 penalty that closes gates, while
rewards hold up those that reasoning needs.  It needs rollouts.  The published results are its own.

--finder elimination distils for a few steps, then lets heads go one by one, each time the one that
the curriculum's recorded solutions need least.  One process, no rollouts.  On the two small models
measured here it found better heads than GRPO in a third to an eighth of its CPU time (accuracy at
sparsity 0.5: 1.00 against 0.96, and 0.86 against 0.78).  It has not run on models of 4B and more.

--finder attention trains nothing: one pass over --elimination-traces recorded solutions.  A head's
gate is the largest share of attention in a solution that falls outside of --sink and --window, the
mean of that over solutions (idea: KVzip).  One process, no rollouts, about a forward of the texts.
Stopped, it starts over.

The run goes to --output-dir: log.jsonl, checkpoints every --save-steps, and at the end gates.pt,
gates.safetensors, adapter_weights.tsv (if every layer has gates), adapter/, figures and
summary.json.  A run that was stopped or killed resumes when the same command is given again.

Options of trl's GRPOConfig for the optimizer, the warm-up and the machine are accepted too, and
--config files may name them.
"""

DISTILL = """Find the heads by distillation: no rollouts, dense gradients, one device.

    rlkv-distill --config distill_tiny
    rlkv-distill --config distill_tiny_traces --curriculum curriculum.parquet
    rlkv-distill --config distill_llama8b --haystack book.txt

Mixed attention is pulled to what full attention computes, while an L1 term pulls the gates to 0.

--data recall is DuoAttention (arXiv 2410.10819): hidden states on the answers of a multi-passkey
recall task, word sequences hidden in text (--haystack FILE, or random words).  The tiny model has
no such words: it gets bindings like k=3 hidden among definitions of its own task.

--data traces: next-token distributions (KL) on the model's own correct outputs, which rlkv-filter
has recorded.  --loss puts either loss on either data.

The run goes to --output-dir and resumes as those of rlkv-train.  Its gates can be the start of
GRPO: rlkv-train --init-gates gates.pt."""

GROUPS = {
    "finder": "How heads are found.",
    "run": "Where the run goes, and how it is resumed and followed.",
    "model": "Model and problems, memory, sizes for serving.",
    "data": "What is distilled.",
    "gates": "Gates: sinks and window, and for GRPO their start and penalty.",
    "steps": "Objective, optimizer and steps.",
    "rollouts": "GRPO: samples, and what makes them.",
    "logs": "What is measured and plotted on the way.",
    "elimination": "Elimination alone, but for --elimination-traces.",
}


def parse_config(
    arguments: Sequence[str] | None = None,
) -> tuple[RLKVSettings, GateTrainingArguments]:
    """Parse the options of ``rlkv-train``; errors as of :func:`rlkv.cli.app.parse`."""
    from rlkv.training.config import GateTrainingArguments, RLKVSettings

    kinds = (RLKVSettings, GateTrainingArguments)
    settings, training = parse_groups(kinds, GROUPS, TRAIN, arguments, "rlkv-train")
    return settings, training


def parse_distill_config(arguments: Sequence[str] | None = None) -> DistillSettings:
    """Parse the options of ``rlkv-distill``; errors as of :func:`rlkv.cli.app.parse`."""
    from rlkv.training.config import DistillSettings

    return parse_groups((DistillSettings,), GROUPS, DISTILL, arguments, "rlkv-distill")[0]


def _train() -> None:
    from rlkv.utils.runtime import require

    require("trl", "train")
    import torch

    from rlkv.training.attention_mass import score_heads
    from rlkv.training.elimination import eliminate_heads
    from rlkv.training.grpo import prompt_tokens, train_gates
    from rlkv.training.plan import describe_plan

    settings, args = parse_config()
    if settings.plan:
        if args.process_index == 0:
            print(describe_plan(settings, args, prompt_tokens(settings, args)))
        return
    finders = {"rlkv": train_gates, "elimination": eliminate_heads, "attention": score_heads}
    try:
        finders[settings.finder](settings, args)
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _distill() -> None:
    from rlkv.utils.runtime import require

    require("trl", "train")
    from rlkv.training.config import print_unread, unread_options
    from rlkv.training.distillation import distill_gates

    settings = parse_distill_config()
    print_unread(unread_options(settings))
    distill_gates(settings)


distill_main = partial(run_app, _distill)
main = partial(run_app, _train)


if __name__ == "__main__":
    main()
