"""Which rows a process samples and which it trains on: one optimizer step is the same on any number of processes.

A row is a completion of a rollout, numbered over all processes.  Every process has the same number of *slots* for rows,
as trl needs it; slots beyond its share stay empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import RepeatSampler


def passes(prompts: int, group: int, at_once: int) -> int:
    """The fewest forward passes of ``at_once`` samples for ``prompts`` groups; trl wants them to hold whole groups."""
    fewest = -(-prompts * group // at_once)
    return next(number for number in range(fewest, fewest + group) if number * at_once % group == 0)


@dataclass(frozen=True)
class Shares:
    """How the rows of a rollout are divided for sampling.

    Attributes:
        rows: of all processes.
        slots: of each process, at least its share.
    """

    rows: int
    slots: int
    processes: int

    def of(self, rank: int) -> range:
        """The rows of a process; shares differ by one row at most."""
        return range(self.rows * rank // self.processes, self.rows * (rank + 1) // self.processes)

    def filled(self) -> list[int]:
        """The slots of the rows, in the order of rows, if those of all processes are one list."""
        return [rank * self.slots + i for rank in range(self.processes) for i in range(len(self.of(rank)))]


class RowSampler(RepeatSampler):
    """trl's sampler of prompts, in slots, with an order per epoch that depends on (seed, epoch) alone.

    Args:
        uses: how often each rollout is asked for: once per forward and backward pass.
        epoch: the current one.
    """

    def __init__(self, shares: Shares, uses: int, epoch: Callable[[], int], **options: Any) -> None:
        super().__init__(**options)
        self.shares, self.uses, self._epoch = shares, uses, epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed((self.seed or 0) * 1_000_003 + self._epoch())
        prompts = super().__iter__()
        while rows := list(islice(prompts, self.shares.rows)):
            slots = rows[:1] * (self.shares.slots * self.shares.processes)
            for slot, index in zip(self.shares.filled(), rows, strict=True):
                slots[slot] = index
            for _ in range(self.uses):
                yield from slots

    def __len__(self) -> int:
        return super().__len__() // self.shares.rows * self.shares.slots * self.shares.processes * self.uses


def gather_rows(accelerator: Any, tensors: dict[str, Tensor], shares: Shares) -> dict[str, Tensor]:
    """The rows of all processes in the order of their numbers, from tensors ``[slots, ...]`` of this one."""
    filled = torch.tensor(shares.filled(), device=accelerator.device)
    found = {}
    for name, values in tensors.items():
        if values.dim() == 2:  # prompts are padded on the left
            values = accelerator.pad_across_processes(values, dim=1, pad_first=name.startswith("prompt"))
        found[name] = accelerator.gather(values)[filled]
    return found


def make_micro_batches(
    rows: dict[str, Tensor], parts: Sequence[Tensor], number: int, processes: int, rank: int
) -> list[dict[str, Tensor]]:
    """The micro-batches of one process: rows of advantage 0 have no gradient, and the others are dealt out by length.

    Ranks work on rows of about the same length at the same time.  A process without a row takes the shortest one, with
    advantage 0, because every process takes part in every backward pass.

    Args:
        rows: of a whole rollout, with advantages and masks.
        parts: the rows of each optimizer step.
        number: micro-batches of a part.

    Returns:
        ``number`` for each part: some of the rows, ``mean_reward`` of all rows of the part, and as scalars how many
        rows and tokens of it fall to a micro-batch on average.
    """
    length_N = rows["prompt_mask"].sum(1) + rows["completion_mask"].sum(1)
    found = []
    for part in parts:
        whole = {
            "mean_reward": rows["mean_reward"][part],
            "num_samples": torch.tensor(len(part) / (number * processes), device=part.device),
            "num_tokens": rows["completion_mask"][part].sum() / (number * processes),
        }
        teaching = part[rows["advantages"][part] != 0]
        teaching = teaching[length_N[teaching].argsort(descending=True, stable=True)]
        shortest = part[length_N[part].argmin()][None]
        for i in range(number):
            mine = teaching[len(teaching) * i // number : len(teaching) * (i + 1) // number][rank::processes]
            batch = {name: values[mine if len(mine) else shortest] for name, values in rows.items()}
            if not len(mine):
                batch["advantages"] = torch.zeros_like(batch["advantages"])
            found.append(batch | whole)
    return found
