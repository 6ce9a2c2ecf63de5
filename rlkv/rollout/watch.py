"""Rows of a batch seen one by one: reported when they end, while the others continue, and ended early by a rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import StoppingCriteria

from rlkv.rollout.base import Completion


class StopRule(Protocol):
    """Decides at every full ``window`` of new tokens of a row, given these, whether the row is to end."""

    @property
    def window(self) -> int: ...

    def __call__(self, token_ids: list[int]) -> bool: ...


@dataclass(frozen=True)
class RowHooks:
    """Callbacks while a batch is decoded.

    ``on_end`` gets the index of a prompt and its completion as soon as its row has ended; ``stop`` ends rows, whose
    finish reason is then ``repetition``.
    """

    on_end: Callable[[int, Completion], None] | None = None
    stop: StopRule | None = None


class RowWatch(StoppingCriteria):
    """Looks at the rows of one batch after every token; prompts have ``width`` columns, ``limit``: most new tokens.

    ``on_end`` is called with row, new tokens (end token included) and whether the rule ended it.
    """

    def __init__(
        self,
        width: int,
        limit: int,
        eos_ids: list[int],
        stop: StopRule | None,
        on_end: Callable[[int, list[int], bool], None],
    ) -> None:
        self.width, self.limit, self.eos_ids, self.stop, self.on_end = width, limit, eos_ids, stop, on_end
        self.ended: set[int] = set()
        self._none: Tensor | None = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """bool ``[B]``: rows that the rule ends now.  ``input_ids``: int64 ``[B, prompts and new tokens]``."""
        new_BT: Tensor = input_ids[:, self.width :]
        length = new_BT.shape[1]
        last = new_BT[:, -1].tolist()
        refused = [False] * len(last)
        is_checked = self.stop is not None and length % self.stop.window == 0
        for row, token in enumerate(last):
            if row in self.ended:
                continue
            ends = token in self.eos_ids
            if is_checked and not ends:
                assert self.stop is not None
                refused[row] = self.stop(new_BT[row, -self.stop.window :].tolist())
            if ends or refused[row] or length == self.limit:
                self.ended.add(row)
                self.on_end(row, new_BT[row].tolist(), refused[row])
        if any(refused):
            return torch.tensor(refused, device=input_ids.device)
        if self._none is None:  # made once: nearly every token ends in this line
            self._none = torch.zeros(len(last), dtype=torch.bool, device=input_ids.device)
        return self._none
