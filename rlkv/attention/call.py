"""Facts that the layers of one forward call share: where each row's tokens lie, and the masks.

transformers calls the mask function once per forward call and hands its result, a
:class:`MixedCall`, to each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from rlkv.utils.numbers import check_whole

COMPARED_AT_ONCE = 2**26  # entries of masks: 64 MB, where whole ones of 64k tokens take 4 GB each

# keyword arguments of an attention call that do not change its result, as they are meant for other
# parts of the model, or that every attention here heeds (rlkv.attention.softmax)
UNDERSTOOD = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "s_aux",
        "softcap",
        "use_cache",
    }
)
# what transformers' own attention "sdpa" heeds as well, in layers that are left to it
OF_SDPA = frozenset({"is_causal", "position_bias"})
# a prepared mask already leaves the tokens outside of the window out
OF_MASKED_SDPA = OF_SDPA | {"sliding_window"}


def refuse_variants(
    arguments: dict[str, Any], who: str, also: frozenset[str] = frozenset()
) -> None:
    """Raise ``ValueError`` if an attention call has a keyword argument that ``who`` would ignore.

    Whatever is not known to be harmless may change the result (position biases, packed sequences),
    so it is refused unless its value is None or False.

    Args:
        arguments: the keyword arguments of the call.
        who: what computes the attention, as errors name it.
        also: names that ``who`` heeds.
    """
    ignored = []
    for name, value in arguments.items():
        if name in UNDERSTOOD or name in also or value is None:
            continue
        if name == "is_causal":
            if not value:
                ignored.append("is_causal=False")
        elif value is not False:
            ignored.append(name)
    if "output_attentions" in ignored:
        raise ValueError(f"{who} does not compute attention weights: leave output_attentions out")
    if ignored:
        raise ValueError(
            f"{who} does not support attention with {', '.join(sorted(ignored))}, which this model "
            "or call asks for: use a model with plain causal softmax attention, without packed "
            "sequences"
        )


class Unread:
    """A value on its way through a model to an attention function, which no module may look into.

    Raises:
        ValueError: for any use as a tensor.
    """

    what: ClassVar[str]
    rule: ClassVar[str] = ""  # a likelier mistake than the model, with which the sentence begins

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # Python's own protocols, such as copying
            raise AttributeError(name)
        self._refuse(name)

    @classmethod
    def __torch_function__(cls, function: Any, *args: Any, **kwargs: Any) -> NoReturn:
        cls._refuse(getattr(function, "__name__", str(function)))

    @classmethod
    def _refuse(cls, operation: str) -> NoReturn:
        raise ValueError(
            f"{cls.rule}the attention modules of this model compute with the {cls.what} themselves "
            f"({operation}) before they call the attention function, so its heads cannot be served "
            "or gated one by one: use a model that hands them on unchanged, such as Llama, Qwen or "
            "Mistral"
        )


@dataclass(frozen=True)
class LocalSizes:
    """The tokens that the local branch sees.

    Attributes:
        sink: S, the first tokens.
        window: W, the last ones, the query's own included.
    """

    sink: int
    window: int

    def __post_init__(self) -> None:
        check_whole("sink", self.sink, 0)
        check_whole("window", self.window, 1)


@dataclass(frozen=True)
class Rows:
    """The place of the real tokens of every row.

    Attributes:
        first: int64 ``[B]``, the first real token's place among the K key positions.
        end: int64 ``[B]``; real tokens are ``first <= k < end``.
        left: whether any row is padded on the left.
        right: whether any row is padded on the right.
    """

    first: Tensor
    end: Tensor
    left: bool
    right: bool

    @classmethod
    def of_mask(
        cls, padding_BK: Tensor | None, batch_size: int, kv_length: int, device: torch.device
    ) -> Rows:
        """Read a mask ``padding_BK``: bool, True for real tokens; None: no padding.

        Raises:
            ValueError: for padding between tokens, or a mask of another shape.
        """
        if padding_BK is not None and padding_BK.shape != (batch_size, kv_length):
            raise ValueError(
                f"the attention_mask has shape {tuple(padding_BK.shape)}, but the call has "
                f"{batch_size} rows of {kv_length} tokens, those in the cache included: pass one "
                "entry per token"
            )
        if padding_BK is None or bool(padding_BK.all()):
            first = torch.zeros(batch_size, dtype=torch.int64, device=device)
            return cls(first, torch.full_like(first, kv_length), left=False, right=False)
        order = torch.arange(kv_length, device=device)
        first = padding_BK.int().argmax(-1)
        end = first + padding_BK.sum(-1)
        solid = (order >= first[:, None]) & (order < end[:, None])
        if not bool((solid == padding_BK).all()):
            raise ValueError(
                "the attention_mask has padding between the tokens of a row: gated attention takes "
                "padding on the left and on the right of a row only"
            )
        return cls(first, end, left=bool(first.any()), right=bool((end < kv_length).any()))


def local_rule(rows: Rows, sink: int, window: int) -> Callable[[Any, Any, Any, Any], Any]:
    """Return the mask of local attention as a function of (row, head, query, key).

    Queries and keys are positions; all four may be integers or tensors.  The result is True for the
    row's first ``sink`` real tokens and for the last ``window`` tokens, the query's own included,
    never for a later token or padding.  A padding query sees itself, so that its softmax is
    defined.
    """
    first = rows.first
    end = rows.end

    def visible(row: Any, head: Any, query: Any, key: Any) -> Any:
        kept = (query - key < window) | (key < first[row] + sink)
        real = (key >= first[row]) & (key < end[row])
        return ((key <= query) & kept & real) | (key == query)

    return visible


def is_plain_causal(call: dict[str, Any]) -> bool:
    """Return whether the arguments of a mask function describe plain causal attention.

    Models with images (Gemma 3) let the tokens of one image see each other.  Of a text without
    images their mask function is another one, and the mask is that of causal attention.
    """
    if call["mask_function"] is causal_mask_function:
        return True
    # a sliding window, which may be longer than the text; that of Gemma 3 has no size here
    if call.get("local_size") is not None or call.get("use_vmap"):
        return False
    queries = call["q_length"]
    block = max(1, COMPARED_AT_ONCE // (call["batch_size"] * call["kv_length"]))
    for begin in range(0, queries, block):
        part = {**call, "q_length": min(block, queries - begin), "allow_is_causal_skip": False}
        part["q_offset"] = call["q_offset"] + begin
        found = sdpa_mask(**part)
        expected = sdpa_mask(**{**part, "mask_function": causal_mask_function})
        if found is None or expected is None or not torch.equal(found, expected):
            return False
    return True


class StockMask(Unread):
    """A mask of full attention, which layers that stay as they are take in the form of ``sdpa``.

    Attributes:
        make_stock_mask: makes it.
    """

    what: ClassVar[str] = "attention mask"
    make_stock_mask: Callable[..., Tensor | None]
    _made: dict[Any, Any]

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return ``make()``, computed by the first layer that asks for ``key``."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def to(self, *device: Any, **options: Any) -> Self:
        """Return itself: accelerate moves a layer's arguments to the layer's device.

        Each layer asks for what it needs on the device of its queries.
        """
        return self

    def stock_mask(self) -> Tensor | None:
        """Return the mask of ``sdpa``: bool ``[B, 1, Q, K]``, or None for plain causal."""
        return self.once("stock", self.make_stock_mask)

    def __getitem__(self, index: Any) -> Tensor:
        """Return a part of the mask of ``sdpa``, bool ``[B, 1, Q, K]``.

        Layers that read the keys of others (Gemma 4) ask only for the last queries.  They have no
        gate: a gated layer refuses such a mask.
        """
        mask = self.make_stock_mask(allow_is_causal_skip=False)
        assert mask is not None
        return mask[index]


@dataclass(eq=False)
class MixedCall(StockMask):
    """One forward call: its queries, its keys, and what its layers compute once.

    S and W come from each layer's gate, so that adapters with different sizes can coexist.

    Attributes:
        q_offset: the position of the first query.
        padding_BK: the 2D mask.
    """

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: Any
    padding_BK: Tensor | None
    causal: bool
    make_stock_mask: Callable[..., Tensor | None]
    _made: dict[Any, Any] = field(default_factory=dict)

    def rows(self, device: torch.device) -> Rows:
        """Return where each row's real tokens lie, on ``device``."""

        def make() -> Rows:
            padding = None if self.padding_BK is None else self.padding_BK.to(device)
            return Rows.of_mask(padding, self.batch_size, self.kv_length, device)

        return self.once(("rows", device), make)

    def dense_local_mask(self, sink: int, window: int, device: torch.device) -> Tensor:
        """Return the mask of local attention: bool ``[B, 1, Q, K]``."""

        def make() -> Tensor:
            rule = local_rule(self.rows(device), sink, window)
            row = torch.arange(self.batch_size, device=device)[:, None, None, None]
            key = torch.arange(self.kv_length, device=device)
            query = torch.arange(self.q_length, device=device)[:, None] + self.q_offset
            return rule(row, None, query, key)

        return self.once(("local", sink, window, device), make)


