"""The sweep: every cell once, resumable, refusing to mix settings; and its reports."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from rlkv import tiny
from rlkv.evaluation.heads.measure import CacheSettings, HeadResult
from rlkv.evaluation.heads.sweep import Cell, plan_sweep, run_sweep
from rlkv.evaluation.report.sweep_report import markdown_table, plot_accuracy, training_seconds, write_results
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from tests.helpers.paths import ROOT

SHAPE = ModelShape("tiny", "llama", 4, 6, 12, 32)
SETTINGS = CacheSettings(sink=4, window=16, max_new_tokens=30, batch_size=4)


def cells() -> list[Cell]:
    gates = HeadGates(alpha=torch.linspace(0, 1, 24).view(4, 6))
    order = [(layer, head) for layer in range(4) for head in range(6)]
    return list(plan_sweep(SHAPE, [0.0, 0.5], {"RLKV": [gates]}, {"oracle": order}, random_draws=2))


def sweep(folder: Path, seen: list[HeadResult], **fingerprint: object) -> list[HeadResult]:
    model, tokenizer = tiny.load()
    problems = tiny.problems(4, seed=1, max_definitions=3)
    return run_sweep(
        model,
        tokenizer,
        problems,
        cells(),
        SETTINGS,
        folder / "rows.jsonl",
        fingerprint,
        lambda _, row: seen.append(row),
    )


def test_plan_measures_the_full_cache_once() -> None:
    keys = [cell.key for cell in cells()]
    assert keys == [
        ("full cache", 0.0, None),
        ("RLKV", 0.5, None),
        ("oracle", 0.5, None),
        ("random heads", 0.5, 0),
        ("random heads", 0.5, 1),
    ]
    assert [cell.allocation.num_full for cell in cells()] == [24, 12, 12, 12, 12]


def test_runs_of_one_method_are_numbered() -> None:
    runs = [HeadGates(alpha=torch.linspace(0, 1, 24).view(4, 6)), HeadGates(alpha=torch.linspace(1, 0, 24).view(4, 6))]
    _, first, second = plan_sweep(SHAPE, [0.5], {"DuoAttention": runs}, {}, random_draws=0)
    assert (first.key, second.key) == (("DuoAttention", 0.5, 0), ("DuoAttention", 0.5, 1))
    assert torch.equal(first.allocation.full, ~second.allocation.full)


def test_resumes_after_a_torn_line_and_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    whole = sweep(tmp_path / "whole", [])
    rows_file = tmp_path / "torn" / "rows.jsonl"
    rows_file.parent.mkdir()
    content = (tmp_path / "whole" / "rows.jsonl").read_bytes()
    lines = content.splitlines(keepends=True)
    rows_file.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    assert sweep(tmp_path / "torn", []) == whole
    assert rows_file.read_bytes() == content


def test_refuses_other_settings_and_keeps_the_rows(tmp_path: Path) -> None:
    sweep(tmp_path, [])
    before = (tmp_path / "rows.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"other settings \(model\)"):
        sweep(tmp_path, [], model="another")
    assert (tmp_path / "rows.jsonl").read_bytes() == before


@pytest.mark.parametrize("changed", ["weights", "libraries"])
def test_rows_of_other_weights_code_or_libraries_are_refused(
    tmp_path: Path, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny.load()
    rest = ([], [], SETTINGS, tmp_path / "rows.jsonl", {}, lambda *_: None)
    run_sweep(model, tokenizer, *rest)
    run_sweep(model, tokenizer, *rest)
    if changed == "weights":
        with torch.no_grad():
            next(model.parameters()).mul_(2)
    else:
        monkeypatch.setattr("rlkv.evaluation.heads.sweep.library_facts", lambda: {"torch": "0.1"})
    with pytest.raises(ValueError, match=rf"other settings \(.*{changed}"):
        run_sweep(model, tokenizer, *rest)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--sparsities", "0.5,-0.5", "holds a number outside 0 to 1"),
        ("--sparsities", "nan", "holds a number outside 0 to 1"),
        ("--sparsities", "half", "must be numbers separated by commas"),
        ("--batch-size", "0", "greater than or equal to 1"),
    ],
)
def test_the_program_names_what_it_cannot_measure(
    option: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep_heads.py", "--gates", "absent.pt", "--output-dir", "absent", f"{option}={value}"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "inference" / "sweep_heads.py"), run_name="__main__")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_program_leaves_the_problems_that_it_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HeadGates(alpha=torch.linspace(0, 1, 24).view(4, 6)).save(tmp_path / "gates.safetensors")
    options = ["--gates", str(tmp_path / "gates.safetensors"), "--model", "tiny", "--sparsities", "0.5,0.5"]
    options += ["--random-draws", "0", "--max-new-tokens", "8", "--sink", "4", "--window", "16"]

    def sweep_heads(name: str, *more: str) -> list[dict]:
        folder = tmp_path / name
        monkeypatch.setattr("sys.argv", ["sweep_heads.py", *options, "--output-dir", str(folder), *more])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "inference" / "sweep_heads.py"), run_name="__main__")
        assert ended.value.code == 0
        return json.loads((folder / "results.json").read_text())["rows"]

    drawn = sweep_heads("drawn", "--num-problems", "3", "--definitions", "3-4", "--seed", "5")
    problems = tmp_path / "drawn" / "problems.jsonl"
    assert [json.loads(line) for line in problems.read_text().splitlines()] == tiny.problems(3, 5, 3, 4)
    assert sweep_heads("read", "--input", str(problems)) == drawn
    assert [row["sparsity"] for row in drawn] == [0.0, 0.5], "a sparsity given twice is measured once"


def row(method: str, sparsity: float, accuracy: float, seed: int | None = None) -> HeadResult:
    return HeadResult(method, sparsity, seed, accuracy, accuracy - 0.1, accuracy + 0.1, 50, 60, 100, 40.0)


def test_reports(tmp_path: Path) -> None:
    rows = [row("full cache", 0.0, 0.9), row("RLKV", 0.5, 0.8), row("random heads", 0.5, 0.2, 0)]
    rows.append(row("random heads", 0.5, 0.4, 1))
    table = markdown_table(rows, "title")
    assert "| RLKV | 0.900 [0.80, 1.00] | 0.800 [0.70, 0.90] |" in table
    assert "0.300 (2 draws: 0.20 to 0.40)" in table
    assert "| *KV held, of full* | 60% | 60% |" in table
    timed = markdown_table(rows, "title", {"RLKV": [10.0, 20.0]})
    assert "| RLKV | 0.900 [0.80, 1.00] | 0.800 [0.70, 0.90] | 15 |" in timed
    assert "0.300 (2 draws: 0.20 to 0.40) |  |" in timed
    write_results(tmp_path / "results.json", rows, {"model": "tiny"})
    written = json.loads((tmp_path / "results.json").read_text())
    assert set(written["rows"][0]) == set(row("x", 0.0, 0.5).to_dict())
    assert {"config", "versions", "hardware", "command"} <= written.keys()
    plot_accuracy(rows, tmp_path / "accuracy.png", "title")
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_training_seconds_are_those_of_the_log_beside_the_gates(tmp_path: Path) -> None:
    assert training_seconds(str(tmp_path / "gates.pt")) is None
    (tmp_path / "log.jsonl").write_text('{"step": 1, "time/step_s": 1.5}\n{"step": 2, "time/step_s": 2.0}\n')
    assert training_seconds(str(tmp_path / "gates.pt")) == 3.5


def test_files_under_one_name_are_runs_of_one_method() -> None:
    program = runpy.run_path(str(ROOT / "inference" / "sweep_heads.py"))
    group = program["group_by_name"]
    assert group(["RLKV=a.pt", "x/b.tsv", "RLKV=c.pt"]) == {"RLKV": ["a.pt", "c.pt"], "b": ["x/b.tsv"]}
    for items in (["x/gates.pt", "y/gates.pt"], ["random heads=a.pt"]):
        with pytest.raises(ValueError, match="give NAME=FILE"):
            group(items)
