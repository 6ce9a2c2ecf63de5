"""``random_run`` with an engine of its own in every process, as vLLM:

``python -m tests.helpers.engine_run FOLDER``.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from tests.helpers import random_run


def make_engine(kind: Any = None) -> Any:
    """Samples the model of ``random_run``; ``kind``: a subclass of GatedHFEngine."""
    from rlkv.attention import LocalSizes
    from rlkv.rollout.hf import GatedHFEngine

    model, tokenizer = random_run.make_policy()
    return (kind or GatedHFEngine)(model, LocalSizes(2, 6), tokenizer.pad_token_id)


if __name__ == "__main__":
    from rlkv.training import grpo as run

    torch.set_num_threads(1)
    run.open_engine = lambda *args: nullcontext(make_engine())
    random_run.run(Path(sys.argv[1]), sys.argv[2:])
    torch.distributed.destroy_process_group()
