"""The engine's second model runner on a CPU, its Triton kernels interpreted.

    python -m tests.helpers.second_runner rollouts|serving FOLDER

Scheduling is asynchronous, as by default on a GPU.  Fails unless all tokens are right, and prints
the largest errors of log-probabilities.
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
from rlkv.vllm.engine import VLLMEngine
from tests.helpers import vllm_models as models
from tests.helpers.engines import (
    ENGINES,
    check_equal,
    engine,
    generate,
    make_served,
    need_vllm,
    random_prompts,
    watch_preemptions,
)


def allow_asynchronous_scheduling() -> None:
    """Keep what was asked for: the engine switches it off on a CPU, where it gains nothing."""
    stock = CpuPlatform.check_and_update_config

    def checked(cls: type, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        stock(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(checked)


def check_config(config: Any) -> None:
    assert config.use_v2_model_runner
    assert config.scheduler_config.async_scheduling


def rollouts(folder: Path) -> None:
    """Compare log-probabilities with the reference, and a rollout with its repetition."""
    path = models.make_folder("llama", folder / "llama")
    reference = models.load_reference(path)
    # 48 tokens a step: prompts are read in chunks next to rows that decode; 6 blocks for 6 rows of
    # 2 to 5
    small = {"max_num_batched_tokens": 48, "num_gpu_blocks_override": 7, "max_positions": 192}
    sizes = LocalSizes(models.SINK, models.WINDOW)
    with closing(VLLMEngine(str(path), sizes, **models.OPTIONS, **small)) as rollout_engine:
        check_config(rollout_engine.llm.llm_engine.vllm_config)
        preempted = watch_preemptions(rollout_engine.llm)
        for update in range(2):
            alpha, rows = models.random_gates(update), models.make_rows(6, rollout=update)
            rollout_engine.set_gates(alpha)
            sampled = SamplingParams(40, temperature=0.8, seed=5)
            samples = dict(rollout_engine.sample(rows, sampled))
            again = dict(rollout_engine.sample(rows, sampled))
            assert {i: s.token_ids for i, s in samples.items()} == {
                i: s.token_ids for i, s in again.items()
            }
            assert samples[0].token_ids != samples[1].token_ids  # the same prompt, another row
            model = models.put_gates(reference, alpha)
            print("max error", models.worst_difference(model, rows, samples, 0.8))
        assert preempted


def serving(folder: Path) -> None:
    """Compare tokens with those of transformers under the same allocation."""
    served = make_served(folder, "llama")
    for name in ("sinks", "rkv", "full", "protect"):
        key = ENGINES[name]
        options = {**key.options, "async_scheduling": True}
        del options["num_gpu_blocks_override"]
        with engine(served, served.request(0.5, **key.settings), **options) as llm:
            check_config(llm.llm_engine.vllm_config)
            outputs = generate(llm, random_prompts((5, 90, 130)), 40)
            check_equal(served, 0.5, outputs, sizes=key.what_is_kept())


if __name__ == "__main__":
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    need_vllm()
    allow_asynchronous_scheduling()
    {"rollouts": rollouts, "serving": serving}[sys.argv[1]](Path(sys.argv[2]))
