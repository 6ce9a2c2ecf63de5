"""The JSONL log after a resume, and W&B without a login."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlkv.training.callbacks import JsonlLog
from rlkv.utils.jsonl import read_log
from tests.helpers import random_run


def test_a_resumed_log_drops_later_and_broken_records(tmp_path: Path) -> None:
    for name in ("log.jsonl", "gates.jsonl"):
        lines = [json.dumps({"step": step, "value": step / 3}) for step in (1, 2, 3)]
        (tmp_path / name).write_text("\n".join(lines) + '\n{"step": 4, "val')
    JsonlLog(tmp_path).on_train_begin(None, SimpleNamespace(global_step=2), None)
    for name in ("log.jsonl", "gates.jsonl"):
        assert read_log(tmp_path / name) == [{"step": 1, "value": 1 / 3}, {"step": 2, "value": 2 / 3}]
        assert (tmp_path / name).read_text().endswith("\n")


class FakeRun:
    url = "https://wandb.example/run"

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.finished = False

    def log(self, record: dict[str, Any], step: int) -> None:
        self.records.append({"at": step, **record})

    def finish(self) -> None:
        self.finished = True


@pytest.mark.parametrize(
    ("asked", "login", "used"), [("online", False, "offline"), ("online", True, "online"), ("offline", True, "offline")]
)
def test_wandb_gets_sections_and_falls_back_to_offline(
    asked: str,
    login: bool,
    used: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wandb = pytest.importorskip("wandb")
    run, started = FakeRun(), {}
    monkeypatch.setattr(wandb, "login", lambda **kwargs: login)
    monkeypatch.setattr(wandb, "init", lambda **kwargs: started.update(kwargs) or run)
    random_run.run(tmp_path / "run", ["--wandb", asked, "--max_steps", "2", "--image_steps", "2"])
    assert started["mode"] == used
    out = capsys.readouterr().out
    assert ("no login found" in out) == (asked != used)
    assert run.url in out
    assert [record["at"] for record in run.records] == [1, 2]
    assert {"reward/mean", "penalty/beta_prime", "gates/mean", "gates/all", "time/step_s"} <= run.records[0].keys()
    assert {"images/heat_map", "images/histogram"} <= run.records[1].keys()
    assert run.finished
    assert started["config"]["l1_beta"] == 0.05


def test_wandb_works_offline_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    random_run.run(tmp_path / "run", ["--wandb", "offline", "--max_steps", "1"])
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))


def test_disabled_wandb_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "init", lambda **kwargs: pytest.fail("started W&B"))
    random_run.run(tmp_path / "run", ["--wandb", "disabled", "--max_steps", "1"])
    assert not (tmp_path / "run" / "wandb").exists()
