"""Processes of a launcher that go on alone, each with its own GPU."""

from __future__ import annotations

import os

import pytest

from rlkv.data.filter import FilterConfig
from rlkv.utils.runtime import leave_launcher


def launched(monkeypatch: pytest.MonkeyPatch, local: int, gpus: str | None, found: int = 4) -> None:
    variables = {"RANK": local + 4, "WORLD_SIZE": 8, "LOCAL_RANK": local, "MASTER_ADDR": "x"}
    for name, value in {**variables, "CUDA_VISIBLE_DEVICES": gpus}.items():
        monkeypatch.setenv(name, str(value))
    if gpus is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("torch.cuda.device_count", lambda: found)


@pytest.mark.parametrize(("gpus", "own"), [(None, "2"), ("4,5,6,7", "6"), ("", "")])
def test_each_has_the_gpu_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, gpus: str | None, own: str
) -> None:
    launched(monkeypatch, 2, gpus)
    assert leave_launcher() == (6, 8)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} & set(os.environ)
    assert leave_launcher() == (0, 1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own


@pytest.mark.parametrize("gpus", ["0,1", None])
def test_too_few_gpus_are_named(monkeypatch: pytest.MonkeyPatch, gpus: str | None) -> None:
    launched(monkeypatch, 2, gpus, found=2)
    with pytest.raises(ValueError, match=r"no GPU for process 2.*start 2"):
        leave_launcher()


def test_without_gpus_all_take_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 2, None, found=0)
    assert leave_launcher() == (6, 8)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_processes_divide_a_shard() -> None:
    parts = [
        FilterConfig(shard=f"{shard}/2").of_process(rank, 3).shard
        for shard in range(2)
        for rank in range(3)
    ]
    assert parts == [
        "0/6",
        "2/6",
        "4/6",
        "1/6",
        "3/6",
        "5/6",
    ]  # i/2 whatever the number of processes
    assert FilterConfig().of_process(0, 1).shard == "0/1"
