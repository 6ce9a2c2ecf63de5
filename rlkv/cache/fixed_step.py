"""Steps of one token per row at fixed addresses, so that a graph of one step is that of the next."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlkv.cache.layer import ReallocationLayer
from rlkv.cache.plan import CallLayout, CallPart
from rlkv.cache.reallocation import HeadReallocationCache
from rlkv.cache.stores import FullStore


class FixedStep:
    """What the decode kernel reads of a cache while its rows stay the same.

    The kernel reads positions on the device, so a step needs ``decode_step.start += 1`` there and :meth:`advance` here.

    Attributes:
        decode_step: what all layers share.
    """

    def __init__(self, cache: HeadReallocationCache, ahead: int) -> None:
        """Make room for ``ahead`` more columns, or as many as generation may take."""
        self.columns, self._state, self._layers = cache.get_seq_length(), cache.state, reallocation_layers(cache)
        device = self._layers[0].device
        for name in ("padding", "sinks"):  # a copy to the device could not be captured
            if (rows := getattr(self._state, name)) is not None:
                setattr(self._state, name, rows.to(device))
        stores = [store for layer in self._layers for store in layer.stores]
        full = [store.look_ahead(self.columns, ahead) for store in stores if isinstance(store, FullStore)]
        self._room = min(full, default=sys.maxsize)
        self.decode_step = CallLayout(CallPart(self.columns, 1, in_full=False), self._state, device).decode_step

    @property
    def has_room(self) -> bool:
        """Whether the buffers hold another token as they are."""
        return self.columns < self._room

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Within it a forward call of one token reads ``decode_step``, and counts for nothing afterwards."""
        self._state.decode_step = self.decode_step
        try:
            yield
        finally:
            self._state.decode_step = None
            self._set_length()

    def advance(self) -> None:
        """Count a token that was stored without a forward call."""
        self.columns += 1
        self._set_length()

    def _set_length(self) -> None:
        for layer in self._layers:
            layer.length = self.columns


def reallocation_layers(cache: Any) -> list[ReallocationLayer]:
    """The layers of a cache, if all of them decoded their last token by the kernel on one GPU; else none."""
    layers = cache.layers if isinstance(cache, HeadReallocationCache) else []
    fixed = [layer for layer in layers if isinstance(layer, ReallocationLayer) and layer.by_kernel]
    return fixed if len(fixed) == len(layers) and len({layer.device for layer in fixed}) == 1 else []
