"""The folder of a run: what it may be resumed with, checkpoints, logs, alerts and W&B."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlkv.training import run_folder
from rlkv.training.config import RLKVSettings
from rlkv.training.run_folder import (
    FORMAT,
    PARTIAL,
    SPAN,
    RunFolder,
    RunLog,
    alerts,
    append_record,
    last_checkpoint,
    link,
    new_checkpoint,
)
from rlkv.utils.files import read_log
from rlkv.utils.store import StoreInUseError
from tests.helpers import random_run
from tests.helpers.random_run import checksum_reward
from tests.helpers.run_logs import record

ONE = {"seed": 1}


def folder_of(path: Path, config: dict[str, Any] | None = None) -> RunFolder:
    return RunFolder(path, RLKVSettings(), config or ONE)


# --- which folders are refused


def test_a_folder_that_machines_do_not_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "SHARED_SECONDS", 1)
    own = folder_of(tmp_path / "run")
    with pytest.raises(ValueError, match="disk that all of them share"):
        own.check_shared()
    folder_of(tmp_path / "run", {"seed": 2}).write_config()  # of an earlier run on this machine
    with pytest.raises(ValueError, match="disk that all of them share"):
        own.check_shared()
    own.write_config()
    own.check_shared()


def test_results_of_other_settings_are_not_overwritten(tmp_path: Path) -> None:
    folder_of(tmp_path).write_config()
    folder_of(tmp_path, {"seed": 2})  # nothing has been made yet
    (tmp_path / "log.jsonl").touch()
    folder_of(tmp_path, {"seed": 2})
    (tmp_path / "log.jsonl").write_text("{}\n")
    assert folder_of(tmp_path).checkpoint is None
    for _ in range(2):
        with pytest.raises(ValueError, match=r"other settings .seed 1 -> 2"):
            folder_of(tmp_path, {"seed": 2})
        (tmp_path / "log.jsonl").unlink(missing_ok=True)
        (tmp_path / "gates.pt").touch()
    with pytest.raises(ValueError, match="continue it with --resume"):
        RunFolder(tmp_path, RLKVSettings(resume=False), ONE)
    (tmp_path / "run_config.json").unlink()
    with pytest.raises(ValueError, match=r"holds gates\.pt, but no run_config"):
        folder_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("summary.json", "mine", "holds summary.json, but no run_config"),
        ("adapter", "mine", "holds adapter, but no run_config"),
        ("run_config.json", "[]", "another command"),
        ("run_config.json", "[" * 99999, "is not JSON"),
        ("run_config.json", '{"data": 1, "loss": 2, "seed": 1}', "another command"),
    ],
)
def test_files_of_somebody_else_are_refused(
    tmp_path: Path, name: str, content: str, named: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=named):
        folder_of(tmp_path)
    assert (tmp_path / name).read_text() == content


def test_a_run_of_another_version_is_refused(tmp_path: Path) -> None:
    for noted in ({"seed": 1}, {"seed": 1, "format": FORMAT + 1}):
        (tmp_path / "run_config.json").write_text(json.dumps(noted))
        (tmp_path / "checkpoint-3").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=r"another version of rlkv.*--output-dir"):
            folder_of(tmp_path)


def _train(folder: Path, ready: Any, end: Any) -> None:
    folder_of(folder).write_config()
    ready.set()
    end.wait(60)


@pytest.mark.slow
def test_two_commands_in_one_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, end = context.Event(), context.Event()
    other = context.Process(target=_train, args=(tmp_path, ready, end))
    late = folder_of(tmp_path)  # both have looked before one of them writes
    other.start()
    assert ready.wait(120)
    for start in (lambda: folder_of(tmp_path), late.write_config):
        with pytest.raises(StoreInUseError, match="another process"):
            start()
    end.set()
    other.join()
    (tmp_path / "log.jsonl").write_text("{}\n")
    late.write_config()


def test_the_link_to_the_gates_replaces_links_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "gates.pt").write_text(run)
        link(Path("new/gates.pt"), tmp_path / run / "gates.pt")
        assert Path("new/gates.pt").read_text() == run
    Path("mine.pt").write_text("mine")
    link(Path("mine.pt"), tmp_path / "two" / "gates.pt")
    assert Path("mine.pt").read_text() == "mine"
    assert "mine.pt is a file of its own" in capsys.readouterr().out


# --- checkpoints


def write(root: Path, step: int, keep: int | None = None) -> None:
    with new_checkpoint(root, step, keep) as folder:
        folder.mkdir(parents=True)
        (folder / "weights").write_text("x")


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_appears_when_it_is_complete(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "absent") is None
    write(tmp_path, 9)
    with pytest.raises(KeyboardInterrupt), new_checkpoint(tmp_path, 10, None) as folder:  # noqa: PT012
        folder.mkdir(parents=True)
        raise KeyboardInterrupt
    assert names(tmp_path) == [PARTIAL, "checkpoint-9"]
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-9"
    write(tmp_path, 10)
    write(tmp_path, 11, keep=2)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-11"]
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-11"
    assert (tmp_path / "checkpoint-11" / "weights").exists()


# --- alerts


def titles(records: list[dict[str, Any]]) -> list[str]:
    return [alert.title for alert in alerts(records)]


def test_a_healthy_training_raises_no_alert() -> None:
    assert alerts([]) == []
    # all groups right without spread: only the penalty acts, as it should
    changes = {"reward__mean": 1.0, "reward__zero_spread_share": 1.0}
    assert titles([record(step, **changes) for step in range(1, 13)]) == []
    # logs of other finders have none of the figures
    assert alerts([{"step": 1, "traces/kept": 0.9}, {"step": 2, "traces/kept": 0.1}]) == []


def test_a_reward_that_falls_is_told_with_its_steps() -> None:
    fine = [record(step, reward__mean=0.8) for step in range(1, 11)]
    fallen = [record(step, reward__mean=0.3) for step in range(11, 11 + SPAN)]
    assert titles(fine + fallen[:-2]) == []  # the mean of the last five is still above half
    (alert,) = alerts(fine + fallen)
    assert alert.title == "The reward has collapsed"
    assert "from 0.80 (steps 6 to 10) to 0.30 (the last 5 steps)" in alert.text
    # one that was never there does not fall
    assert titles([record(s, reward__mean=0.1 if s < 7 else 0.0) for s in range(1, 13)]) == []


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
    monkeypatch.setattr(run_folder, "gates_matrix", lambda model: torch.ones(1, 2))
    run = folder_of(tmp_path)
    log = RunLog(run, make_gates=lambda: pytest.fail("no plot is due"))
    rewards = [0.8] * 6 + [0.1] * 8
    log.on_train_begin(None, None, None)
    for step, reward in enumerate(rewards, start=1):
        logs = record(step, reward__mean=reward)
        del logs["step"]
        log.on_log(None, SimpleNamespace(global_step=step), None, logs=logs)
    assert capsys.readouterr().out.count("warning: The reward has collapsed. The mean reward") == 1
    append_record(tmp_path / "log.jsonl", 15, {"gates/mean": 1.0})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 16, "val')  # torn by a kill
    again = RunLog(run, make_gates=lambda: pytest.fail("no plot is due"))
    again.on_train_begin(None, SimpleNamespace(global_step=14), None)
    for name in ("log.jsonl", "gates.jsonl"):
        assert [row["step"] for row in read_log(tmp_path / name)] == list(range(1, 15))
        assert (tmp_path / name).read_text().endswith("\n")
    logs = record(15, reward__mean=0.1)
    again.on_log(None, SimpleNamespace(global_step=15), None, logs=logs)
    assert capsys.readouterr().out == ""


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
    ("asked", "login", "used"), [("online", False, "offline"), ("online", True, "online")]
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
    run = FakeRun()
    started: dict[str, Any] = {}
    monkeypatch.setattr(wandb, "login", lambda **kwargs: login)
    monkeypatch.setattr(wandb, "init", lambda **kwargs: started.update(kwargs) or run)
    options = ["--wandb", asked, "--max-steps", "2", "--image-steps", "2"]
    random_run.run(tmp_path / "run", options)
    assert started["mode"] == used
    assert started["config"]["l1_beta"] == 0.05
    out = capsys.readouterr().out
    assert ("no login found" in out) == (asked != used)
    assert run.url in out
    assert [record["at"] for record in run.records] == [1, 2]
    first, second = run.records
    sent = {"collapse/reward_mean", "convergence/penalty_beta_prime", "heads/gates_mean"}
    assert sent | {"heads/gates", "time/time_step_s", "samples/texts"} <= first.keys()
    plots = {"heads/heat_map", "heads/histogram", "collapse/reward_against_sparsity"}
    assert plots <= second.keys()
    (artifact,) = run.artifacts
    assert set(artifact.manifest.entries) == {"gates.safetensors", "heat_map.png"}
    texts = first["samples/texts"]
    logged = read_log(tmp_path / "run" / "samples.jsonl")
    columns = ["step", *texts.columns]
    assert [dict(zip(columns, [1, *row], strict=True)) for row in texts.data] == logged
    assert len(logged) == 8
    right = checksum_reward([row["text"] for row in logged], [row["answer"] for row in logged])
    assert [row["right"] for row in logged] == right
    assert run.finished


def test_wandb_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    random_run.run(tmp_path / "run", ["--wandb", "offline", "--max-steps", "1"])
    assert list((tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb"))
