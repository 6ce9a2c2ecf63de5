"""Rollouts on the engine's second model runner, its Triton kernels interpreted: ``python -m tests.helpers.second_runner``

    python -m tests.helpers.second_runner FOLDER

Asynchronous scheduling, which the engine switches off on a CPU, is on, and rows are preempted.  Fails unless all tokens
are those of the training loop's own rollout; prints the largest error of a log-probability of every update.
"""

# ruff: noqa: I001  (the switch comes first)
from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.helpers import interpreted  # noqa: F401
from vllm.platforms.cpu import CpuPlatform

from rlkv.attention import LocalSizes
from rlkv.rollout.base import SamplingParams
from rlkv.training.rollout import roll_out
from rlkv.vllm.engine import VLLMEngine
from tests.helpers import vllm_models as models
from tests.helpers.engines import watch_preemptions
from tests.helpers.vllm_models import ENDS

SAMPLED = SamplingParams(40, temperature=0.8, top_p=0.9, seed=5)


def allow_asynchronous_scheduling() -> None:
    stock = CpuPlatform.check_and_update_config

    def checked(cls: type, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        stock(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(checked)


def main() -> None:
    allow_asynchronous_scheduling()
    folder = models.make_folder("llama", Path(sys.argv[1]))
    reference = models.load_reference(folder)
    # 48 tokens a step: prompts are read in chunks next to rows that decode; 9 blocks: rows are preempted
    options = {**models.OPTIONS, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 9, "max_positions": 256}
    with closing(VLLMEngine(str(folder), LocalSizes(models.SINK, models.WINDOW), **options)) as engine:
        config = engine.llm.llm_engine.vllm_config
        assert config.use_v2_model_runner
        assert config.scheduler_config.async_scheduling
        preempted = watch_preemptions(engine.llm)
        for update in range(2):
            alpha, rows = models.random_gates(update), models.make_rows(4, rollout=update)
            engine.set_gates(alpha)
            model = models.put_gates(reference, alpha)
            samples = dict(engine.sample(rows, SAMPLED))
            expected = {row.index: row.token_ids for row in roll_out(model.get_base_model(), rows, SAMPLED, ENDS, 0, 8)}
            assert {index: sample.token_ids for index, sample in samples.items()} == expected
            print("max error", models.worst_difference(model, rows, samples, SAMPLED.temperature))
        assert preempted


if __name__ == "__main__":
    os.environ.update(VLLM_USE_V2_MODEL_RUNNER="1", HF_HUB_OFFLINE="1")
    main()