class RecordedCall(MixedCall):
    """A call of one token in a CUDA graph: only the device knows how many keys precede it.

    ``q_offset`` is int64 ``[1]`` there, K the entries of the cache's buffers, and ``padding_BK`` is
    True for each row's tokens up to the query.
    """

    def rows(self, device: torch.device) -> Rows:
        def make() -> Rows:
            assert self.padding_BK is not None
            first = self.padding_BK.int().argmax(-1)
            end = (self.q_offset + 1).expand_as(first)
            return Rows(first, end, left=True, right=False)

        return self.once(("rows", device), make)

    def addend(self, key: Any, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the bool ``mask``, which ``key`` names, as what is added to logits.

        Fused kernels of a GPU would make it out of a bool mask in each layer.
        """

        def make() -> Tensor:
            return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))

        return self.once(("addend", key, dtype), make)


def mixed_mask(
    *, q_length: int, kv_length: int, q_offset: int | Tensor, **kwargs: Any
) -> MixedCall | Tensor | None:
    """Describe the call: the mask function of ``rlkv_mixed``.

    Sliding-window and chunked layers (``local_size``) get their usual mask.

    Raises:
        ValueError: with a static cache, whose keys do not end at the query.
    """
    stock_mask = partial(
        sdpa_mask, q_length=q_length, kv_length=kv_length, q_offset=q_offset, **kwargs
    )
    if kwargs.get("local_size") is not None:
        return stock_mask()
    padding = kwargs.get("attention_mask")
    has_mask = padding is not None and padding.shape[-1] == kv_length
    # that of a static cache has no dimension, and counts the token before attention reads it
    is_place = isinstance(q_offset, Tensor) and q_offset.ndim == 1
    is_recorded = is_place and q_length == 1 and has_mask
    ends_there = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_length
    if kwargs.get("kv_offset") or not (is_recorded or ends_there):
        raise ValueError(
            "gated attention does not work with a static or offloaded static cache "
            "(cache_implementation='static'): leave cache_implementation at its default"
        )
    return (RecordedCall if is_recorded else MixedCall)(
        batch_size=kwargs["batch_size"],
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        padding_BK=padding,
        causal=is_plain_causal(stock_mask.keywords),
        make_stock_mask=stock_mask,
    )
