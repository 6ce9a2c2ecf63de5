"""Logs of a run: alerts, what a resumed run drops, and W&B."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rlkv.training import logs
from rlkv.training.config import RLKVSettings
from rlkv.training.logs import SPAN, RunLog, alerts, append_record
from rlkv.training.run_folder import RunFolder
from rlkv.utils.files import read_log
from tests.helpers import random_run
from tests.helpers.random_run import checksum_reward
from tests.helpers.run_logs import record

# --- alerts


def titles(records: list[dict[str, Any]]) -> list[str]:
    return [alert.title for alert in alerts(records)]


def test_a_healthy_training_raises_no_alert() -> None:
    assert alerts([]) == []
    # all groups right without spread: only the penalty acts, as it should
    changes = {"reward__mean": 1.0, "reward__zero_spread_share": 1.0}
    assert titles([record(step, **changes) for step in range(1, 13)]) == []
    # a reward that was never there does not fall
    assert titles([record(s, reward__mean=0.1 if s < 7 else 0.0) for s in range(1, 13)]) == []
    # logs of other finders have none of the figures
    assert alerts([{"step": 1, "traces/kept": 0.9}, {"step": 2, "traces/kept": 0.1}]) == []


def test_a_reward_that_falls_is_told_with_its_steps() -> None:
    fine = [record(step, reward__mean=0.8) for step in range(1, 11)]
    fallen = [record(step, reward__mean=0.3) for step in range(11, 11 + SPAN)]
    assert titles(fine + fallen[:-2]) == []  # the mean of the last five is still above half
    (alert,) = alerts(fine + fallen)
    assert alert.title == "The reward has collapsed"
    assert "from 0.80 (steps 6 to 10) to 0.30 (the last 5 steps)" in alert.text


@pytest.mark.parametrize(
    ("title", "changes"),
    [
        ("No group has a spread", {"reward__mean": 0.0, "reward__zero_spread_share": 1.0}),
        ("Completions no longer end", {"response__truncated_share": 0.6}),
        ("All gates are below 0.1", {"gates__below_0.1": 1.0}),
        ("Steps were left out", {"train__skipped_steps": 2}),
    ],
)
def test_other_signs(title: str, changes: dict[str, float]) -> None:
    before = [record(step, reward__mean=0.1) for step in range(1, 7)]
    after = [record(step, **{"reward__mean": 0.1, **changes}) for step in range(7, 13)]
    assert titles(before) == []
    assert titles(before + after) == [title]


# --- logs and W&B


def test_a_resumed_log_drops_later_records_and_tells_a_collapse_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "gates_matrix", lambda model: torch.ones(1, 2))
    monkeypatch.setattr(logs, "gate_counts", lambda model: [2])
    run = RunFolder(tmp_path, RLKVSettings(), {"seed": 1})
    log = RunLog(run, make_gates=lambda: pytest.fail("no plot is due"))
    log.on_train_begin(None, SimpleNamespace(global_step=0), None)
    for step, reward in enumerate([0.8] * 6 + [0.1] * 8, start=1):
        own = record(step, reward__mean=reward)
        log.on_log(None, SimpleNamespace(global_step=step), None, logs=own)
    assert capsys.readouterr().out.count("warning: The reward has collapsed. The mean reward") == 1
    append_record(tmp_path / "log.jsonl", 15, {"gates/mean": 1.0})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 16, "val')  # torn by a kill
    again = RunLog(run, make_gates=lambda: pytest.fail("no plot is due"))
    again.on_train_begin(None, SimpleNamespace(global_step=14), None)
    for name in ("log.jsonl", "gates.jsonl"):
        assert [row["step"] for row in read_log(tmp_path / name)] == list(range(1, 15))
        assert (tmp_path / name).read_text().endswith("\n")
    own = record(15, reward__mean=0.1)
    again.on_log(None, SimpleNamespace(global_step=15), None, logs=own)
    assert capsys.readouterr().out == ""


def test_wandb_gets_sections_and_falls_back_to_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb = pytest.importorskip("wandb")
    run = Mock(url="https://wandb.example/run", id="abc")
    started = Mock(return_value=run)
    monkeypatch.setattr(wandb, "login", lambda **kwargs: False)
    monkeypatch.setattr(wandb, "init", started)
    options = ["--wandb", "online", "--max-steps", "2", "--image-steps", "2"]
    random_run.run(tmp_path / "run", options)
    assert started.call_args.kwargs["mode"] == "offline"
    assert started.call_args.kwargs["config"]["l1_beta"] == 0.05
    out = capsys.readouterr().out
    assert "no login found" in out
    assert run.url in out
    assert [call.kwargs["step"] for call in run.log.call_args_list] == [1, 2]
    first, second = (call.args[0] for call in run.log.call_args_list)
    assert "heads/heat_map" not in first  # tests/golden records all names
    assert "heads/heat_map" in second
    run.log_artifact.assert_called_once()
    texts = first["samples/texts"]
    logged = read_log(tmp_path / "run" / "samples.jsonl")
    columns = ["step", *texts.columns]
    assert [dict(zip(columns, [1, *row], strict=True)) for row in texts.data] == logged
    assert len(logged) == 8
    right = checksum_reward([row["text"] for row in logged], [row["answer"] for row in logged])
    assert [row["right"] for row in logged] == right
    run.finish.assert_called_once_with()
