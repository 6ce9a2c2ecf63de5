"""The contract of a token-eviction policy, and what policies share: budgets, selection, attention.

Shapes: B rows, H KV heads, Q = H * G query heads, N cached entries, a recent queries, D size of a
head.  L = B * H.  Entries are in the order of their tokens.  Padding comes first: ``valid`` is
False before a row's first entry.  The a queries are those of the last a entries, scaled such that
``query . key / sqrt(D)`` is the attention logit.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from math import inf
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkv.utils.devices import moved
from rlkv.utils.files import parse_json
from rlkv.utils.numbers import MOST

# Numbers in the largest temporary tensor (16 MB in float32), unless one row of one head needs more.
FLOATS = 2**22


def items_at_once(floats_each: int) -> int:
    """Return how many items of ``floats_each`` numbers fit into ``FLOATS``, at least one."""
    return max(1, FLOATS // max(1, floats_each))


def pieces(total: int, floats_each: int) -> Iterator[slice]:
    """Yield slices that cover ``range(total)``, each of :func:`items_at_once`."""
    step = items_at_once(floats_each)
    return (slice(begin, min(begin + step, total)) for begin in range(0, total, step))


class FlatHeads(NamedTuple):
    """The KV heads of all rows: keys ``[L, N, D]``, queries ``[L, G, a, D]``, valid ``[L, N]``."""

    keys: Tensor
    queries: Tensor
    valid: Tensor

    @classmethod
    def of(cls, keys: Tensor, queries: Tensor, valid: Tensor) -> FlatHeads:
        """Flatten keys ``[B, H, N, D]``, queries ``[B, Q, a, D]`` and valid ``[B, N]``."""
        h = keys.shape[1]
        grouped = queries.unflatten(1, (h, queries.shape[1] // h))
        return cls(keys.flatten(0, 1), grouped.flatten(0, 1), valid.repeat_interleave(h, dim=0))


def attention_logits(keys: Tensor, queries: Tensor) -> Tensor:
    """Compute ``query . key / sqrt(D)``: ``[L, N, D]`` and ``[L, G, a, D]`` -> ``[L, G, a, N]``."""
    scaled = queries.float() * queries.shape[-1] ** -0.5
    # the queries of a group as rows of one product: a broadcast one would copy the keys G times
    logits = scaled.flatten(1, 2) @ keys.float().mT
    return logits.unflatten(1, queries.shape[1:3])


def visible(valid: Tensor, queries: slice, hidden: int = 0) -> Tensor:
    """Return which entries each query sees: valid ``[L, N]`` -> ``[L, a, N]``.

    Entries up to its own, without padding and the last ``hidden``.
    """
    n = valid.shape[-1]
    entry = torch.arange(n, device=valid.device)
    seen = (entry <= entry[queries, None]) & (entry < n - hidden)
    return seen & valid[:, None, :]


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Compute the softmax over the last dimension where ``mask``, 0 elsewhere.

    0 where nothing is left.  Overwrites ``logits``.
    """
    return logits.masked_fill_(~mask, -torch.inf).softmax(dim=-1).masked_fill_(~mask, 0)


def sum_rows(values: Tensor) -> Tensor:
    """Sum ``[..., a, N]`` to ``[..., N]`` in the same order for every entry.

    ``sum(dim=-2)`` does not keep it.
    """
    return values.mT.contiguous().sum(dim=-1)


def attention_received(keys: Tensor, queries: Tensor, valid: Tensor, hidden: int = 0) -> Tensor:
    """Sum the attention that every entry gets over the queries: float32 ``[B, H, G, N]``.

    Each query head's softmax runs over the entries that are :func:`visible` to the query.  Queries
    are taken in pieces, so that the whole a x N matrix is never in memory.
    """
    flat = FlatHeads.of(keys, queries, valid)
    num_flat, n, d = flat.keys.shape
    g, a = flat.queries.shape[1:3]
    received = torch.zeros(num_flat, g, n, dtype=torch.float32, device=keys.device)
    for heads in pieces(num_flat, max(n * d, g * n)):
        keys_LND = flat.keys[heads].float()
        valid_LN = flat.valid[heads]
        for rows in pieces(a, keys_LND.shape[0] * g * n):
            mask = visible(valid_LN, slice(n - a + rows.start, n - a + rows.stop), hidden)
            logits = attention_logits(keys_LND, flat.queries[heads, :, rows])
            received[heads] += sum_rows(masked_softmax(logits, mask[:, None]))
    return received.unflatten(0, keys.shape[:2])


