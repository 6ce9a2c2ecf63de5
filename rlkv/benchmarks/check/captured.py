"""A launch as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rlkv.benchmarks.check.one import Setting
from rlkv.rollout.graphed_step import record_graph


def captured(launch: Callable[[], Tensor], undo: Callable[[], object], setting: Setting) -> Callable[[], Tensor]:
    """``launch`` itself on a CPU; on a GPU what replays its graph, once the kernel is compiled and that ``undo``ne."""
    if not setting.on_gpu:
        return launch
    launch()
    undo()
    run, out = record_graph(launch, setting.device)

    def replay() -> Tensor:
        run()
        return out

    return replay
