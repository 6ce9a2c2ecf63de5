"""The JSONL log after a resume, alerts, sampled texts, and W&B without a login."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlkv.training.run_folder import Alert, CollapseWatch, JsonlLog, append_record
from rlkv.utils.files import read_log
from tests.helpers import random_run
from tests.helpers.random_run import checksum_reward
from tests.helpers.run_logs import record


def test_a_resumed_log_drops_later_and_broken_records(tmp_path: Path) -> None:
    for name in ("log.jsonl", "gates.jsonl"):
        lines = [json.dumps({"step": step, "value": step / 3}) for step in (1, 2, 3)]
        (tmp_path / name).write_text("\n".join(lines) + '\n{"step": 4, "val')
    JsonlLog(tmp_path).on_train_begin(None, SimpleNamespace(global_step=2), None)
    for name in ("log.jsonl", "gates.jsonl"):
        assert read_log(tmp_path / name) == [
            {"step": 1, "value": 1 / 3},
            {"step": 2, "value": 2 / 3},
        ]
        assert (tmp_path / name).read_text().endswith("\n")


def test_a_collapse_is_told_once_also_after_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[Alert] = []
    watch = CollapseWatch(tmp_path, [told.append])
    rewards = [0.8] * 6 + [0.1] * 8
    watch.on_train_begin(None, None, None)
    for step, reward in enumerate(rewards, start=1):
        logs = record(step, reward__mean=reward)
        del logs["step"]
        append_record(tmp_path / "log.jsonl", step, logs)
        watch.on_log(None, SimpleNamespace(global_step=step), None, logs=logs)
    assert [alert.title for alert in told] == ["The reward has collapsed"]
    assert (
        capsys.readouterr().out.count(
            "warning: The reward has collapsed. The mean reward fell from 0.80"
        )
        == 1
    )
    watch.on_train_begin(None, None, None)
    watch.on_log(None, SimpleNamespace(global_step=15), None, logs=record(15, reward__mean=0.1))
    assert len(told) == 1


class FakeRun:
    url, id = "https://wandb.example/run", "abc"

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.artifacts: list[Any] = []
        self.finished = False

    def log_artifact(self, artifact: Any) -> None:
        self.artifacts.append(artifact)

    def log(self, record: dict[str, Any], step: int) -> None:
        self.records.append({"at": step, **record})

    def finish(self) -> None:
        self.finished = True


@pytest.mark.parametrize(
    ("asked", "login", "used"),
    [("online", False, "offline"), ("online", True, "online"), ("offline", True, "offline")],
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
    names = {
        "collapse/reward_mean",
        "convergence/penalty_beta_prime",
        "heads/gates_mean",
        "heads/gates",
    }
    assert names | {"time/time_step_s", "samples/texts"} <= run.records[0].keys()
    assert {"heads/heat_map", "heads/histogram", "collapse/reward_against_sparsity"} <= run.records[
        1
    ].keys()
    (artifact,) = run.artifacts
    assert set(artifact.manifest.entries) == {"gates.safetensors", "heat_map.png"}
    texts = run.records[0]["samples/texts"]
    logged = read_log(tmp_path / "run" / "samples.jsonl")
    assert [
        dict(zip(["step", *texts.columns], [1, *row], strict=True)) for row in texts.data
    ] == logged
    assert len(logged) == 8
    assert [row["right"] for row in logged] == checksum_reward(
        [row["text"] for row in logged], [row["answer"] for row in logged]
    )
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