@dataclass(frozen=True)
class EvictionPolicy(ABC):
    """A rule for what a compressible head keeps when its cache is full.

    A head holds up to ``budget + buffer`` entries of a sequence; when it is full, it *evicts* all
    but ``budget`` of them.  A new policy only needs :meth:`scores`.

    Attributes:
        budget: entries per head and sequence that an eviction keeps.
        ratio: instead of ``budget``: an eviction keeps ``floor(ratio * tokens read so far) +
            extra`` entries, the dynamic budget of RLKV (arXiv 2510.08525), appendix F.
        buffer: new entries that gather between two evictions.
        observation: a, the most recent entries, which are always kept; their queries judge the
            others.
        sink: first entries of a sequence that are always kept.
        extra: entries on top of ``ratio`` (S + W in appendix F).
        protect_prompt: the prompt (the first call's tokens; later chat turns are not protected)
            stays whole.  Only what came after it is scored, also in the softmax (as in RPC's
            code), and counted by ``budget``.  ``sink`` is 0 then.

    Raises:
        ValueError: for values of the wrong type or out of range, or unless exactly one of
            ``budget`` and ``ratio`` is given (policies with a schedule of their own, such as RPC,
            need neither).
    """

    budget: int | None = None
    ratio: float | None = None
    buffer: int = 128
    observation: int = 8
    sink: int = 0
    extra: int = 80
    protect_prompt: bool = False

    name: ClassVar[str]
    takes_planned: ClassVar[bool] = True  # budgets of planned lengths, see RowCounts.planned
    uses_queries: ClassVar[bool] = True  # False: no queries need to be kept between two calls
    accumulates: ClassVar[bool] = False  # True: scores of every call are added up, entry by entry
    draws: ClassVar[bool] = False  # True: ``scores`` also takes ``seen`` and ``layer``, for a hash

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: nothing changes it, and tensors of its own have no ``==`` to compare."""
        return self

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__.lower()

    def __post_init__(self) -> None:
        for field in fields(self):
            check_type(f"{self.name}: {field.name}", getattr(self, field.name), str(field.type))
        for name, least in (("buffer", 1), ("observation", 1), ("sink", 0), ("extra", 0)):
            self.require(getattr(self, name) >= least, name, f"{least} or more tokens")
        keeps_twice = self.protect_prompt and self.sink > 0
        self.require(not keeps_twice, "sink", "0 with protect_prompt, which keeps the first tokens")
        self._check_budget()

    def require(self, fits: bool, field: str, what: str) -> None:
        """Raise ValueError unless ``fits``; ``what`` completes the message "it must be"."""
        if not fits:
            raise ValueError(f"{self.name}: {field} is {getattr(self, field)!r}: it must be {what}")

    def _check_budget(self) -> None:
        if (self.budget is None) == (self.ratio is None):
            given = "neither is" if self.budget is None else "both are"
            raise ValueError(
                f"{self.name} needs either a budget (entries per head) or a ratio (share of the "
                f"tokens read): {given} given"
            )
        is_share = self.ratio is None or 0 <= self.ratio <= 1
        self.require(is_share, "ratio", "the share of tokens to keep, from 0 to 1")
        self.check_entries(self.budget if self.budget is not None else self.extra)

    def check_entries(self, entries: int) -> None:
        """Raise ValueError if ``entries`` have no room for those that are always kept."""
        needed = self.sink + self.observation
        if entries < needed:
            of_ratio = self.ratio is not None and entries == self.extra
            what = "extra (all that is kept of a short text)" if of_ratio else "budget"
            raise ValueError(
                f"{self.name}: {what} is {entries}, less than the {needed} entries that are always "
                f"kept (sink {self.sink} + observation {self.observation}): raise it or lower them"
            )

    def describe(self) -> dict[str, Any]:
        """Return name and fields, for settings and reports."""
        return {"name": self.name, **asdict(self)}

    def entries(self, seen: Tensor, evictions: Tensor) -> Tensor:
        """Return how many entries an eviction keeps: int64 ``[B]``.

        Args:
            seen: int64 ``[B]``, tokens read.
            evictions: int64 ``[B]``, earlier evictions of the row.
        """
        if self.budget is not None:
            return torch.full_like(seen, self.budget)
        assert self.ratio is not None
        # as int(ratio * length) of Python rounds: 0.7 of 90 tokens are 62
        return (seen.double() * self.ratio).floor().long() + self.extra

    def capacity(self, seen: Tensor, evictions: Tensor) -> Tensor:
        """Return the entries at which an eviction is due; arguments as in :meth:`entries`."""
        return self.entries(seen, evictions) + self.buffer

    def max_entries(self) -> int | None:
        """Return the largest number of entries of a sequence that a head holds; None: no limit."""
        return None if self.budget is None or self.protect_prompt else self.budget + self.buffer

    @property
    def observes(self) -> bool:
        """Return whether the latest queries are kept until the next eviction."""
        return self.uses_queries and not self.accumulates

    @property
    def per_query_head(self) -> bool:
        """Return whether each query head keeps its own entries: G times as many as for KV heads."""
        return False

    def recent(self, budget: Tensor) -> Tensor:
        """Return how many of the most recent entries are always kept: int64 ``[B]``, as budget."""
        return torch.full_like(budget, self.observation)

    @abstractmethod
    def scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
        """Score how much each entry is worth keeping: float32 ``[B, H, N]``.

        :meth:`keep` forces recent entries and sinks.

        Args:
            keys: ``[B, H, N, D]``, after RoPE.
            queries: ``[B, Q, a, D]``, of the last a entries.
            valid: bool ``[B, N]``, False for padding.
        """

    def keep(self, scores: Tensor, budget: int | Tensor, valid: Tensor) -> Tensor:
        """Choose the ``budget`` best entries of each head: ascending indices into the N.

        Sinks and the most recent entries come first, then the highest scores; of equal scores the
        later entry.  NaN counts as the lowest score.

        Args:
            scores: ``[B, H, N]``.
            budget: one number, or one per row, int64 ``[B]`` (on the CPU nothing waits for a GPU).
            valid: bool ``[B, N]``, False for padding.

        Returns:
            int64 ``[B, H, max(budget)]``; a row with fewer entries than its budget is filled up in
            front with -1.
        """
        rows, _, n = scores.shape
        if isinstance(budget, int):
            most = budget
            budget_B = torch.full((rows,), budget, device=scores.device)  # without a copy to a GPU
        else:
            most = int(budget.max())
            budget_B = moved(budget, scores.device).expand(rows)
        count_B = valid.sum(-1)
        rank_BN = valid.cumsum(-1) - 1
        is_recent = rank_BN >= (count_B - self.recent(budget_B))[:, None]
        forced_BN = valid & ((rank_BN < self.sink) | is_recent)
        lowest = torch.finfo(torch.float32).min
        highest = torch.finfo(torch.float32).max
        ranked = scores.float().nan_to_num(nan=lowest, neginf=lowest, posinf=highest)
        # before every finite score: what is forced; after: padding only
        ranked = ranked.masked_fill(forced_BN[:, None], torch.inf)
        ranked = ranked.masked_fill(~valid[:, None], -torch.inf)
        best_first = n - 1 - ranked.flip(-1).argsort(dim=-1, descending=True, stable=True)
        best_first = best_first[..., :most]
        place = torch.arange(best_first.shape[-1], device=scores.device)
        taken_BK = place < torch.minimum(budget_B, count_B)[:, None]
        return best_first.masked_fill(~taken_BK[:, None], -1).sort(dim=-1).values

    def check_scores(self, scores: Tensor, keys: Tensor) -> None:
        """Raise ValueError unless ``scores`` are ``[B, H, N]`` for ``keys`` ``[B, H, N, D]``."""
        if scores.shape != keys.shape[:3]:
            raise ValueError(
                f"{self.name}.scores gave {list(scores.shape)} for keys {list(keys.shape)}: it "
                f"must give one score for each entry, {list(keys.shape[:3])}"
            )

    def select(
        self, keys: Tensor, queries: Tensor, budget: int, valid: Tensor | None = None
    ) -> Tensor:
        """Choose what an eviction down to ``budget`` keeps: int64 ``[B, H, budget]``, -1 in front.

        Args:
            keys: ``[B, H, N, D]``.
            queries: ``[B, Q, a, D]``, of the last a entries.
            valid: bool ``[B, N]``, False for padding, which comes first; None: no padding.

        Raises:
            ValueError: if shapes do not match or ``budget`` has no room for what is always kept.
        """
        check_shapes(keys, queries, valid)
        self.check_entries(budget)
        if valid is None:
            valid = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool, device=keys.device)
        scores = self.scores(keys, queries, valid)
        self.check_scores(scores, keys)
        kept = self.keep(scores, budget, valid)
        return F.pad(kept, (budget - kept.shape[-1], 0), value=-1)  # more than there are entries


def check_type(what: str, value: Any, annotation: str) -> None:
    """Raise ValueError unless ``value`` is of a policy field's type, such as ``int | None``."""
    kind, _, optional = annotation.partition(" | ")
    if value is None and optional:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "bool":
        fits = isinstance(value, bool)
        word = "true or false"
    elif kind == "int":
        fits = is_number and isinstance(value, int) and abs(value) <= MOST
        word = f"a whole number of at most {MOST}"
    elif kind == "float":
        fits = is_number and -inf < value < inf
        word = "a number"
    elif kind == "str":
        fits = isinstance(value, str)
        word = "a word"
    else:
        return  # a type of one's own policy
    if not fits:
        raise ValueError(f"{what} is {value}: it must be {word}")


