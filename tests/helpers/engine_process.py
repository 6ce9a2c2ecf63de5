"""Rollouts with the engine in a process of its own:

``python -m tests.helpers.engine_process FOLDER``.

The engine's process knows the mixed models through the plugin's entry point.  Prints the error of
every update.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path


def main() -> None:
    # imported here, as the engine's processes begin by importing this file
    from rlkv.attention import LocalSizes
    from rlkv.rollout.base import SamplingParams
    from rlkv.vllm.engine import VLLMEngine
    from tests.helpers import vllm_models as models

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    folder = models.make_folder("llama", Path(sys.argv[1]))
    reference = models.load_reference(folder)
    with closing(
        VLLMEngine(str(folder), LocalSizes(models.SINK, models.WINDOW), **models.OPTIONS)
    ) as engine:
        assert not hasattr(engine.llm.llm_engine.engine_core, "engine_core"), (
            "the engine is in this process"
        )
        for update in range(2):
            alpha, rows = models.random_gates(update), models.make_rows(rollout=update)
            engine.set_gates(alpha)
            samples = dict(engine.sample(rows, SamplingParams(20, temperature=1.0)))
            print(
                "max error",
                models.worst_difference(models.put_gates(reference, alpha), rows, samples),
            )


if __name__ == "__main__":
    main()
