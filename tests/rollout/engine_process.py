"""Rollouts with the engine in a process of its own: ``python engine_process.py FOLDER``.

The engine's process knows the mixed models through the plugin's entry point.  Prints the error of every update.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vllm_models import (
    OPTIONS,
    SINK,
    WINDOW,
    load_reference,
    make_folder,
    make_rows,
    put_gates,
    random_gates,
    worst_difference,
)

from rlkv.rollout.base import SamplingParams
from rlkv.rollout.vllm import VLLMEngine
from rlkv.serving.mixed_attention import LocalSizes


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    folder = make_folder("llama", Path(sys.argv[1]))
    model = load_reference(folder)
    with closing(VLLMEngine(str(folder), LocalSizes(SINK, WINDOW), **OPTIONS)) as engine:
        assert not hasattr(engine.llm.llm_engine.engine_core, "engine_core"), "the engine is in this process"
        for update in range(2):
            alpha, rows = random_gates(update), make_rows(rollout=update)
            engine.set_gates(alpha)
            samples = dict(engine.sample(rows, SamplingParams(20, temperature=1.0)))
            print("max error", worst_difference(put_gates(model, alpha), rows, samples))


if __name__ == "__main__":  # the engine's process imports this file again
    main()
