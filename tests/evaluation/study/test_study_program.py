"""inference/study.py on the tiny model, whole: cells, files, numbers, resuming, bad input."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from rlkv import tiny
from rlkv.evaluation.heads.measure import CacheSettings, measure
from rlkv.evaluation.study.budget import KINDS
from rlkv.evaluation.study.report import ANALYSES
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from tests.helpers.programs import load_program

TOKENS = 45
NUM_PROBLEMS = 5


@pytest.fixture(scope="module")
def program() -> Any:
    return load_program("inference/study.py")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gates a, b (the same heads at 0.5 as a, in another order), c; six problems; a training log beside a."""
    folder = tmp_path_factory.mktemp("inputs")
    model, _ = tiny.load()
    shape = ModelShape.from_config(model.config, "tiny")
    alpha = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    for name, values in (("a", alpha), ("b", alpha.square()), ("c", 1 - alpha)):
        (folder / name).mkdir()
        HeadGates(values, model=shape, deploy_sink=4, deploy_window=16).save(folder / name / "gates.pt")
    (folder / "a" / "log.jsonl").write_text('{"time/step_s": 9.0, "time/step_cpu_s": 7.0}\n')
    problems = tiny.problems(NUM_PROBLEMS, seed=3, min_definitions=3, max_definitions=5)
    (folder / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    return folder


def options(inputs: Path, output: Path, *more: str) -> list[str]:
    gates = [f"mine={inputs}/a/gates.pt", f"mine={inputs}/b/gates.pt", f"other <b>={inputs}/c/gates.pt"]
    return [
        *(text for file in gates for text in ("--gates", file)),
        *("--ablation", f"variant={inputs}/c/gates.pt", "--data", str(inputs / "problems.jsonl")),
        *("--oracle", str(tiny.GROUND_TRUTH), "--random-draws", "2", "--sparsities", "0.5", "--compare-at", "0.5"),
        *("--ablate-at", "0.5", "--top-heads", "2", "--policies", "rkv,random", "--savings", "0.3"),
        *("--repetition", "20,5", "--max-new-tokens", str(TOKENS), "--batch-size", "5"),
        *("--output-dir", str(output), *more),
    ]


def run(program: Any, arguments: list[str]) -> Result:
    return CliRunner().invoke(program.app, arguments)


@pytest.fixture(scope="module")
def study(program: Any, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("study")
    done = run(program, options(inputs, output))
    assert done.exit_code == 0, done.output
    return output


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def test_every_allocation_is_measured_once(study: Path) -> None:
    found = results(study)
    cells = found["cells"]
    names = {tuple(cell["asked_for_as"]) for cell in cells}
    assert ("mine @ 0.5",) in names  # both seeds and three analyses ask for it
    assert ("other <b> @ 0.5", "variant @ 0.5") in names
    budgets = [row[kind] for row in found["analyses"]["budget"]["tasks"]["tiny"]["rows"] for kind in KINDS]
    assert len(budgets) == 4
    assert 2 <= sum(of is not None for of in budgets) < 4  # random keeps the prompt, which is too much here
    # full, mine, other = variant, oracle, two draws; as many without the top heads; budgets
    assert len(cells) == 6 + 5 + sum(of is not None for of in budgets)
    assert len(list((study / "rows").iterdir())) == len(cells)
    assert all(cell["n"] == NUM_PROBLEMS for cell in cells)
    assert list(found["analyses"]) == list(ANALYSES)


def test_figures_are_those_of_the_plain_measurement(study: Path, inputs: Path) -> None:
    model, tokenizer = tiny.load()
    problems = [json.loads(line) for line in (inputs / "problems.jsonl").read_text().splitlines()]
    allocation = HeadAllocation.from_gates(HeadGates.load(inputs / "a" / "gates.pt"), 0.5)
    want = measure(model, tokenizer, problems, allocation, CacheSettings(4, 16, "full", TOKENS, 6))
    sweep = results(study)["analyses"]["sweep"]["tasks"]["tiny"]["methods"]["mine"][0]
    assert sweep["mean"] == want.accuracy
    assert sweep["seeds"] == [want.accuracy] * 2
    assert sweep["distinct"] == 1
    lengths = results(study)["analyses"]["lengths"]["tasks"]["tiny"]["methods"]["mine"][0]
    assert lengths["all"]["mean"] == pytest.approx(sum(len(c.token_ids) for c in want.completions) / NUM_PROBLEMS)


def test_analyses_agree_with_each_other(study: Path) -> None:
    found = results(study)["analyses"]
    full = results(study)["full_cache"]["tiny"]
    for row in found["comparison"]["rows"]:
        methods = found["sweep"]["tasks"]["tiny"]["methods"]
        assert row["first"]["mean"] == methods["mine"][0]["mean"]
        assert row["second"]["mean"] == methods[row["other"]][0]["mean"]
        assert row["difference"]["difference"] == pytest.approx(row["first"]["mean"] - row["second"]["mean"])
    variant = found["ablations"]["tasks"]["tiny"]["variant"][0]
    assert variant["first"]["mean"] == found["sweep"]["tasks"]["tiny"]["methods"]["other <b>"][0]["mean"]
    for name, (shares,) in found["modes"]["tasks"]["tiny"]["methods"].items():
        solved = found["modes"]["tasks"]["tiny"]["solved"]
        assert solved == round(full["accuracy"] * NUM_PROBLEMS)
        assert 0 <= sum(of["mean"] for of in shares.values()) <= 1, name
    assert found["comparison"]["costs"]["mine"]["steps"] == [
        {"step": "training", "unit": "CPU", "mean": 7.0, "low": 7.0, "high": 7.0, "n": 1}
    ]
    for row in found["budget"]["tasks"]["tiny"]["rows"]:
        for kind, given in (("dynamic", "ratio"), ("fixed", "budget")):
            if row[kind] is not None:
                assert row[kind]["budget"][given] is not None


def test_the_report_is_whole_and_loads_nothing(study: Path) -> None:
    page = (study / "report.html").read_text()
    assert "other &lt;b&gt;" in page
    assert "<b>" not in page
    assert set(re.findall(r"(?:src|href)=\"([^\"]{0,22})", page)) <= {"data:image/png;base64,", *_anchors(page)}
    assert len(re.findall("<img ", page)) == len(list(study.glob("*.png"))) == 8
    text = (study / "report.md").read_text()
    for line in results(study)["findings"]["comparison"]:
        assert line.replace("<", "&lt;").replace(">", "&gt;") in page
    for picture in study.glob("*.png"):
        assert f"(<{picture.name}>)" in text
    for word in ("torch", "cores", "2 seeds, 1 set of heads", "its file does not say"):
        assert word in text
        assert word in page


def _anchors(page: str) -> set[str]:
    return {f"#{name}"[:22] for name in re.findall(r'id="([^"]+)"', page)}


def test_a_second_process_only_measures(program: Any, inputs: Path, study: Path, tmp_path: Path) -> None:
    shutil.copytree(study / "rows", tmp_path / "rows")
    missing = sorted((tmp_path / "rows").iterdir())[-1]
    missing.unlink()
    done = run(program, options(inputs, tmp_path, "--measure-only"))
    assert done.exit_code == 0, done.output
    assert sorted(file.name for file in tmp_path.iterdir()) == ["measured.json", "rows"]
    assert missing.exists()
    found = json.loads((tmp_path / "measured.json").read_text())["cells"]
    wanted = results(study)["cells"]
    assert [(cell["rows"], cell["accuracy"]) for cell in found] == [(cell["rows"], cell["accuracy"]) for cell in wanted]


def test_the_same_command_goes_on_and_refuses_other_settings(program: Any, inputs: Path, study: Path) -> None:
    before = results(study)["analyses"]["comparison"]
    compared = {cell["rows"] for cell in results(study)["cells"] if "mine @ 0.5" in cell["asked_for_as"]}
    rows = sorted((study / "rows").iterdir(), key=lambda file: file.name not in compared)
    rows[1].unlink()
    torn = rows[0].read_bytes()
    rows[0].write_bytes(torn[: len(torn) // 2])
    files = {file.name: file.read_bytes() for file in rows[2:]}
    assert run(program, options(inputs, study, "--analyses", "comparison")).exit_code == 0
    assert results(study)["analyses"]["comparison"] == before
    assert {file.name: file.read_bytes() for file in rows[2:]} == files
    done = run(program, options(inputs, study, "--window", "12"))
    assert isinstance(done.exception, ValueError)
    assert "measured with other settings" in str(done.exception)
    assert "window" in str(done.exception)


def test_one_analysis_measures_only_its_own(program: Any, inputs: Path, tmp_path: Path) -> None:
    done = run(program, options(inputs, tmp_path, "--analyses", "gates"))
    assert done.exit_code == 0, done.output
    assert len(results(tmp_path)["cells"]) == 1
    assert list(results(tmp_path)["analyses"]) == ["gates"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--analyses", "sweep,speed"], "there is no analysis 'speed'"),
        (["--sparsities", "0.4,1.5"], "--sparsities '0.4,1.5' holds a number outside 0 to 1"),
        (["--compare-at", "0"], "--compare-at '0' names no sparsity above 0"),
        (["--top-heads", "1.5"], "1.5 is neither a whole number nor a share below 1"),
        (["--top-heads", "25"], "outside 0 to 24"),
        (["--top-heads", "0"], "0 heads are the full cache"),
        (["--gates", "oracle (measured)=x.pt"], "is taken"),
        (["--gates", "x.pt"], "--gates 'x.pt' must be NAME=FILE"),
        (["--ablation", "mine=x.pt"], "--ablation: the name 'mine' is taken"),
        (["--gates", "x=absent.pt"], "absent.pt"),
        (["--policies", "rkv,best"], "there is no eviction policy 'best'"),
        (["--published", "tiny"], "--published 'tiny': nothing is known"),
        (["--extra", "2"], "--extra is 2"),
        (["--repetition", "5"], "WINDOW,DISTINCT"),
        (["--tasks", "maths"], "unknown task 'maths'"),
        (["--data", "absent.jsonl"], "absent.jsonl does not exist"),
        (["--oracle", "absent.json"], "--oracle absent.json is no ground-truth file"),
    ],
)
def test_bad_input_is_one_sentence(program: Any, inputs: Path, tmp_path: Path, more: list[str], message: str) -> None:
    done = run(program, options(inputs, tmp_path / "out", *more))
    assert isinstance(done.exception, ValueError), done.output
    assert message in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_ablations_need_gates(program: Any, inputs: Path, tmp_path: Path) -> None:
    arguments = ["--gates", f"a={inputs}/a/gates.pt", "--analyses", "ablations", "--output-dir", str(tmp_path)]
    assert "no gates of any are given" in str(run(program, arguments).exception)


def test_head_counts(program: Any) -> None:
    assert program.top_heads("", 24) == (1, 2, 3, 4, 6, 8)
    assert program.top_heads("", 256) == (3, 5, 13, 26, 38, 51)
    assert program.top_heads("0.25,3,0.01", 24) == (1, 3, 6)
    assert program.levels("0.6,0,0.2", "--sparsities") == (0.2, 0.6)
