"""rlkv-eval on the tiny model: files, report, agreement with rlkv-infer, resuming, bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import yaml

from rlkv.cache import CacheSettings
from rlkv.cli.app import parse
from rlkv.cli.jobs import run_eval as evaluate
from rlkv.evaluation import sandbox
from rlkv.evaluation.evaluate import EvalConfig, parse_methods
from rlkv.evaluation.sandbox import SandboxError
from rlkv.evaluation.tasks.registry import find_tasks
from rlkv.eviction import RKV
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.options import CacheOptions
from rlkv.models import builtin as hub
from rlkv.models.shape import ModelShape
from rlkv.tiny import load
from rlkv.cli.app import CONFIGS
from rlkv.utils.progress import ProgressBar
from tests.helpers.paths import ROOT
from tests.helpers.programs import load_program

SMALL = (
    "--limit",
    "6",
    "--max-new-tokens",
    "60",
    "--sink",
    "4",
    "--window",
    "16",
    "--batch-size",
    "4",
)


@pytest.fixture(scope="module")
def gates_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, _ = load()
    path = tmp_path_factory.mktemp("gates") / "gates.pt"
    alpha = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    HeadGates(
        alpha, model=ModelShape.from_config(model.config, "tiny"), deploy_sink=4, deploy_window=16
    ).save(path)
    return path


def run(folder: Path, *more: str) -> None:
    named = [option for option in more if option.startswith("--")]
    small = [
        part
        for pair in zip(SMALL[::2], SMALL[1::2], strict=True)
        if pair[0] not in named
        for part in pair
    ]
    evaluate(["--output-dir", str(folder), *small, *more])


def test_files_report_and_resuming(
    gates_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        "--gates",
        f"mine={gates_file}",
        "--methods",
        "full",
        "mine@0.5",
        "mine@0.5+rkv@24:buffer=4",
    )
    run(tmp_path, *options)
    assert (tmp_path / "report.md").read_text() in capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [row["method"] for row in results] == ["full", "mine@0.5", "mine@0.5+rkv@24:buffer=4"]
    assert all(row["n"] == 6 for row in results)
    assert results[0]["kv_bytes"] == results[0]["kv_bytes_full"]
    assert results[1]["kv_bytes"] < results[1]["kv_bytes_full"]
    assert results[1]["difference"] == pytest.approx(
        results[1]["accuracy"] - results[0]["accuracy"]
    )
    for name in ("report.md", "report.html"):
        assert "mine+rkv@24:buffer=4" in (tmp_path / name).read_text()
    with pytest.raises(
        ValueError,
        match=r"--baseline 'mine' is not among the methods: choose from full, mine@0\.5,",
    ):
        run(tmp_path, *options, "--baseline", "mine")
    config = json.loads((tmp_path / "results.json").read_text())["config"]
    assert (config["sink"], config["window"], config["stop_repetitive"]) == (4, 16, False)

    rows = tmp_path / "tiny" / "full" / "rows-0-of-1.jsonl"
    before = rows.read_bytes()
    rows.write_bytes(before[: len(before) // 2])  # as a kill would leave it
    run(tmp_path, *options)
    again, want = (
        {line["key"]: {**line, "seconds": 0} for line in map(json.loads, text.splitlines())}
        for text in (rows.read_text(), before.decode())
    )
    assert again == want

    run(tmp_path, *options, "--batch-size", "3")  # less memory, the same rows
    with pytest.raises(ValueError, match=r"max_new_tokens.*60.*50"):
        run(tmp_path, *options, "--max-new-tokens", "50")


def test_progress_after_a_stop_starts_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    file = tmp_path / "tiny" / "full" / "rows-0-of-1.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3]))
    right = [json.loads(line)["correct"] for line in lines[:3]]
    shown: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ProgressBar, "resume", lambda self, done: shown.append(("resumed", done)))
    monkeypatch.setattr(
        ProgressBar, "update", lambda self, done, total, note: shown.append((done, total, note))
    )
    run(tmp_path)
    assert shown[:2] == [("resumed", 3), (3, 6, f"accuracy {sum(right) / 3:.3f}")]
    accuracy = json.loads((tmp_path / "results.json").read_text())["results"][0]["accuracy"]
    assert shown[-1] == (6, 6, f"accuracy {accuracy:.3f}")


def test_samples_and_early_stops_are_reported(tmp_path: Path) -> None:
    options = [
        "--num-samples",
        "3",
        "--temperature",
        "2.0",
        "--limit",
        "3",
        "--repetition",
        "8",
        "7",
    ]
    run(tmp_path, *options, "--stop-repetitive")
    found = json.loads((tmp_path / "results.json").read_text())["results"][0]
    assert (found["n"], found["samples"], list(found["pass_at_k"])) == (3, 3, ["1", "2"])
    lines = (tmp_path / "tiny" / "full" / "rows-0-of-1.jsonl").read_text().splitlines()
    ended = sum(json.loads(line)["finish_reason"] == "repetition" for line in lines)
    assert found["stopped_for_repetition"] == ended > 0
    assert "such texts are ended there" in (tmp_path / "report.md").read_text()


def test_where_programs_run_is_said_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, folder = tmp_path / "mbpp_test.jsonl", tmp_path / "out"
    data.write_text('{"prompt": "Add.", "test": ["assert f(3) == 4"], "code": ""}')
    options = ["--tasks", "mbpp", "--data", str(data)]
    monkeypatch.setattr(
        sandbox, "find_isolation", lambda: _raise(SandboxError("install bubblewrap"))
    )
    with pytest.raises(ValueError, match="install bubblewrap"):
        run(folder, *options)
    assert not folder.exists()
    monkeypatch.setattr(sandbox, "find_isolation", lambda: (sandbox.Isolation(), "a box"))
    run(folder, *options)
    assert json.loads((folder / "results.json").read_text())["config"]["sandbox"] == "a box"
    assert "Programs were shut in by a box." in (folder / "report.md").read_text()


def _raise(error: Exception) -> NoReturn:
    raise error


@pytest.mark.parametrize("name", ["eval_llama8b", "eval_qwen7b", "eval_qwen3_4b", "eval_tiny"])
def test_the_example_configs_parse(name: str) -> None:
    config = parse(EvalConfig, arguments=["--config", name, "--output-dir", "out"])
    is_tiny = name == "eval_tiny"
    assert config.batch_size == (50 if is_tiny else 16)
    assert config.repetition == (400, 40)
    assert config.stop_repetitive is not is_tiny
    rankings = [item.partition("=")[0] for item in config.gates]
    methods = parse_methods(config.methods, rankings)
    assert methods[0].name == "full"
    assert {m.ranking for m in methods} == {None, "random-heads", *rankings}
    assert {m.policy.name for m in methods if m.policy} == ({"rkv"} if is_tiny else {"rkv", "h2o"})
    tasks = find_tasks(config.tasks, None)
    assert {task.name for task in tasks} >= (
        {"tiny"} if is_tiny else {"gsm8k", "aime24", "mmlu_pro:law"}
    )


@pytest.mark.parametrize("name", ["llama8b", "qwen7b", "qwen3_4b"])
def test_the_configs_evaluate_what_the_training_writes(name: str) -> None:
    config = parse(EvalConfig, arguments=["--config", f"eval_{name}", "--output-dir", "out"])
    trained = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    assert config.gates[0] == f"rlkv={trained['output_dir']}/gates.pt"
    assert (config.model, config.sink, config.window) == (
        trained["model"],
        trained["deploy_sink"],
        trained["deploy_window"],
    )


def test_sizes_come_from_the_gates(gates_file: Path) -> None:
    gates = HeadGates.load(gates_file)
    other = replace(gates, deploy_sink=16, deploy_window=64)
    assert CacheOptions().cache_settings({}) == CacheSettings(16, 64)
    assert CacheOptions().cache_settings({"a": gates}) == CacheSettings(4, 16)
    assert CacheOptions(sink=8, prefill="local").cache_settings({"a": gates}) == CacheSettings(
        8, 16, "local"
    )
    assert CacheOptions(sink=8, window=32).cache_settings(
        {"a": gates, "b": other}
    ) == CacheSettings(8, 32)
    with pytest.raises(ValueError, match=r"window.*a 16, b 64.*--window"):
        CacheOptions(sink=8).cache_settings({"a": gates, "b": other})


def test_the_prompt_is_protected_if_the_gates_or_the_options_say_so(gates_file: Path) -> None:
    gates = HeadGates.load(gates_file)
    protecting = replace(gates, deploy_protect_prompt=True)
    assert not CacheOptions().cache_settings({}).protect_prompt
    assert CacheOptions().cache_settings({"a": protecting}) == CacheSettings(
        4, 16, protect_prompt=True
    )
    assert (
        CacheOptions(protect_prompt=True)
        .cache_settings({"a": gates, "b": protecting})
        .protect_prompt
    )
    assert not CacheOptions(protect_prompt=False).cache_settings({"a": protecting}).protect_prompt
    # a policy has a field of its own
    assert not CacheOptions().cache_settings({"a": protecting}, RKV(budget=64)).protect_prompt
    with pytest.raises(ValueError, match=r"protect_prompt.*a False, b True.*--protect-prompt"):
        CacheOptions().cache_settings({"a": gates, "b": protecting})


def names_the_task_and_the_file(err: str) -> None:
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith(
        "error: cannot load task 'mmlu_pro:law' (TIGER-Lab/MMLU-Pro) from the hub"
    )
    assert lines[0].endswith("or a folder that holds mmlu_pro.jsonl")


def test_gates_that_protect_the_prompt_leave_policies_alone(
    gates_file: Path, tmp_path: Path
) -> None:
    protected = tmp_path / "protected.pt"
    replace(HeadGates.load(gates_file), deploy_protect_prompt=True).save(protected)
    methods = ("mine@0.5", "mine@0.5+rkv@24:buffer=4")
    for name, file in (("plain", gates_file), ("protected", protected)):
        run(tmp_path / name, "--gates", f"mine={file}", "--methods", *methods)
    of = {
        name: json.loads((tmp_path / name / "results.json").read_text())["results"]
        for name in ("plain", "protected")
    }
    held = {name: [row["kv_bytes"] for row in rows] for name, rows in of.items()}
    assert held["protected"][0] > held["plain"][0]
    assert held["protected"][1] == held["plain"][1]


def test_without_hub_and_file_the_program_ends_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub, "connection_error", lambda *args: "no route")
    options = ["--tasks", "mmlu_pro:law", "--output-dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["inference/evaluate.py", *options])
    with pytest.raises(SystemExit) as ended:
        load_program("inference/evaluate.py").main()
    assert ended.value.code == 2
    names_the_task_and_the_file(capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_in_offline_mode_the_process_ends_with_one_sentence(tmp_path: Path) -> None:
    program = ROOT / "inference" / "evaluate.py"
    command = [
        sys.executable,
        str(program),
        "--tasks",
        "mmlu_pro:law",
        "--output-dir",
        str(tmp_path / "out"),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}  # read when `datasets` is imported
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    names_the_task_and_the_file(done.stderr)
    assert not (tmp_path / "out").exists()


def test_defaults_from_yaml(gates_file: Path, tmp_path: Path) -> None:
    config = tmp_path / "study.yaml"
    config.write_text(f"methods: [full, mine@0.25]\ngates: [mine={gates_file}]\ntasks: tiny\n")
    run(tmp_path / "out", "--config", str(config))
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert [row["method"] for row in results] == ["full", "mine@0.25"]
    config.write_text("method: full\n")
    with pytest.raises(ValueError, match=r"study.yaml.* method:"):
        run(tmp_path / "out", "--config", str(config))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "foo@1"], "is not understood"),
        (["--methods", "rlkv@0.5"], "is not understood"),
        (
            ["--methods", "random-heads@0.5", "full", "random-heads@0.50"],
            "--methods.*'random-heads@0.50'",
        ),
        (["--tasks", "math501"], "unknown task"),
        (["--num-samples", "4"], "greedy"),
        (["--limit", "0"], "--limit"),
        (["--repetition", "40", "400"], "--repetition"),
        (["--config", "absent.yaml"], "--config .*absent.yaml"),
        (["--tasks", "math500", "--data", "."], "math500"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path, *arguments)
