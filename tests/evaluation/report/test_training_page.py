"""The page of a training run: what it shows, and of which finders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.evaluation import run_page as module
from rlkv.evaluation.report import Heading, Page, Panel, Picture, Table
from rlkv.evaluation.run_page import MOST_COMPARED, training_page, write_training_page
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.training.run_folder import (
    EXPORTED,
    LOG,
    RUN_CONFIG,
    SUMMARY,
    RunLogs,
    append_record,
    section_of,
)
from rlkv.utils.files import write_json
from tests.helpers.run_logs import LAYERS, alpha_after, record, write_sample, write_steps


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Panel]:
    """What would be plotted, by title; the plots themselves are not drawn."""
    drawn: dict[str, Panel] = {}

    def plot(path: Path, panel: Panel) -> Path:
        drawn[panel.title] = panel
        return path

    monkeypatch.setattr(module, "plot_curves", plot)
    return drawn


def page_of(folder: Path) -> Page:
    return training_page(RunLogs.read(folder), folder)


def tables(page: Page) -> dict[str, Table]:
    return {block.columns[0]: block for block in page.blocks if isinstance(block, Table)}


def test_the_page_of_a_run_answers_its_questions(tmp_path: Path, panels: dict[str, Panel]) -> None:
    write_steps(tmp_path, 1, 12)
    append_record(tmp_path / LOG, 13, {"penalty/beta_prime": float("nan")})
    with (tmp_path / LOG).open("a") as log:
        log.write('{"step": 14, "rew')  # while it is being written
    page = page_of(tmp_path)
    text = page.markdown(tmp_path)
    assert "Step 13 of 40, about" in text
    assert "No sign of a collapse" in text
    assert list(panels["Reward against sparsity"].curves) == ["mean reward", "gates below 0.5"]
    assert panels["Penalty"].curves == {
        "beta'": [(float(step), 1e-3, 1e-3, 1e-3) for step in range(1, 13)]
    }
    assert "Steps left out" not in panels
    assert "Share of the last full heads that were full before" in panels
    assert {block.caption for block in page.blocks if isinstance(block, Picture)} == {
        *panels,
        "Gates after step 12",
    }
    full = HeadAllocation.from_gates(HeadGates(torch.tensor(alpha_after(12))), 0.5).full
    heads = tables(page)[""]
    cells = [line[heads.columns.index("sparsity 0.5")].text for line in heads.rows]
    assert cells == [" ".join(map(str, row.nonzero()[:, 0].tolist())) for row in full]
    assert len(cells) == LAYERS
    figures = {
        line[0].text: [cell.text for cell in line[1:]] for line in tables(page)["figure"].rows
    }
    assert figures["response/length_mean"] == ["101", "101", "112", "112"]


def test_one_file_that_loads_nothing(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
    write_sample(tmp_path, 2, "<script>alert(1)</script> Therefore 2", True)
    before = {file.name for file in tmp_path.iterdir()}
    write_training_page(tmp_path, tmp_path / "page.html")
    assert {file.name for file in tmp_path.iterdir()} - before == {"page.html"}
    html = (tmp_path / "page.html").read_text()
    assert set(re.findall(r'src="([^"]{0,22})', html)) == {"data:image/png;base64,"}
    assert html.count("<img ") >= 7
    assert "&lt;script&gt;alert(1)" in html


def test_alerts_are_on_the_page(tmp_path: Path, panels: dict[str, Panel]) -> None:
    write_steps(tmp_path, 1, 10)
    for step in range(11, 16):
        append_record(tmp_path / LOG, step, record(step, reward__mean=0.1))
    text = page_of(tmp_path).markdown(tmp_path)
    assert "The reward has collapsed" in text
    assert "No sign of a collapse" not in text


def test_long_runs_have_no_more_comparisons_than_a_plot_needs(
    tmp_path: Path, panels: dict[str, Panel]
) -> None:
    write_steps(tmp_path, 1, MOST_COMPARED + 30)
    page_of(tmp_path)
    steps = [
        step
        for step, *_ in panels["Share of the last full heads that were full before"].curves[
            "sparsity 0.5"
        ]
    ]
    assert len(steps) == MOST_COMPARED
    assert (steps[0], steps[-1]) == (1, MOST_COMPARED + 30)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"loss/distill": 0.1, "teacher/right": 0.9, "gates/below_0.5": 0.2},
            ["teacher's accuracy", "gates below 0.5"],
        ),
        ({"traces/kept": 0.9, "loss": 0.1}, ["exp(-loss): solutions that stay as they are"]),
    ],
)
def test_logs_of_other_finders(
    tmp_path: Path, values: dict[str, float], expected: list[str], panels: dict[str, Panel]
) -> None:
    for step in (1, 2):
        append_record(tmp_path / LOG, step, values)
    page_of(tmp_path)
    assert sorted(panels["Reward against sparsity"].curves) == sorted(expected)
    assert "Loss" in panels


def test_a_run_is_finished_when_its_own_settings_were_exported(
    tmp_path: Path, panels: dict[str, Panel]
) -> None:
    with pytest.raises(ValueError, match=r"neither run_config\.json nor log\.jsonl"):
        RunLogs.read(tmp_path)
    config: dict[str, Any] = {"max_steps": 2}
    write_json(tmp_path / RUN_CONFIG, config)
    empty = page_of(tmp_path)
    assert "No step has ended yet" in empty.markdown(tmp_path)
    assert [block.text for block in empty.blocks if isinstance(block, Heading)] == ["Settings"]
    write_steps(tmp_path, 2, 2)
    (tmp_path / EXPORTED).touch()
    write_json(tmp_path / SUMMARY, {"config": config})
    assert "finished" in page_of(tmp_path).markdown(tmp_path)
    write_json(tmp_path / RUN_CONFIG, {"max_steps": 4})  # it goes on
    assert not RunLogs.read(tmp_path).finished


def test_sections() -> None:
    assert section_of("held_out/accuracy_at_0.5") == section_of("reward/mean") == "collapse"
    assert section_of("epoch") == "other"
