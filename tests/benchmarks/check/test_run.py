"""The check-up's bookkeeping: what fails is named and stops nothing, and a stopped run leaves what
it has.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlkv.benchmarks.check import run as run_module
from rlkv.benchmarks.check.config import CheckConfig
from rlkv.benchmarks.check.one import CannotRun, Check, Findings, Setting
from rlkv.benchmarks.check.run import run_checks
from rlkv.cli.jobs import bench_main as main
from tests.helpers.exit_code import exit_code


def passes(setting: Setting, found: Findings) -> None:
    found.figures["tokens/s"] = 12.3456


def fails(setting: Setting, found: Findings) -> None:
    found.require(True, "not noted")
    found.require(1 + 1 == 3, "two is not three")
    found.require(False, "nor is four")


def raises(setting: Setting, found: Findings) -> None:
    found.figures["before"] = 1
    raise KeyError("absent")


def cannot(setting: Setting, found: Findings) -> None:
    raise CannotRun("it lacks a thing")


def interrupted(setting: Setting, found: Findings) -> None:
    raise KeyboardInterrupt


def run(folder: Path, *functions: Any) -> tuple[int, list[dict[str, Any]]]:
    checks = [
        Check(function.__name__, f"{function.__name__} it does.", function)
        for function in functions
    ]
    code = run_checks(CheckConfig(device="cpu", output_dir=folder), checks)
    return code, json.loads((folder / "check.json").read_text())["results"]


def test_a_check_that_fails_or_raises_is_named_and_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = run(tmp_path, fails, raises, cannot, passes)
    assert code == 1
    assert [row["outcome"] for row in rows] == ["fails", "fails", "cannot run", "passes"]
    reasons = ["two is not three; nor is four", "KeyError: 'absent'", "it lacks a thing", ""]
    assert [row["reason"] for row in rows] == reasons
    assert "in raises" in rows[1]["traceback"]
    assert rows[1]["figures"] == {"before": 1}
    table = (tmp_path / "check.md").read_text()
    for name, reason in zip(("fails", "raises"), reasons, strict=False):
        assert any(line.startswith(f"| {name} |") and reason in line for line in table.splitlines())
    assert "tokens/s 12.3" in table
    assert "1 passes, 2 fails, 1 cannot run" in table
    out = capsys.readouterr().out
    assert "[2/4] raises: raises it does." in out
    assert "2 of 4 checks failed" in out


def test_what_cannot_run_is_not_a_failure(tmp_path: Path) -> None:
    assert run(tmp_path, passes, cannot)[0] == 0


def test_a_stopped_run_leaves_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, passes, interrupted)
    found = json.loads((tmp_path / "check.json").read_text())
    assert [row["check"] for row in found["results"]] == ["passes"]
    assert {"config", "versions", "hardware", "command"} <= found.keys()
    assert "1 of 2 checks" in (tmp_path / "check.md").read_text()


def test_checks_after_one_that_broke_the_gpu_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "device_error", lambda setting: "an illegal memory access")
    code, rows = run(tmp_path, raises, passes)
    assert code == 1
    assert rows[1]["outcome"] == "cannot run"
    assert "since raises (an illegal memory access): --only passes" in rows[1]["reason"]


main_code = partial(exit_code, main, "rlkv-bench", "check")


def test_the_command_runs_chosen_checks(tmp_path: Path) -> None:
    code = main_code("--device", "cpu", "--only", "decode", "update", "--output-dir", tmp_path)
    assert code == 0
    found = json.loads((tmp_path / "check.json").read_text())
    assert [row["check"] for row in found["results"]] == ["update", "decode"]
    assert found["results"][1]["figures"]["sparsity 0.5, batch 8: tokens/s"] > 0


def test_an_unknown_name_is_a_users_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_code("--device", "cpu", "--only", "speed", "--output-dir", tmp_path) == 2
    assert capsys.readouterr().err.startswith(
        "error: there is no check 'speed': choose from local_attention, "
    )
