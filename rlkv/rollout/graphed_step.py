"""A decoding step as one launch: the whole forward call in a CUDA graph, over the cache's buffers.

At small batches a GPU waits for Python between some hundred kernels of a token.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache as cached
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from rlkv.cache.fixed_step import FixedStep, reallocation_layers

AHEAD = 256  # tokens for which a graph gets room
_REFUSED: WeakSet[nn.Module] = WeakSet()  # models that no graph could be made of


class GraphedStep:
    """Logits of the next token of rows that stay the same, step by step, without a forward call.

    A step takes the shapes ids ``[R, 1]``, padding int64 ``[R]``, running bool ``[R]``, and gives ``[R, V]``.
    """

    def __init__(self, model: Any, cache: Any, fixed: FixedStep, ids: Tensor, padding: Tensor, running: Tensor) -> None:
        self._model, self._cache, self._fixed = model, cache, fixed
        self._ids, self._padding, self._running = ids.clone(), padding.clone(), running.clone()
        with self._fixed.recorded():
            self._replay, self._logits = record_graph(self._forward, ids.device)

    @property
    def has_room(self) -> bool:
        return self._fixed.has_room

    def __call__(self, ids: Tensor, running: Tensor) -> Tensor:
        """The logits, which the next step overwrites."""
        assert self.has_room
        self._ids.copy_(ids)
        self._running.copy_(running)
        self._replay()
        self._fixed.advance()
        return self._logits

    def _forward(self) -> Tensor:
        start = self._fixed.decode_step.start
        position = (start - self._padding).clamp(min=0) * self._running
        output = self._model(
            input_ids=self._ids, position_ids=position[:, None], past_key_values=self._cache, use_cache=True
        )
        start += 1
        return output.logits[:, -1]


def record_graph(forward: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
    """``forward`` as a CUDA graph of ``device``: what runs it again, and its result, which stays in place."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # the outer context leaves the capture's stream also where the end of a capture raises
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, stream=_capture_stream(device)):
            result = forward()
    return graph.replay, result


@cached
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device: torch's own is on the device that was current first."""
    return torch.cuda.Stream(device)


def graphed_step(model: Any, cache: Any, ids: Tensor, padding: Tensor, running: Tensor) -> GraphedStep | None:
    """A step for these rows, if the kernel decodes them and a graph can be made of the model."""
    if model in _REFUSED or not reallocation_layers(cache):
        return None
    fixed = FixedStep(cache, AHEAD)
    if not fixed.has_room:
        return None
    try:
        return GraphedStep(model, cache, fixed, ids, padding, running)
    except RuntimeError as error:
        _REFUSED.add(model)
        # the end of a capture that failed raises an error of its own
        reason = str(error.__context__ or error).strip().partition("\n")[0]
        warnings.warn(f"no CUDA graph could be made of the model ({reason}): tokens take longer", stacklevel=2)
        return None
