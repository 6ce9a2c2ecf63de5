"""How contenders run: in turns, timed, with the memory that they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def turns(contenders: Sequence[T], rounds: int) -> Iterator[T]:
    """Each of them once a round; each round starts with another, so that none always runs on a
    rested machine.
    """
    for turn in range(rounds):
        shift = turn % len(contenders)
        yield from (*contenders[shift:], *contenders[:shift])


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds that ``work()`` takes, a GPU's kernels included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def peak_bytes(work: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that torch's allocator holds during ``work()``, beyond what it holds before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        work()
    changes = (
        event.nbytes()
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    return max(accumulate(changes, initial=0))


def fits(work: Callable[[], Any]) -> bool:
    """Do ``work()``; False if the memory of a GPU, or of the CPU, does not suffice."""
    try:
        work()
    except RuntimeError as error:
        # the CPU's allocator has no type of its own
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            return False
        raise
    return True
