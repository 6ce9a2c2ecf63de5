"""Bytes of all tensors that are alive, and their peak, as a GPU's allocator would be asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside, every new storage is counted until it is freed; ``there`` counts from the start.

    ``largest``: the most elements of a new one.
    """

    def __init__(self, there: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self.now = self.peak = self.largest = 0
        for tensor in there:
            self._note(tensor)
        self.at_start = self.now
        self.largest = 0

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            self._live[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            self.largest = max(self.largest, storage.nbytes() // tensor.element_size())
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._live.pop(key)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return out