def check_shapes(keys: Tensor, queries: Tensor, valid: Tensor | None) -> None:
    """Raise ValueError unless the arguments of :meth:`EvictionPolicy.select` fit each other."""
    if keys.dim() != 4 or queries.dim() != 4:
        raise ValueError(
            f"keys must be [B, H, N, D] and queries [B, Q, a, D], got {list(keys.shape)} and "
            f"{list(queries.shape)}"
        )
    b, h, n, d = keys.shape
    if queries.shape[0] != b or queries.shape[3] != d or queries.shape[1] % h:
        raise ValueError(
            f"queries {list(queries.shape)} do not belong to keys {list(keys.shape)}: rows and "
            "head size must be the same, and query heads a multiple of KV heads"
        )
    if not 1 <= queries.shape[2] <= n:
        raise ValueError(
            f"{queries.shape[2]} queries for {n} entries: they are the queries of the last entries"
        )
    if valid is not None and (valid.shape != (b, n) or valid.dtype != torch.bool):
        raise ValueError(f"valid must be bool [{b}, {n}], got {valid.dtype} {list(valid.shape)}")


P = TypeVar("P", bound=EvictionPolicy)
_policies: dict[str, type[EvictionPolicy]] = {}
POLICIES: Mapping[str, type[EvictionPolicy]] = MappingProxyType(_policies)  # filled by register()


