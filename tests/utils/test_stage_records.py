"""A folder refuses stages that were begun with another command, config file or version; a kill leaves it usable."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rlkv.utils.pipeline import Pipeline, Stage
from rlkv.utils.stage_records import StageRecords

CODE = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"


def stage(name: str, *more: str) -> Stage:
    """A stage that leaves ``results/NAME``."""
    done = f"results/{name}"
    return Stage(name, ["-c", CODE, done, *more], Path(done), lambda: 0.0, 1)


def run(root: Path, *stages: Stage) -> None:
    (root / "results").mkdir(exist_ok=True)
    Pipeline(stages, root, root / "results", Console(file=sys.stderr)).run()


def test_another_command_is_refused_and_nothing_starts(tmp_path: Path) -> None:
    run(tmp_path, stage("train", "--steps", "50"))
    before = (tmp_path / "results" / "stages.json").read_bytes()
    refused = r"stage 'train' in .*results was begun with another command \(50; now: 60\): run it again with FRESH=1"
    with pytest.raises(ValueError, match=refused):
        run(tmp_path, stage("filter"), stage("train", "--steps", "60"))
    assert not (tmp_path / "results" / "filter").exists()
    assert (tmp_path / "results" / "stages.json").read_bytes() == before
    run(tmp_path, stage("train", "--steps", "50"))


def test_another_content_of_a_config_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("beta: 1")
    run(tmp_path, stage("train", "a.yaml"))
    run(tmp_path, stage("train", "a.yaml"))
    (tmp_path / "a.yaml").write_text("beta: 2")
    with pytest.raises(ValueError, match=r"'train' in .* was begun with another content of a\.yaml: run it again with"):
        run(tmp_path, stage("train", "a.yaml"))


def test_results_of_other_stages_are_no_config_files(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    made = tmp_path / "results" / "facts.json"
    for text in ("1", "2"):
        made.write_text(text)
        run(tmp_path, stage("train", "results/facts.json"))
    assert json.loads((tmp_path / "results" / "stages.json").read_text())["train"]["configs"] == {}


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, stage("train"))
    monkeypatch.setattr("rlkv.utils.stage_records.__version__", "99")
    with pytest.raises(ValueError, match=r"begun with version .* of this package, which is now 99: run it again"):
        run(tmp_path, stage("train"))


@pytest.mark.parametrize("left", ["results/train", "results/logs/1_train.log"])
def test_results_without_a_record_are_refused(tmp_path: Path, left: str) -> None:
    (tmp_path / left).parent.mkdir(parents=True)
    (tmp_path / left).touch()
    with pytest.raises(
        ValueError, match=r"stage 'train' left results in .*stages.json does not say with which settings"
    ):
        run(tmp_path, stage("train"))


def test_a_failed_stage_has_a_record_and_goes_on(tmp_path: Path) -> None:
    wants_file = "import pathlib, sys; assert pathlib.Path('now').exists(); pathlib.Path(sys.argv[1]).touch()"
    flaky = Stage("flaky", ["-c", wants_file, "results/flaky"], Path("results/flaky"), lambda: 0.0, 1)
    with pytest.raises(ValueError, match="'flaky' failed"):
        run(tmp_path, flaky)
    (tmp_path / "now").touch()
    run(tmp_path, flaky)
    assert (tmp_path / "results" / "flaky").exists()


def test_the_record_is_there_before_the_stage_starts(tmp_path: Path) -> None:
    look = "import pathlib, sys; assert '\"first\"' in pathlib.Path('results/stages.json').read_text(); " + CODE
    run(tmp_path, Stage("first", ["-c", look, "results/first"], Path("results/first"), lambda: 0.0, 1))


def test_a_config_file_changed_while_the_pipeline_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("beta: 1")
    records = StageRecords(tmp_path / "results", tmp_path)
    records.check("train", ["train.py", "a.yaml"], has_results=False)
    (tmp_path / "a.yaml").write_text("beta: 2")
    with pytest.raises(ValueError, match=r"another content of a\.yaml"):
        records.begin("train", ["train.py", "a.yaml"])
    assert not (tmp_path / "results" / "stages.json").exists()
