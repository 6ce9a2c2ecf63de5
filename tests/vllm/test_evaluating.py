"""``rlkv-eval --engine vllm``: its rows are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv import tiny
from rlkv.cli.jobs import run_eval
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from rlkv.utils.store import settings_path
from tests.helpers.engines import need_vllm
from tests.helpers.results import stable

need_vllm()

N = 8
METHODS = ("full", "mine@0.5", "mine@0.5+rkv@20:buffer=12", "snapkv@24:buffer=8:observation=4")


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, _ = tiny.load()
    alpha = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    shape = ModelShape.from_config(model.config, "tiny")
    file = tmp_path_factory.mktemp("gates") / "gates.safetensors"
    HeadGates(alpha, model=shape, deploy_sink=4, deploy_window=16).save(file)
    return file


def evaluate(folder: Path, gates: Path, *options: str) -> dict[str, Any]:
    """Return ``results.json`` of a small evaluation."""
    small = ["--limit", str(N), "--max-new-tokens", "60", "--batch-size", "3"]
    named = ["--gates", f"mine={gates}", "--dtype", "float32"]
    run_eval(["--output-dir", str(folder), *small, *named, *options])
    return json.loads((folder / "results.json").read_text())


def rows(folder: Path, method: str) -> list[dict[str, Any]]:
    """Return rows by problem and sample."""
    file = folder / "tiny" / method / "rows-0-of-1.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(found, key=lambda row: (row["key"], row["sample"]))


@pytest.fixture(scope="module")
def evaluated(gates: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``vllm`` and ``hf`` of the same evaluation."""
    folder = tmp_path_factory.mktemp("evaluated")
    for engine in ("vllm", "hf"):
        options = ["--methods", *METHODS, "--prefill", "local", "--engine", engine]
        evaluate(folder / engine, gates, *options)
    return folder


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("method", METHODS)
def test_rows_are_those_of_transformers(evaluated: Path, method: str) -> None:
    """Texts, verdicts and bytes; each engine knows its own seconds."""
    found = rows(evaluated / "vllm", method)
    assert len(found) == N
    assert all(row["seconds"] > 0 for row in found)
    assert [stable(row) for row in found] == [stable(row) for row in rows(evaluated / "hf", method)]
