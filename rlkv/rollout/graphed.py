"""A decoding step as one launch: a CUDA graph of the forward call, over the cache's buffers.

At small batches a GPU waits for Python, which launches some hundred kernels for a token.

Shapes: R rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache as cached
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from rlkv.cache import HeadReallocationCache
from rlkv.cache.layer import ReallocationLayer
from rlkv.cache.plan import CallLayout, CallPart
from rlkv.cache.stores import FullStore

AHEAD = 256  # tokens for which a graph gets room
_REFUSED: WeakSet[nn.Module] = WeakSet()  # models that no graph could be made of


class GraphedStep:
    """A step of one token for rows that stay the same, without a forward call.

    The decode kernel reads positions on the device, so that the graph of one step is that of the
    next: the forward call ends with ``start += 1`` there, and each step counts its token here.

    Args:
        cache: holds ``columns`` tokens of each row, in ``layers``, all on one GPU.
        room: columns that the layers' buffers hold as they are.
        ids: int64 ``[R, 1]``, tokens of the next step.
        padding: int64 ``[R]``, columns of left padding.
        running: bool ``[R]``, rows that have not ended.

    Raises:
        RuntimeError: if the forward call cannot be recorded; the cache is then as it was.
    """

    def __init__(
        self,
        model: Any,
        cache: HeadReallocationCache,
        layers: list[ReallocationLayer],
        room: int,
        ids: Tensor,
        padding: Tensor,
        running: Tensor,
    ) -> None:
        self._model = model
        self._cache = cache
        self._layers = layers
        self._columns = cache.get_seq_length()
        self._room = room
        self._ids = ids.clone()
        self._padding = padding.clone()
        self._running = running.clone()
        state = cache.state
        device = layers[0].device
        if state.padding is not None:  # a copy to the device could not be captured
            state.padding = state.padding.to(device)
        if state.sinks is not None:
            state.sinks = state.sinks.to(device)
        part = CallPart(self._columns, 1, in_full=False)
        self._decode_step = CallLayout(part, state, device).decode_step
        state.decode_step = self._decode_step
        try:
            self._replay, self._logits = record_graph(self._forward, device)
        finally:
            state.decode_step = None
            self._set_length()  # recording has stored nothing

    @property
    def has_room(self) -> bool:
        """Return whether the buffers hold another token as they are."""
        return self._columns < self._room

    def __call__(self, ids: Tensor, running: Tensor) -> Tensor:
        """Store the tokens ``ids``: logits ``[R, V]``, which the next step overwrites."""
        assert self.has_room
        self._ids.copy_(ids)
        self._running.copy_(running)
        self._replay()
        self._columns += 1
        self._set_length()
        return self._logits

    def _forward(self) -> Tensor:
        start = self._decode_step.start
        position = (start - self._padding).clamp(min=0) * self._running
        output = self._model(
            input_ids=self._ids,
            position_ids=position[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        start += 1
        return output.logits[:, -1]

    def _set_length(self) -> None:
        for layer in self._layers:
            layer.length = self._columns


def record_graph(
    forward: Callable[[], Tensor], device: torch.device
) -> tuple[Callable[[], None], Tensor]:
    """Record ``forward`` as a CUDA graph.

    Returns:
        What runs it again, and its result, which stays in place.
    """
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # the outer context leaves the capture's stream also where the end of a capture raises
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, stream=_capture_stream(device)),
        ):
            result = forward()
    return graph.replay, result


@cached
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device: torch's own is on the device that was current first."""
    return torch.cuda.Stream(device)


def graphed_step(
    model: Any, cache: Any, ids: Tensor, padding: Tensor, running: Tensor
) -> GraphedStep | None:
    """Make a step, if the kernel decoded the last token of these rows; None if it cannot be made.

    Other arguments as of :class:`GraphedStep`.
    """
    layers = _kernel_layers(cache)
    if model in _REFUSED or not layers:
        return None
    columns = cache.get_seq_length()
    room = sys.maxsize
    for layer in layers:
        for store in layer.stores:
            if isinstance(store, FullStore):
                room = min(room, store.look_ahead(columns, AHEAD))
    if columns >= room:
        return None
    try:
        return GraphedStep(model, cache, layers, room, ids, padding, running)
    except RuntimeError as error:
        _REFUSED.add(model)
        # the end of a capture that failed raises an error of its own
        reason = str(error.__context__ or error).strip().partition("\n")[0]
        warnings.warn(
            f"no CUDA graph could be made of the model ({reason}): tokens take longer", stacklevel=2
        )
        return None


def _kernel_layers(cache: Any) -> list[ReallocationLayer]:
    """Return the layers, if all decoded their last token by the kernel on one GPU; else none."""
    if not isinstance(cache, HeadReallocationCache):
        return []
    layers = [layer for layer in cache.layers if isinstance(layer, ReallocationLayer)]
    by_kernel = all(layer.by_kernel for layer in layers) and len(layers) == len(cache.layers)
    return layers if by_kernel and len({layer.device for layer in layers}) == 1 else []
