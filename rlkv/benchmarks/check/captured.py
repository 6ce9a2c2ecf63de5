"""A launch as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlkv.benchmarks.check.one import Setting


def captured(launch: Callable[[], Tensor], undo: Callable[[], object], setting: Setting) -> Callable[[], Tensor]:
    """``launch`` itself on a CPU; on a GPU what replays its graph, once the kernel is compiled and that ``undo``ne."""
    if not setting.on_gpu:
        return launch
    launch()
    undo()
    torch.cuda.synchronize(setting.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
