"""HeadReallocationCache: the full KV cache for the heads that need it, a small one for all others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from rlkv.cache.evicting import EvictingStore, KeptTokens
from rlkv.cache.layer import ReallocationLayer
from rlkv.cache.plan import CacheSettings, CacheState, CallLayout
from rlkv.cache.stores import RingStore, Store
from rlkv.eviction.base import EvictionPolicy


class HeadReallocationCache(Cache):
    """A transformers cache in which compressible heads hold a constant number of tokens.

    It needs the attention implementation ``rlkv_realloc`` (``rlkv.compress`` sets both).

    *Memory.*  With B rows, F full and C compressible heads over all layers, heads of D elements of e bytes, and
    T tokens (left padding counts), the KV tensors hold exactly ::

        nbytes      = 2 * B * D * e * (F * capacity + C * (S + W))
        full_nbytes = 2 * B * D * e * (F + C) * T

    where ``capacity = T`` if ``reserve=T`` was asked for, and otherwise is the length of the first call rounded
    up to a multiple of 16, growing by a sixteenth (again rounded up to 16) whenever it is used up; ``generate``
    under ``rlkv.compress`` cuts the headroom at the length at which generation must end.

    *What a token sees.*  Full heads: everything before it.  Compressible heads: the first S real tokens of its row
    and the last W, itself included; in a call of several tokens (a prompt, or a later chat turn) with
    ``prefill="full"`` additionally all earlier tokens of that same call, which is compressed when it has been read.

    *Eviction.*  With a policy, compressible heads keep what it chooses instead: up to ``budget + buffer`` entries of
    each row (more for policies without a fixed budget).  ``nbytes`` then also counts the queries and scores that the
    policy needs.  In a call of several tokens, ``prefill="full"`` evicts at its end and ``"local"`` at the very
    tokens at which one-token calls would.  Positions stay those of the text.

    Rows may be padded on the left, the same in every call.  Beams are reordered; ``crop`` is refused.

    Args:
        full: bool ``[num_layers, num_kv_heads]``, True for full heads (``HeadAllocation.full``).
        sink: S, real tokens at the start of each row that compressible heads keep.
        window: W, last tokens that they keep; the current one counts.
        prefill: ``"full"`` or ``"local"``.
        reserve: tokens for which full heads get memory at once, exactly; 0: grow with the text.
        eviction: the policy of the compressible heads; None: ``sink`` and ``window``.
        record: note the positions of cached tokens: ``kept`` lists what each eviction kept, ``held`` what is cached.
        stock_layers: makes transformers' own cache for the layers, by number, that are left alone (sliding windows).

    Raises:
        ValueError: for a malformed allocation, sizes out of range or an unknown ``prefill``.
    """

    def __init__(
        self,
        full: torch.Tensor,
        sink: int = 16,
        window: int = 64,
        prefill: str = "full",
        reserve: int = 0,
        eviction: EvictionPolicy | None = None,
        record: bool = False,
        stock_layers: Callable[[], dict[int, DynamicSlidingWindowLayer]] = dict,
    ) -> None:
        full = torch.as_tensor(full)
        if full.dtype != torch.bool or full.ndim != 2:
            raise ValueError(f"full must be bool [layers, KV heads], got {full.dtype} {list(full.shape)}")
        if reserve < 0:
            raise ValueError(f"reserve is {reserve}: it must be 0 or more tokens")
        self.state = CacheState(CacheSettings(sink, window, prefill, eviction), record=record)
        self.full = full.cpu()
        self.kept: list[KeptTokens] = []
        self._make_stock, self._stock = stock_layers, stock_layers()
        self._layers = {
            layer: ReallocationLayer(heads, self.state, self._compressible_store(layer), reserve)
            for layer, heads in enumerate(self.full)
            if layer not in self._stock
        }
        every: dict[int, CacheLayerMixin] = {**self._stock, **self._layers}
        super().__init__(layers=[every[layer] for layer in sorted(every)])

    def _compressible_store(self, layer: int) -> Callable[[list[int]], Store]:
        policy = self.settings.eviction
        if policy is None:
            return lambda heads: RingStore(len(heads), self.state)
        return lambda heads: EvictingStore(heads, layer, self.state, policy, self.kept)

    @property
    def settings(self) -> CacheSettings:
        return self.state.settings

    def fill(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """For measurements: store the states ``[B, H, T, D]`` of a prompt in every layer of an empty cache."""
        plan = CallLayout((0, key.shape[2]), self.state, key.device)
        if self.settings.eviction is not None:
            raise ValueError("fill() has no queries to give an eviction policy: let the model read a prompt instead")
        for layer in self._layers.values():
            layer.store(key[:, :, None], key, value, plan, 1.0)

    # memory

    def nbytes(self) -> int:
        """Bytes of KV held: all KV tensors as allocated, with the unused headroom of the growing buffers."""
        return self._stock_nbytes() + sum(tensor.nbytes for layer in self._allocated() for tensor in layer.tensors())

    def used_nbytes(self) -> int:
        """Bytes of the entries in use: ``nbytes()`` less headroom and empty entries."""
        return self._stock_nbytes() + sum(layer.used_nbytes() for layer in self._allocated())

    def full_nbytes(self) -> int:
        """Bytes that the full cache would hold for the same tokens (as transformers' DynamicCache does)."""
        return self._stock_nbytes() + sum(layer.full_nbytes() for layer in self._allocated())

    def num_heads(self) -> tuple[int, int]:
        """(full heads, compressible heads) over all layers."""
        num_full = int(self.full.sum())
        return num_full, self.full.numel() - num_full

    def _allocated(self) -> list[ReallocationLayer]:
        return [layer for layer in self._layers.values() if layer.is_initialized]

    def _stock_nbytes(self) -> int:
        """Bytes of the layers that are left alone: held in any case, so they count on both sides."""
        held = [layer for layer in self._stock.values() if layer.is_initialized]
        return sum(tensor.nbytes for layer in held for tensor in (layer.keys, layer.values) if tensor is not None)

    def held(self, row: int) -> torch.Tensor:
        """Which tokens of a row each head holds: bool ``[layers, KV heads, real tokens of the row]``.

        Under an eviction policy it needs a cache made with ``record=True``.
        """
        padding = self.state.padding
        tokens = self.get_seq_length() - (int(padding.counts[row]) if padding is not None else 0)
        held = torch.zeros(*self.full.shape, tokens, dtype=torch.bool)
        for number, layer in self._layers.items():
            held[number] = layer.held(row, tokens)
        for number, stock in self._stock.items():
            assert stock.keys is not None
            held[number] = torch.arange(tokens) >= tokens - stock.keys.shape[2]
        return held

    # rows

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices``, int64 ``[B']``."""
        for layer in self._layers.values():
            layer.select_rows(indices)
        for stock in self._stock.values():
            if stock.is_initialized:
                stock.batch_select_indices(indices.to(stock.device))
        if self.state.padding is not None:
            self.state.padding = self.state.padding.select(indices)
        if self.state.row_counts is not None:
            self.state.row_counts = self.state.row_counts.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        layers = self._allocated()
        if layers:
            self.batch_select_indices(torch.arange(layers[0].batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused with ValueError for anything but 0: see :meth:`ReallocationLayer.crop`."""
        for layer in self._layers.values():
            layer.crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens, the padding and what was kept; memory stays."""
        self.state.padding = self.state.row_counts = None
        self.kept.clear()
        for layer in self._layers.values():
            layer.reset()
        # transformers' own reset of a sliding layer keeps its length
        self._stock = self._make_stock()
        for number, stock in self._stock.items():
            self.layers[number] = stock
