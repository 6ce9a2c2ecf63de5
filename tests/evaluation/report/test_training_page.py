"""The page of a training run: what it shows, of which finders, and in a browser while the training goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from rlkv.evaluation.report.svg import LEFT, RIGHT, WIDTH, line_chart
from rlkv.evaluation.report.training_page import MOST_FRAMES, training_page
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.training.logs import EXPORTED, LOG, RUN_CONFIG, SUMMARY, RunLogs, append_record
from rlkv.training.sections import section_of
from rlkv.utils.atomic import write_json
from rlkv.utils.jsonl import read_log
from tests.helpers import random_run
from tests.helpers.browser import CHROMIUM, DRIVER, chromium
from tests.helpers.run_logs import LAYERS, alpha_after, record, write_sample, write_steps


def page_of(folder: Path, reload_seconds: float | None = None) -> str:
    return training_page(RunLogs.read(folder), reload_seconds).html()


def charts(html: str) -> dict[str, list[str]]:
    """The curves' labels by the titles of charts."""
    found = {}
    for text in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        svg = ElementTree.fromstring(text)
        name = svg.find("text[@class='name']")
        found["" if name is None else str(name.text)] = [str(title.text) for title in svg.iterfind("polyline/title")]
    return found


def test_curves_lie_where_their_values_are() -> None:
    svg = ElementTree.fromstring(
        line_chart("a < b", "step", {"x & y": [(0, 0), (5, 0.5), (10, 1), (10, float("nan"))]}, share=True)
    )
    (line,) = svg.findall("polyline")
    (x0, bottom), (x1, middle), (x2, top) = (map(float, point.split(",")) for point in line.get("points", "").split())
    assert (x0, x2) == (LEFT, WIDTH - RIGHT)
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert middle == pytest.approx((bottom + top) / 2, abs=0.1)
    # the scale gives the values back, as the script needs it
    left_value, left, x_scale, low, low_at, y_scale = map(float, svg.get("data-scale", "").split())
    assert (x1 - left) / x_scale + left_value == pytest.approx(5, abs=0.02)
    assert (middle - low_at) / y_scale + low == pytest.approx(0.5, abs=0.002)


def test_the_page_of_a_run_answers_its_questions(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 12)
    write_sample(tmp_path, 12, "<script>alert(1)</script> Therefore 2", True)
    with (tmp_path / LOG).open("a") as log:
        log.write('{"step": 13, "rew')  # while it is being written
    html = page_of(tmp_path, 3)
    assert "Step 12 of 40, about" in html
    found = charts(html)
    assert found["Reward against sparsity"] == ["mean reward", "gates below 0.5"]
    assert found["Penalty"] == ["beta'"]
    assert found["Mean gate of each layer"] == [f"layer {layer}" for layer in range(LAYERS)]
    assert "Steps left out" not in found
    assert "No sign of a collapse" in html
    # nothing is loaded from elsewhere, and texts stay texts
    assert not re.findall(r"(?:src|href)=(?!.#)", html.replace('href="#', ""))
    assert "&lt;script&gt;alert(1)" in html
    assert 'data-seconds="3"' in html
    assert "data-seconds" not in page_of(tmp_path).replace("dataset", "")
    frames = json.loads(re.findall(r'id="frames">(.*?)</script>', html)[0])
    assert frames["steps"] == list(range(1, 13))
    assert frames["frames"][-1] == [round(100 * value) for row in alpha_after(12) for value in row]
    full = HeadAllocation.from_gates(HeadGates(torch.tensor(alpha_after(12))), 0.5).full
    cells = [" ".join(map(str, row.nonzero()[:, 0].tolist())) for row in full]
    rows = re.findall(r'<th scope="row">layer \d</th><td>.*?</td><td>(.*?)</td>', html)
    assert rows == cells


def test_alerts_are_on_the_page(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 10)
    for step in range(11, 16):
        append_record(tmp_path / LOG, step, record(step, reward__mean=0.1))
    html = page_of(tmp_path)
    assert "The reward has collapsed" in html
    assert "No sign of a collapse" not in html


def test_long_runs_have_no_more_frames_than_a_page_needs(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, MOST_FRAMES + 30)
    steps = json.loads(re.findall(r'id="frames">(.*?)</script>', page_of(tmp_path))[0])["steps"]
    assert len(steps) == MOST_FRAMES
    assert (steps[0], steps[-1]) == (1, MOST_FRAMES + 30)


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
def test_logs_of_other_finders(tmp_path: Path, values: dict[str, float], expected: list[str]) -> None:
    for step in (1, 2):
        append_record(tmp_path / LOG, step, values)
    found = charts(page_of(tmp_path))
    assert sorted(found["Reward against sparsity"]) == sorted(expected)
    assert "Loss" in found


def test_a_run_is_finished_when_its_own_settings_were_exported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither run_config\.json nor log\.jsonl"):
        RunLogs.read(tmp_path)
    config: dict[str, Any] = {"max_steps": 2}
    write_json(tmp_path / RUN_CONFIG, config)
    assert "No step has ended yet" in page_of(tmp_path)
    write_steps(tmp_path, 2, 2)
    (tmp_path / EXPORTED).touch()
    write_json(tmp_path / SUMMARY, {"config": config})
    assert "finished" in page_of(tmp_path)
    write_json(tmp_path / RUN_CONFIG, {"max_steps": 4})  # it goes on
    assert not RunLogs.read(tmp_path).finished


def test_sections() -> None:
    assert section_of("held_out/accuracy_at_0.5") == section_of("reward/mean") == "collapse"
    assert section_of("epoch") == "other"


@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="chromium and chromedriver are not installed")
def test_in_a_browser_the_page_follows_a_training(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    folder = tmp_path / "run"
    out, shown = folder / "report.html", []
    points = "return document.querySelector('svg.chart polyline').points.length"
    fills = "return [...document.querySelectorAll('svg.heat rect')].map((cell) => cell.getAttribute('fill')).join()"

    class Look(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 0:
                return
            training_page(RunLogs.read(folder), 0.5).write(out)
            if state.global_step == 1:
                browser.open(out)
            browser.until(f"{points} == {state.global_step}")  # it reloads by itself
            shown.append(browser.run(fills))

    with chromium(tmp_path) as browser:
        random_run.run(folder, ["--max_steps", "4", "--learning_rate", "0.2"], [Look()])
        assert len(read_log(folder / LOG)) == 4
        assert len(shown) == 3
        assert len(set(shown)) == 3  # the gates of each step have their colours
        training_page(RunLogs.read(folder)).write(out)
        browser.until(f"{points} == 4")
        assert "finished" in browser.run("return document.body.innerText")
        move = "const s = document.getElementById('step'); s.value = 1; s.dispatchEvent(new Event('input'));"
        browser.run(move)
        assert browser.run(fills) == shown[1]
        assert "step 2:" in browser.run("return document.getElementById('step-label').textContent")
        point = (
            "document.querySelector('svg[data-scale]').dispatchEvent(new PointerEvent('pointermove', {clientX: 200}))"
        )
        assert browser.run(f"{point}; return document.querySelector('svg[data-scale]').textContent").count("step") >= 2
        assert browser.errors() == []
