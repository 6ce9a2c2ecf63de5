"""Which GPU is meant, by its name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlkv.rollout.footprint import CARDS, GIB, card_of, parse_gpus


@pytest.mark.parametrize(
    ("name", "memory", "key"),
    [
        ("NVIDIA H100 80GB HBM3", 79, "h100"),
        ("NVIDIA H200", 141, "h200"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40"),
        ("NVIDIA A100 80GB PCIe", 80, "a100"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx4090"),
        ("NVIDIA Something New", 96, "a100"),
    ],
)
def test_a_gpu_that_is_here(
    name: str, memory: int, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(total_memory=memory * GIB),
    )
    found = card_of(torch.device("cuda", 0))
    assert found is not None
    assert (found.memory, found.flops, found.bandwidth) == (
        memory,
        CARDS[key].flops,
        CARDS[key].bandwidth,
    )


def test_a_cpu_is_none() -> None:
    assert card_of(torch.device("cpu")) is None


def test_number_and_name() -> None:
    assert parse_gpus("8xH100") == (8, "h100")
    assert parse_gpus("a100-40") == (1, "a100-40")
