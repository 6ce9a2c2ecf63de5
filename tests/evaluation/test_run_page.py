"""The page of a training run: what it shows, and of which finders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.evaluation import run_page as module
from rlkv.evaluation.report import Panel
from rlkv.evaluation.run_page import MOST_COMPARED, training_page, write_training_page
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.training.logs import LOG, append_record
from rlkv.training.run_folder import EXPORTED, RUN_CONFIG, SUMMARY, RunLogs
from rlkv.utils.files import write_json
from tests.helpers.run_logs import alpha_after, write_sample, write_steps

SETTLED = "Share of the last full heads that were full before"


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Panel]:
    """Collect what would be plotted, by title."""
    drawn: dict[str, Panel] = {}

    def plot(path: Path, panel: Panel) -> Path:
        drawn[panel.title] = panel
        return path

    monkeypatch.setattr(module, "plot_curves", plot)
    return drawn


def page_of(folder: Path) -> str:
    return training_page(RunLogs.read(folder), folder).markdown()


def test_the_page_of_a_run(tmp_path: Path, panels: dict[str, Panel]) -> None:
    steps = MOST_COMPARED + 30
    write_steps(tmp_path, 1, steps, total=400)
    append_record(tmp_path / LOG, steps + 1, {"penalty/beta_prime": float("nan")})
    with (tmp_path / LOG).open("a") as log:
        log.write('{"step": 999, "rew')  # while it is being written
    text = page_of(tmp_path)
    assert f"Step {steps + 1} of 400, about" in text
    assert panels["penalty, from 0 to 1"].curves["penalty/beta_prime"][-1][0] == steps
    assert re.search(r"\| penalty/beta_prime \|.*\| nan \|", text)
    assert list(panels["response"].curves) == ["response/length_mean"]
    assert {"response/truncated_share"} == set(panels["response, from 0 to 1"].curves)
    assert re.search(r"\| response/length_mean \| 101 \| 101 \| 280 \| 280 \|", text)
    compared = [step for step, *_ in panels[SETTLED].curves["sparsity 0.5"]]
    assert (len(compared), compared[0], compared[-1]) == (MOST_COMPARED, 1, steps)
    assert f"Gates after step {steps}" in text


def test_one_file_that_loads_nothing(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 12)
    write_sample(tmp_path, 12, "<script>alert(1)</script> Therefore 2", True)
    before = {file.name for file in tmp_path.iterdir()}
    write_training_page(tmp_path, tmp_path / "page.html")
    assert {file.name for file in tmp_path.iterdir()} - before == {"page.html"}
    html = (tmp_path / "page.html").read_text()
    assert set(re.findall(r'src="([^"]{0,22})', html)) == {"data:image/png;base64,"}
    assert html.count("<img ") >= 7
    assert "&lt;script&gt;alert(1)" in html
    assert "No sign of a collapse" in html
    full = HeadAllocation.from_gates(HeadGates(torch.tensor(alpha_after(12))), 0.5).full
    for layer, row in enumerate(full):
        heads = " ".join(map(str, row.nonzero()[:, 0].tolist()))
        cells = re.search(rf"<td>layer {layer}</td>(.*?)</tr>", html, re.DOTALL)
        assert cells is not None
        assert f"<td>{heads}</td>" in cells[1]


def test_a_run_is_finished_when_its_own_settings_were_exported(
    tmp_path: Path, panels: dict[str, Panel]
) -> None:
    with pytest.raises(ValueError, match=r"neither run_config\.json nor log\.jsonl"):
        RunLogs.read(tmp_path)
    config: dict[str, Any] = {"max_steps": 2}
    write_json(tmp_path / RUN_CONFIG, config)
    empty = page_of(tmp_path)
    assert "No step has ended yet" in empty
    assert re.findall("^## (.*)", empty, re.MULTILINE) == ["Settings"]
    write_steps(tmp_path, 2, 2)
    (tmp_path / EXPORTED).touch()
    write_json(tmp_path / SUMMARY, {"config": config})
    assert "finished" in page_of(tmp_path)
    write_json(tmp_path / RUN_CONFIG, {"max_steps": 4})  # it goes on
    assert not RunLogs.read(tmp_path).finished
