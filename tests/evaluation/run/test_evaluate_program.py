"""inference/evaluate.py on the tiny model: files, report, agreement with rlkv-infer, resuming, bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from rlkv.evaluation.run.cli_args import deployed_sizes
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from rlkv.tiny import load
from tests.helpers.paths import ROOT
from tests.helpers.programs import load_program

PROGRAM = ROOT / "inference" / "evaluate.py"
SMALL = ("--limit", "6", "--max-new-tokens", "60", "--sink", "4", "--window", "16", "--batch-size", "4")


@pytest.fixture(scope="module")
def module() -> Any:
    return load_program("inference/evaluate.py")


@pytest.fixture(scope="module")
def program(module: Any) -> Any:
    return module.app


@pytest.fixture(scope="module")
def gates_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, _ = load()
    path = tmp_path_factory.mktemp("gates") / "gates.pt"
    alpha = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    HeadGates(alpha, model=ModelShape.from_config(model.config, "tiny"), deploy_sink=4, deploy_window=16).save(path)
    return path


def run(program: Any, folder: Path, *more: str) -> Any:
    return CliRunner().invoke(program, ["--output-dir", str(folder), *SMALL, *more])


def test_files_report_and_resuming(program: Any, gates_file: Path, tmp_path: Path) -> None:
    options = ("--gates", f"mine={gates_file}", "--methods", "full,mine@0.5,mine@0.5+rkv@24:buffer=4")
    first = run(program, tmp_path, *options)
    assert first.exit_code == 0, first.output
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [row["method"] for row in results] == ["full", "mine@0.5", "mine@0.5+rkv@24:buffer=4"]
    assert all(row["n"] == 6 for row in results)
    assert results[0]["kv_bytes"] == results[0]["kv_bytes_full"]
    assert results[1]["kv_bytes"] < results[1]["kv_bytes_full"]
    assert results[1]["difference"] == pytest.approx(results[1]["accuracy"] - results[0]["accuracy"])
    for name in ("report.md", "report.html"):
        assert "mine+rkv@24:buffer=4" in (tmp_path / name).read_text()
    config = json.loads((tmp_path / "results.json").read_text())["config"]
    assert (config["sink"], config["window"], config["stop_repetitive"]) == (4, 16, False)

    rows = tmp_path / "tiny" / "full" / "rows-0-of-1.jsonl"
    before = rows.read_bytes()
    rows.write_bytes(before[: len(before) // 2])  # as a kill would leave it
    assert run(program, tmp_path, *options).exit_code == 0
    again = [json.loads(line) for line in rows.read_text().splitlines()]
    want = [json.loads(line) for line in before.splitlines()]
    assert [{**row, "seconds": 0} for row in again] == [{**row, "seconds": 0} for row in want]

    other = run(program, tmp_path, *options, "--batch-size", "3")
    assert isinstance(other.exception, ValueError)
    assert "batch_size was 4 and is now 3" in str(other.exception)


def test_progress_after_a_stop_starts_where_it_stopped(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(module.app, tmp_path).exit_code == 0
    file = tmp_path / "tiny" / "full" / "rows-0-of-1.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:4]))
    right = [json.loads(line)["correct"] for line in lines[1:4]]
    shown: list[dict[str, Any]] = []
    update = module.Progress.update
    monkeypatch.setattr(
        module.Progress, "update", lambda self, *task, **fields: shown.append(fields) or update(self, *task, **fields)
    )
    assert run(module.app, tmp_path).exit_code == 0
    assert shown[0] == {"completed": 3, "total": 6, "description": f"tiny full: {sum(right) / 3:.3f}"}
    accuracy = json.loads((tmp_path / "results.json").read_text())["results"][0]["accuracy"]
    assert shown[-1] == {"completed": 6, "total": 6, "description": f"tiny full: {accuracy:.3f}"}


def test_samples_and_early_stops_are_reported(program: Any, tmp_path: Path) -> None:
    options = ["--num-samples", "3", "--temperature", "2.0", "--limit", "3", "--repetition", "8,7", "--stop-repetitive"]
    done = run(program, tmp_path, *options)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "results.json").read_text())["results"][0]
    assert (found["n"], found["samples"], list(found["pass_at_k"])) == (3, 3, ["1", "2"])
    lines = (tmp_path / "tiny" / "full" / "rows-0-of-1.jsonl").read_text().splitlines()[1:]
    ended = sum(json.loads(line)["finish_reason"] == "repetition" for line in lines)
    assert found["stopped_for_repetition"] == ended > 0
    assert "such texts are ended there" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("name", ["eval_llama8b.yaml", "eval_tiny.yaml"])
def test_the_example_configs_parse(module: Any, name: str) -> None:
    arguments = ["--config", str(PROGRAM.parents[1] / "configs" / name), "--output-dir", "out"]
    options = typer.main.get_command(module.app).make_context("evaluate", arguments).params
    assert options["batch_size"] in (16, 50)
    assert options["stop_repetitive"] is False
    rankings = [item.partition("=")[0] for item in options["gates"]]
    methods = module.parse_methods(options["methods"], rankings)
    assert methods[0].name == "full"
    assert {m.ranking for m in methods} == {None, "random-heads", *rankings}
    tasks = module.find_tasks(options["tasks"], None)
    assert {task.name for task in tasks} >= ({"tiny"} if "tiny" in name else {"gsm8k", "aime24", "mmlu_pro:law"})


def test_sizes_come_from_the_gates(gates_file: Path, tmp_path: Path) -> None:
    gates = HeadGates.load(gates_file)
    other = replace(gates, deploy_sink=16, deploy_window=64)
    assert deployed_sizes({}, None, None) == (16, 64)
    assert deployed_sizes({"a": gates}, None, None) == (4, 16)
    assert deployed_sizes({"a": gates}, 8, None) == (8, 16)
    assert deployed_sizes({"a": gates, "b": other}, 8, 32) == (8, 32)
    with pytest.raises(ValueError, match=r"a 4 \+ 16, b 16 \+ 64\): pass --sink and --window"):
        deployed_sizes({"a": gates, "b": other}, 8, None)


def test_without_hub_and_file_the_program_ends_with_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--tasks", "mmlu_pro:law", "--output-dir", str(tmp_path / "out")]
    done = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: task 'mmlu_pro:law': cannot load TIGER-Lab/MMLU-Pro from the hub")
    assert lines[0].endswith("or a folder that holds mmlu_pro.jsonl")
    assert not (tmp_path / "out").exists()


def test_defaults_from_yaml(program: Any, gates_file: Path, tmp_path: Path) -> None:
    config = tmp_path / "study.yaml"
    config.write_text(f"methods: [full, mine@0.25]\ngates: [mine={gates_file}]\ntasks: tiny\n")
    assert run(program, tmp_path / "out", "--config", str(config)).exit_code == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert [row["method"] for row in results] == ["full", "mine@0.25"]
    config.write_text("method: full\n")
    bad = run(program, tmp_path / "out", "--config", str(config))
    assert "unknown options: method" in str(bad.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "foo@1"], "is not understood"),
        (["--methods", "rlkv@0.5"], "is not understood"),
        (["--methods", "random-heads@0.5,full,random-heads@0.50"], "names 'random-heads@0.50' twice"),
        (["--tasks", "math501"], "unknown task"),
        (["--num-samples", "4"], "all the same"),
        (["--config", "absent.yaml"], "absent.yaml cannot be read"),
        (["--tasks", "math500", "--data", "."], "math500"),
    ],
)
def test_bad_input_is_one_sentence(program: Any, tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run(program, tmp_path, *arguments)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
