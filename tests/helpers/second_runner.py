"""The engine's second model runner on a CPU, its Triton kernels interpreted, with asynchronous
scheduling.

    python -m tests.helpers.second_runner rollouts|serving FOLDER

Fails unless all tokens are right, and prints the largest errors of log-probabilities.
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
from rlkv.eviction import make_policy
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.hf import roll_out
from rlkv.vllm.engine import VLLMEngine
from tests.helpers import vllm_models as models
from tests.helpers.engines import (
    SINK,
    WINDOW,
    check_equal,
    engine,
    generate,
    make_served,
    need_vllm,
    random_prompts,
)
from tests.helpers.engines import watch_preemptions

SAMPLED = SamplingParams(40, temperature=0.8, top_p=0.9, seed=5)
RKV = {"name": "rkv", "budget": 40, "buffer": 16}
# settings of head reallocation, what they are in transformers, and options of the engine
SERVED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (
        {},
        {"sink": SINK, "window": WINDOW},
        {"max_num_batched_tokens": 64, "enable_prefix_caching": True},
    ),
    ({"eviction": RKV}, {"eviction": make_policy(**RKV)}, {"max_num_batched_tokens": 64}),
    ({"prefill": "full"}, {"sink": SINK, "window": WINDOW, "prefill": "full"}, {}),
    (
        {"protect_prompt": True},
        {"sink": SINK, "window": WINDOW, "protect_prompt": True},
        {"max_num_batched_tokens": 64},
    ),
]


def allow_asynchronous_scheduling() -> None:
    """The engine switches it off on a CPU, where it gains nothing."""
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
    """The tokens of the training loop's own rollout."""
    path = models.make_folder("llama", folder / "llama")
    reference = models.load_reference(path)
    # 48 tokens a step: prompts are read in chunks next to rows that decode; 6 blocks for 6 rows of
    # 2 to 5
    options = {
        **models.OPTIONS,
        "max_num_batched_tokens": 48,
        "num_gpu_blocks_override": 7,
        "max_positions": 192,
    }
    with closing(
        VLLMEngine(str(path), LocalSizes(models.SINK, models.WINDOW), **options)
    ) as rollout_engine:
        check_config(rollout_engine.llm.llm_engine.vllm_config)
        preempted = watch_preemptions(rollout_engine.llm)
        for update in range(2):
            alpha, rows = models.random_gates(update), models.make_rows(6, rollout=update)
            rollout_engine.set_gates(alpha)
            model = models.put_gates(reference, alpha)
            samples = dict(rollout_engine.sample(rows, SAMPLED))
            made = roll_out(model.get_base_model(), rows, SAMPLED, models.ENDS, 0, 8)
            assert {i: s.token_ids for i, s in samples.items()} == {
                row.index: row.token_ids for row in made
            }
            print("max error", models.worst_difference(model, rows, samples, SAMPLED.temperature))
        assert preempted


def serving(folder: Path) -> None:
    """The tokens of transformers under the same allocation."""
    served = make_served(folder, "llama")
    for settings, sizes, options in SERVED:
        with engine(served, served.request(0.5, **settings), **options) as llm:
            check_config(llm.llm_engine.vllm_config)
            check_equal(served, 0.5, generate(llm, random_prompts((5, 90, 130)), 40), sizes=sizes)


if __name__ == "__main__":
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    need_vllm()
    allow_asynchronous_scheduling()
    {"rollouts": rollouts, "serving": serving}[sys.argv[1]](Path(sys.argv[2]))
