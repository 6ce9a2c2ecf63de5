"""The folder of a run: what it may be resumed with, checkpoints, logs, alerts and W&B."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

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
    (tmp_path / "log.jsonl").touch()
    folder_of(tmp_path, {"seed": 2})  # nothing has been made yet
    (tmp_path / "log.jsonl").write_text("{}\n")
    assert folder_of(tmp_path).checkpoint is None
    for _ in range(2):
        with pytest.raises(ValueError, match=r"other settings .seed 1 -> 2"):
            folder_of(tmp_path, {"seed": 2})
        (tmp_path / "log.jsonl").unlink(missing_ok=True)
        (tmp_path / "gates.pt").touch()
    settings = RLKVSettings(model="organisation/model")
    with pytest.raises(ValueError, match=r"other settings \(model_files "):
        RunFolder(tmp_path, settings, ONE)
    with pytest.raises(ValueError, match="continue it with --resume"):
        RunFolder(tmp_path, RLKVSettings(resume=False), ONE)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("gates.pt", "mine", "holds gates.pt, but no run_config"),
        ("adapter", "mine", "holds adapter, but no run_config"),
        ("run_config.json", "[]", "another command"),
        ("run_config.json", "[" * 99999, "is not JSON"),
        ("run_config.json", '{"data": 1, "loss": 2, "seed": 1}', "another command"),
        (
            "run_config.json",
            '{"seed": 1, "model_files": 0}',
            "another version of rlkv.*--output-dir",
        ),
        ("run_config.json", f'{{"seed": 1, "format": {FORMAT + 1}}}', "another version"),
    ],
)
def test_files_of_others_are_refused(tmp_path: Path, name: str, content: str, named: str) -> None:
    (tmp_path / name).write_text(content)
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(ValueError, match=named):
        folder_of(tmp_path)
    assert (tmp_path / name).read_text() == content


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


def test_a_checkpoint_appears_when_it_is_complete(tmp_path: Path) -> None:
    def write(step: int, keep: int | None, error: type[BaseException] | None = None) -> list[str]:
        with new_checkpoint(tmp_path, step, keep) as folder:
            folder.mkdir(parents=True)
            (folder / "weights").write_text("x")
            if error is not None:
                raise error
        return sorted(path.name for path in tmp_path.iterdir())

    assert last_checkpoint(tmp_path / "absent") is None
    assert write(9, None) == ["checkpoint-9"]
    with pytest.raises(KeyboardInterrupt):
        write(10, None, KeyboardInterrupt)
    assert (tmp_path / PARTIAL).exists()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-9"
    write(10, None)
    assert write(11, 2) == ["checkpoint-10", "checkpoint-11"]
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
    monkeypatch.setattr(run_folder, "gates_matrix", lambda model: torch.ones(1, 2))
    monkeypatch.setattr(run_folder, "gate_counts", lambda model: [2])
    run = folder_of(tmp_path)
    log = RunLog(run, make_gates=lambda: pytest.fail("no plot is due"))
    log.on_train_begin(None, SimpleNamespace(global_step=0), None)
    for step, reward in enumerate([0.8] * 6 + [0.1] * 8, start=1):
        logs = record(step, reward__mean=reward)
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
