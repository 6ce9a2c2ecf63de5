"""Which engine the filter decodes with, what it says before it begins, and where its files go."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlkv.data.curriculum import curriculum_folder
from rlkv.data.filter import FilterConfig, run_filter, sized_and_announced
from rlkv.data.problems import other_models, read_curriculum
from rlkv.models.shape import PUBLISHED, short_name
from rlkv.rollout import footprint as estimate
from rlkv.rollout.footprint import GIB
from rlkv.cli.app import CONFIGS
from tests.helpers.installed import CPU_BUILD, pretend_vllm


@pytest.fixture(params=[True, False], ids=["vllm", "no-vllm"])
def has_vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    pretend_vllm(monkeypatch, CPU_BUILD if request.param else None)
    return request.param


def gpu(monkeypatch: pytest.MonkeyPatch, gib: int | None) -> None:
    monkeypatch.setattr(estimate, "free_memory", lambda device: None if gib is None else gib * GIB)


def test_the_engine_is_what_is_installed(has_vllm: bool) -> None:
    assert FilterConfig().resolved().engine == ("vllm" if has_vllm else "hf")
    assert FilterConfig(engine="hf").resolved().engine == "hf"
    assert FilterConfig(device="cpu").resolved().engine == "hf"
    assert FilterConfig(model="tiny").resolved().engine == "hf"


def test_a_line_says_how_long_40000_problems_take(
    has_vllm: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu(monkeypatch, None)
    config = sized_and_announced(FilterConfig(dtype="bfloat16").resolved(), 40_315, 8192)
    assert (config.batch_size, config.kv_gib) == (16, 4.0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("40,315 problems through " + ("vLLM" if has_vllm else "transformers"))
    assert ("pip install" in line) is not has_vllm
    assert "days" in line
    assert "assumed" in line


def test_rows_and_memory_fit_the_gpu(has_vllm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, 80)
    config = sized_and_announced(FilterConfig(dtype="bfloat16").resolved(), 100, 8192)
    assert config.kv_gib == (pytest.approx(72 - 15 - 6, abs=0.1) if has_vllm else 4)
    assert config.batch_size == (
        102 if has_vllm else 25
    )  # rows of half a GiB on average; of 1 GiB, and a copy
    given = sized_and_announced(
        FilterConfig(dtype="bfloat16", batch_size=3, kv_gib=2).resolved(), 100, 8192
    )
    assert (given.batch_size, given.kv_gib) == (3, 2)


def test_a_small_gpu_decodes_with_transformers_or_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_vllm(monkeypatch, CPU_BUILD)
    gpu(monkeypatch, 16)
    config = sized_and_announced(FilterConfig(dtype="bfloat16").resolved(), 100, 8192)
    assert (config.engine, config.batch_size) == ("hf", 1)
    assert "7.6 GiB" in capsys.readouterr().out  # a row of 1 GiB, and 6.6 too little
    with pytest.raises(ValueError, match=r"7\.6 GiB.*--engine hf"):
        sized_and_announced(FilterConfig(dtype="bfloat16", engine="vllm").resolved(), 100, 8192)


def test_a_cpu_is_not_sized_by_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB)
    )
    sizes = [
        sized_and_announced(
            FilterConfig(dtype="bfloat16", device=device, engine="hf").resolved(), 1, 8192
        ).batch_size
        for device in ("cpu", "cuda")
    ]
    assert sizes == [16, 25]


def test_the_filter_writes_where_the_training_looks() -> None:
    for model in PUBLISHED:
        config = (CONFIGS / f"{short_name(model)}.yaml").read_text()
        assert FilterConfig(model=model).resolved().output_dir == str(curriculum_folder(model))
        assert f"curriculum: {curriculum_folder(model)}/curriculum.parquet" in config
    assert FilterConfig(model="tiny").resolved().output_dir == "results/curriculum_tiny"
    assert FilterConfig(model="tiny", output_dir="x").resolved().output_dir == "x"


def test_a_curriculum_says_which_model_solved_it(tmp_path: Path) -> None:
    run_filter(FilterConfig(model="tiny", num_problems=8, output_dir=str(tmp_path)))
    for name in ("curriculum.parquet", "curriculum.jsonl"):
        assert {row["model"] for row in read_curriculum(tmp_path / name)} == {"tiny"}
        assert other_models(tmp_path / name, "tiny") == []
        assert other_models(tmp_path / name, "smol") == ["tiny"]


def test_no_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kv-gib.* 0"):
        FilterConfig(kv_gib=0).check()
