"""Find the heads by distillation instead of reinforcement learning: no rollouts, dense gradients, one device.

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

from __future__ import annotations

import sys

from rlkv.cli.errors import run_app


def _distill() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
    from rlkv.utils.extras import require

    require("trl", "train")
    from rlkv.training.distill_config import parse_distill_config
    from rlkv.training.distill_run import distill_gates

    distill_gates(parse_distill_config(sys.argv[1:]))


def main() -> None:
    run_app(_distill)


if __name__ == "__main__":
    main()
