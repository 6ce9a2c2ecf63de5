"""A decoding step as one launch: a CUDA graph of the forward call, over the cache's buffers.

At small batches a GPU waits for Python, which launches some hundred kernels for a token.

Shapes: R rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache as cached
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from rlkv.attention.mixed import IMPLEMENTATION, PLAIN
from rlkv.cache import HeadReallocationCache
from rlkv.cache.layer import ReallocationLayer
from rlkv.cache.plan import CallLayout, CallPart
from rlkv.cache.reallocation import GrowingCache
from rlkv.cache.stores import FullStore
from rlkv.models.loading import cache_argument
from rlkv.utils.runtime import first_line

AHEAD = 256  # tokens for which a graph gets room
RECORDABLE = (IMPLEMENTATION, PLAIN)  # attention that reads its place on the device
_REFUSED: WeakSet[nn.Module] = WeakSet()  # models that no graph could be made of


class GraphedStep(ABC):
    """A step of one token for rows that stay the same, without a forward call.

    The forward call reads the place of its token on the device, so that the graph of one step is
    that of the next: it ends with ``place += 1`` there, and each step counts its token here.

    Args:
        cache: holds ``columns`` tokens of each row, all on one GPU.
        room: columns that its buffers hold as they are.
        ids: int64 ``[R, 1]``, tokens of the next step.
        padding: int64 ``[R]``, columns of left padding.
        running: bool ``[R]``, rows that have not ended.

    Raises:
        RuntimeError: if the forward call cannot be recorded; the cache is then as it was.
    """

    def __init__(
        self, model: Any, cache: Any, room: int, ids: Tensor, padding: Tensor, running: Tensor
    ) -> None:
        self._model = model
        self._cache = cache
        self._columns = cache.get_seq_length()
        self._room = room
        self._ids = ids.clone()
        self._padding = padding.clone()
        self._running = running.clone()
        self._place = self._new_place()
        with self._recording():
            self._replay, self._logits = record_graph(self._forward, ids.device)

    @abstractmethod
    def _new_place(self) -> Tensor:
        """Return where the next token goes: int64 ``[1]`` or ``[]``, on the device."""

    @abstractmethod
    def _recording(self) -> AbstractContextManager[None]:
        """Let the cache read the place inside; it stores nothing."""

    def _mask(self) -> Tensor | None:
        """Return the attention mask of a step, bool ``[R, room]``, where the cache needs one."""
        return None

    @abstractmethod
    def settle(self) -> None:
        """Tell the cache how many tokens it holds: before anything but the next step uses it."""

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
        return self._logits

    def _forward(self) -> Tensor:
        position = (self._place - self._padding).clamp(min=0) * self._running
        output = self._model(
            input_ids=self._ids,
            attention_mask=self._mask(),
            position_ids=position[:, None],
            use_cache=True,
            **{cache_argument(): self._cache},
        )
        self._place += 1
        return output.logits[:, -1]


class ReallocatedStep(GraphedStep):
    """A step over a :class:`~rlkv.cache.HeadReallocationCache`, by the decode kernel."""

    def _new_place(self) -> Tensor:
        state = self._cache.state
        device = self._ids.device
        if state.padding is not None:  # a copy to the device could not be captured
            state.padding = state.padding.to(device)
        if state.sinks is not None:
            state.sinks = state.sinks.to(device)
        part = CallPart(self._columns, 1, in_full=False)
        self._decode_step = CallLayout(part, state, device).decode_step
        return self._decode_step.start

    @contextmanager
    def _recording(self) -> Iterator[None]:
        self._cache.state.decode_step = self._decode_step
        try:
            yield
        finally:
            self._cache.state.decode_step = None
            self.settle()

    def settle(self) -> None:
        for layer in self._cache.layers:
            layer.length = self._columns
            layer.in_call = False  # where the recording ended in an error


class GrowingStep(GraphedStep):
    """A step over a full cache of our own, by the attention of models with or without gates."""

    def _new_place(self) -> Tensor:
        self._column = torch.arange(self._room, device=self._ids.device)
        return torch.tensor([self._columns], device=self._ids.device)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        for layer in self._cache.layers:
            layer.place = self._place
        try:
            yield
        finally:
            for layer in self._cache.layers:
                layer.place = None

    def _mask(self) -> Tensor:
        return (self._column >= self._padding[:, None]) & (self._column <= self._place)

    def settle(self) -> None:
        for layer in self._cache.layers:
            layer.set_length(self._columns)


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
    """Make a step of rows whose last token was decoded; None if it cannot be made.

    Other arguments as of :class:`GraphedStep`.
    """
    if model in _REFUSED:
        return None
    columns = cache.get_seq_length()
    room = sys.maxsize
    step: type[GraphedStep]
    try:
        if isinstance(cache, GrowingCache) and _takes_places(model, cache):
            step = GrowingStep
            room = min(layer.look_ahead(AHEAD) for layer in cache.layers)
        elif layers := _kernel_layers(cache):
            step = ReallocatedStep
            for layer in layers:
                for store in layer.stores:
                    if isinstance(store, FullStore):
                        room = min(room, store.look_ahead(columns, AHEAD))
        else:
            return None
        if columns >= room:
            return None
        return step(model, cache, room, ids, padding, running)
    except RuntimeError as error:
        # the end of a capture that failed raises an error of its own
        reason = first_line(error.__context__ or error)
        if _ran_out_of_memory(error):
            reason = "out of memory"  # not for good: fewer rows, or another job's end, make room
        else:
            _REFUSED.add(model)
        warnings.warn(
            f"no CUDA graph could be made of the model ({reason}): tokens take longer", stacklevel=2
        )
        return None


def _ran_out_of_memory(error: BaseException | None) -> bool:
    """Return whether memory ended, as torch, CUDA or cuBLAS says it, before ``error`` too."""
    while error is not None:
        said = str(error)
        if "out of memory" in said or "ALLOC_FAILED" in said:
            return True
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__context__
    return False


def _takes_places(model: Any, cache: GrowingCache) -> bool:
    """Return whether the model is on one GPU, and its attention one that reads places there."""
    devices = {layer.keys.device for layer in cache.layers}
    is_on_gpu = len(devices) == 1 and model.device.type == "cuda"
    return is_on_gpu and model.config._attn_implementation in RECORDABLE


def _kernel_layers(cache: Any) -> list[ReallocationLayer]:
    """Return the layers, if all decoded their last token by the kernel on one GPU; else none."""
    if not isinstance(cache, HeadReallocationCache):
        return []
    # a linear layer next to attention has states of its own, which no graph was tried with
    layers = [layer for layer in cache.layers if type(layer) is ReallocationLayer]
    by_kernel = all(layer.by_kernel for layer in layers) and len(layers) == len(cache.layers)
    return layers if by_kernel and len({layer.device for layer in layers}) == 1 else []
