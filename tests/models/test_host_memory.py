"""Freed memory of tensors stays with the process, until it is returned."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import pytest
import torch

from rlkv.models.loading import keep_freed_memory, return_freed_memory


class MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def test_large_tensors_are_not_mapped_one_by_one() -> None:
    if not keep_freed_memory():
        pytest.skip("the C library is not glibc")
    info = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if info is None:
        pytest.skip("glibc is older than 2.33")
    info.restype = MallocInfo
    mapped = info().hblks
    tensors = [torch.ones(1 << 20) for _ in range(8)]
    assert info().hblks == mapped
    held = info().arena
    del tensors
    assert info().arena == held  # not trimmed


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_gaps_between_tensors_go_back() -> None:
    if not keep_freed_memory():
        pytest.skip("the C library is not glibc")
    tensors = [torch.ones((1 << 20) + 999 * i) for i in range(32)]
    held, last = resident(), tensors[-1]
    del tensors
    assert resident() > 0.9 * held
    assert return_freed_memory()
    assert resident() < held - 24 * 4 * (1 << 20)
    assert last.numel() > 1 << 20
