"""rlkv-infer --compare-full, rlkv-eval and a plain decoding agree on every problem, each at its own
batch size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv import tiny
from rlkv.cache import CacheSettings
from rlkv.cli.jobs import run_eval as evaluate
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from tests.helpers.infer import infer
from tests.helpers.plain_decoding import decode

N, TOKENS = 24, 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gates with sizes of their own, and the problems as the demo writes them."""
    folder = tmp_path_factory.mktemp("same")
    model, _ = tiny.load()
    alpha = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    shape = ModelShape.from_config(model.config, "tiny")
    HeadGates(alpha, model=shape, deploy_sink=4, deploy_window=16).save(folder / "gates.pt")
    drawn = tiny.problems(N, seed=11, max_definitions=6)
    (folder / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in drawn))
    return folder


@pytest.fixture(scope="module")
def inferred(folder: Path) -> list[dict[str, Any]]:
    output = folder / "answers.jsonl"
    options = [
        "--gates",
        str(folder / "gates.pt"),
        "--sparsity",
        "0.5",
        "--max-new-tokens",
        str(TOKENS),
    ]
    options += [
        "--input",
        str(folder / "problems.jsonl"),
        "--output",
        str(output),
        "--compare-full",
    ]
    infer(*options)
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.fixture(scope="module")
def evaluated(folder: Path) -> dict[str, list[dict[str, Any]]]:
    options = [
        "--gates",
        f"g={folder / 'gates.pt'}",
        "--methods",
        "full",
        "g@0.5",
        "--max-new-tokens",
        str(TOKENS),
    ]
    options += ["--data", str(folder / "problems.jsonl"), "--output-dir", str(folder / "eval")]
    evaluate(options)
    found = {}
    for method in ("full", "g@0.5"):
        lines = (folder / "eval" / "tiny" / method / "rows-0-of-1.jsonl").read_text().splitlines()
        found[method] = sorted(
            map(json.loads, lines), key=lambda row: int(row["key"].rsplit("/", 1)[1])
        )
    return found


@pytest.mark.parametrize(
    ("method", "sparsity", "suffix"), [("full", 0.0, "_full"), ("g@0.5", 0.5, "")]
)
def test_every_problem_has_one_text_and_one_verdict(
    folder: Path,
    inferred: list[dict[str, Any]],
    evaluated: dict[str, list[dict[str, Any]]],
    method: str,
    sparsity: float,
    suffix: str,
) -> None:
    rows = evaluated[method]
    assert len(rows) == len(inferred) == N
    assert [row["text"] for row in rows] == [row["output" + suffix] for row in inferred]
    assert [row["correct"] for row in rows] == [row["correct" + suffix] for row in inferred]
    assert [row["finish_reason"] for row in rows] == [
        row["finish_reason" + suffix] for row in inferred
    ]

    model, tokenizer = tiny.load()
    gates = HeadGates.load(folder / "gates.pt")
    problems = [json.loads(line) for line in (folder / "problems.jsonl").read_text().splitlines()]
    cache = CacheSettings(gates.deploy_sink, gates.deploy_window)
    allocation = HeadAllocation.from_gates(gates, sparsity)
    completions, correct = decode(model, tokenizer, problems, allocation, cache, TOKENS, N)
    assert correct == [row["correct"] for row in rows]
    assert [completion.token_ids for completion in completions] == [
        row["token_ids"] for row in rows
    ]
    assert 0 < sum(correct) < N, "a test of verdicts needs both"
    results = json.loads((folder / "eval" / "results.json").read_text())["results"]
    assert next(row["accuracy"] for row in results if row["method"] == method) == sum(correct) / N


def test_the_heads_make_a_difference(evaluated: dict[str, list[dict[str, Any]]]) -> None:
    assert [row["text"] for row in evaluated["full"]] != [row["text"] for row in evaluated["g@0.5"]]