def register(policy: type[P]) -> type[P]:
    """Make the policy known by its ``name`` to every command, study and test: a class decorator."""
    if policy.name in _policies:
        raise ValueError(
            f"there is already an eviction policy {policy.name!r}: "
            f"{_policies[policy.name].__qualname__}"
        )
    _policies[policy.name] = policy
    return policy


def parse_options(texts: list[str]) -> dict[str, Any]:
    """Parse fields and values from texts such as ``variant=published`` or ``lam=0.2``."""
    options: dict[str, Any] = {}
    for text in texts:
        field, separator, value = text.partition("=")
        if not separator or not field:
            raise ValueError(
                f"option {text!r} is not written as name=value, such as variant=published"
            )
        if field in options:
            raise ValueError(f"option {field} is given twice")
        try:
            is_truth_value = value.lower() in ("true", "false")
            options[field] = parse_json(value.lower() if is_truth_value else value)
        except ValueError:
            options[field] = value  # a word
    return options


def make_policy(name: str, **options: Any) -> EvictionPolicy:
    """Make the policy ``name`` with the fields ``options``.

    Raises:
        ValueError: for unknown names and values that the policy refuses.
    """
    if name not in POLICIES:
        raise ValueError(
            f"there is no eviction policy {name!r}: choose one of {', '.join(POLICIES)}"
        )
    known = inspect.signature(POLICIES[name]).parameters
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(
            f"{name} has no option {', '.join(unknown)}: its options are {', '.join(known)}"
        )
    return POLICIES[name](**options)
