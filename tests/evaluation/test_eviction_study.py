"""The study of heads and eviction on a few problems of the tiny model: cells, files, resuming, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rlkv.cache import CacheSettings as CacheSizes
from rlkv.cache.accounting import EntrySize
from rlkv.evaluation.eviction_report import markdown_report, winners
from rlkv.evaluation.eviction_study import cached_lengths
from rlkv.evaluation.heads.measure import CacheSettings, measure
from rlkv.evaluation.run.cli_args import study_problems
from rlkv.evaluation.stats.error_modes import RepetitionRule, count_modes
from rlkv.evaluation.stats.matching import kv_share
from rlkv.eviction import make_policy
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from rlkv.tiny import load
from tests.helpers.programs import load_program

SMALL = ("--num-problems", "4", "--definitions", "4-6", "--saved", "0.4", "--policies", "rkv,random")
SIZES = ("--buffer", "4", "--observation", "2", "--extra", "8", "--max-new-tokens", "80")


@pytest.fixture(scope="module")
def gates_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, _ = load()
    path = tmp_path_factory.mktemp("gates") / "gates.pt"
    alpha = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    shape = ModelShape.from_config(model.config, "tiny")
    HeadGates(alpha, model=shape, sink=4, window=16, deploy_sink=4, deploy_window=8).save(path)
    return path


@pytest.fixture(scope="module")
def program() -> Any:
    return load_program("inference/compare_eviction.py").app


def run(program: Any, gates_file: Path, folder: Path, *more: str) -> Any:
    command = ["--gates", f"mine={gates_file}", "--output-dir", str(folder)]
    return CliRunner().invoke(program, [*command, *SMALL, *SIZES, *more])


def test_files_and_resuming(program: Any, gates_file: Path, tmp_path: Path) -> None:
    first = run(program, gates_file, tmp_path)
    assert first.exit_code == 0, first.output
    results = json.loads((tmp_path / "results.json").read_text())
    rows = {row["method"]: row for row in results["rows"]}
    assert set(rows) == {
        "full cache",
        "rkv",
        "rkv (prompt kept)",
        "random",
        "random (prompt evictable)",
        "mine heads + sinks + window",
        "random heads + sinks + window",
        "mine heads + rkv",
        "mine heads + rkv (prompt kept)",
        "mine heads + random",
        "mine heads + random (prompt evictable)",
    }
    assert rows["rkv"]["options"]["ratio"] > 0
    assert not any(rows["rkv"]["full_heads"])
    assert 0 < sum(rows["mine heads + rkv"]["full_heads"]) < 24
    assert all(len(row["correct"]) == 4 for row in rows.values() if row["accuracy"] is not None)
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000
    assert "| mine heads + rkv |" in (tmp_path / "report.md").read_text()

    log = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(log[:4]) + log[4][:30])  # as a kill would leave it
    again = run(program, gates_file, tmp_path)
    assert again.exit_code == 0, again.output
    resumed = json.loads((tmp_path / "results.json").read_text())["rows"]
    facts = ("method", "saved", "accuracy", "kv_share", "correct", "options")
    assert [[row.get(f) for f in facts] for row in resumed] == [[row.get(f) for f in facts] for row in results["rows"]]
    assert resumed[:3] == results["rows"][:3]  # with their seconds: not measured again

    other = run(program, gates_file, tmp_path, "--max-new-tokens", "70")
    assert isinstance(other.exception, ValueError)  # the entry point prints it and exits with 2
    assert "max_new_tokens" in str(other.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "rkv,foo"], "no eviction policy 'foo'"),
        (["--saved", "1.5"], "outside 0 to 0.99"),
        (["--definitions", "x"], "is no range"),
        (["--gates", "random=x.pt"], "is taken"),
        (["--input", "absent.jsonl"], "absent.jsonl"),
        (["--repetition", "100"], "must be two whole numbers"),
        (["--head-share", "2.5"], "head_share is 2.5"),
        (["--extra", "0"], "--extra is 0"),
    ],
)
def test_bad_input_is_one_sentence(
    program: Any, gates_file: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = run(program, gates_file, tmp_path, *arguments)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


def row(method: str, correct: str, saved: float = 0.5) -> dict:
    accuracy = correct.count("1") / len(correct)
    return {
        "method": method,
        "heads": "",
        "saved": saved,
        "accuracy": accuracy,
        "ci_low": 0.0,
        "ci_high": 1.0,
        "n": len(correct),
        "kv_share": 0.5,
        "mean_output_tokens": 7.0,
        "repetitive": 1,
        "overlength": 2,
        "incorrect": 3,
        "correct": correct,
    }


def test_the_report_names_the_best_and_what_is_not_told_apart() -> None:
    rows = [
        row("full cache", "1" * 12, 0.0),
        row("good", "1" * 10 + "00"),
        row("near", "1" * 8 + "0000"),  # 2 against 0 problems: p = 0.5
        row("bad", "0" * 12),  # 10 against 0: p = 0.002
        {"method": "impossible", "saved": 0.5, "accuracy": None},
    ]
    best, alike = winners(rows, 0.5)
    assert (best["method"], [r["method"] for r in alike]) == ("good", ["near"])
    report = markdown_report(rows, "Title", ["A note."])
    assert "| good | 0.83 (50%) |" in report
    assert "| good | 1 / 2 / 3, 7 |" in report
    assert "| impossible | - |" in report
    assert "50% saved: **good** 0.833 [0.00, 1.00]; not told apart from it (p > 0.05): near." in report


def test_rows_are_what_a_direct_measurement_finds(program: Any, gates_file: Path, tmp_path: Path) -> None:
    assert run(program, gates_file, tmp_path).exit_code == 0
    rows = {row["method"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    model, tokenizer = load()
    problems = study_problems(None, 4, 2_000_003, "4-6")
    settings = CacheSettings(sink=4, window=8, max_new_tokens=80)
    full = [tuple(pair) for pair in rows["full cache"]["lengths"]]
    size = EntrySize.of(model)
    for name in ("rkv", "mine heads + rkv", "random (prompt evictable)", "mine heads + sinks + window"):
        row = rows[name]
        heads = torch.tensor(row["full_heads"], dtype=torch.bool).view(4, 6)
        options = dict(row["options"] or {})
        policy = make_policy(options.pop("name"), **options) if options else None
        kept = CacheSizes(4, 8, "full", policy)
        # on the texts of the full cache: at most what was asked for, and not much less
        assert 0.5 < kv_share(kept, heads, size, full) <= 0.6
        found = measure(model, tokenizer, problems, HeadAllocation(heads), settings, policy)
        assert row["correct"] == "".join("01"[right] for right in found.correct)
        own = cached_lengths(tokenizer, problems, found, "rlkv")
        assert row["kv_share"] == kv_share(kept, heads, size, own)
        solved = [right == "1" for right in rows["full cache"]["correct"]]
        modes = count_modes(found.completions, found.correct, solved, RepetitionRule(100, 12))
        assert {mode: row[mode] for mode in modes} == modes


def test_no_method_fits_a_saving_that_is_too_large(program: Any, gates_file: Path, tmp_path: Path) -> None:
    result = run(program, gates_file, tmp_path, "--saved", "0.97", "--policies", "rkv")
    assert result.exit_code == 0, result.output
    assert "97% saved: no method fits" in (tmp_path / "report.md").read_text()
