"""What `make study` would run: the settings of every stage, the order, and what it hands to the report."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.gates.head_gates import HeadGates
from rlkv.training.config import parse_config
from rlkv.training.distill_config import parse_distill_config
from rlkv.utils.pipeline import Stage
from tests.helpers.paths import ROOT

PROGRAM = runpy.run_path(str(ROOT / "inference" / "tiny_study.py"))
FOLDER = Path("results/a study")


@pytest.fixture(params=["full", "quick"])
def plan(request: pytest.FixtureRequest) -> Any:
    return PROGRAM["Plan"](FOLDER, PROGRAM["QUICK"] if request.param == "quick" else PROGRAM["Size"]())


def stages_of(plan: Any, program: str) -> dict[str, Stage]:
    return {stage.name: stage for stage in plan.stages if stage.command[0] == program}


def grpo_settings(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """All settings of a GRPO run but those that every run has of its own."""
    monkeypatch.chdir(ROOT)
    settings, training = parse_config([*stage.command[1:], "--use_cpu", "true"])
    found = {**vars(settings), **training.to_dict()}
    assert Path(found.pop("output_dir")) == stage.done.parent
    return {name: value for name, value in found.items() if name not in ("seed", "logging_dir", "run_name")}


def test_every_stage_can_start_and_nothing_is_made_twice(plan: Any) -> None:
    made = [stage.done for stage in plan.stages]
    assert len(set(made)) == len(made) == len({stage.name for stage in plan.stages})
    ended: set[Path] = set()
    for stage in plan.stages:  # in this order at the latest
        assert set(stage.needs) <= ended
        ended.add(stage.done)
        assert (ROOT / stage.command[0]).is_file()
    *finding, cells, study = plan.stages
    assert set(study.needs) == set(cells.needs) == {stage.done for stage in finding}
    assert {stage.threads for stage in plan.stages} == {1}
    assert cells.command == [*study.command, "--measure-only"]


def test_rlkv_is_the_shipped_configuration_with_fewer_steps(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stages_of(plan, "train/grpo_gates.py")["RLKV, seed 0"]
    shipped = Stage("", ["", "--config", "configs/tiny.yaml"], Path("outputs/tiny/gates.pt"), lambda: 0.0, 1)
    found, base = grpo_settings(stage, monkeypatch), grpo_settings(shipped, monkeypatch)
    changed = {name for name in base if found[name] != base[name]}
    assert changed == {"max_steps", "save_steps", "curriculum"}


@pytest.mark.parametrize(
    ("method", "setting", "value"),
    [
        ("no adaptive weight", "adaptive", False),
        ("no self-distilled data", "curriculum", str(FOLDER / "unfiltered.jsonl")),
        ("beta x 0.2", "l1_beta", 0.004),
        ("beta x 5", "l1_beta", 0.1),
    ],
)
def test_an_ablation_changes_one_setting(
    plan: Any, method: str, setting: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = stages_of(plan, "train/grpo_gates.py")
    base = grpo_settings(stages["RLKV, seed 0"], monkeypatch)
    variants = [stage for name, stage in stages.items() if name.startswith(method)]
    assert len(variants) == plan.size.variant_seeds
    for stage in variants:
        found = grpo_settings(stage, monkeypatch)
        assert {name: found[name] for name in base if found[name] != base[name]} == {setting: value}


def test_seeds_differ(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for program, parse in (("train/grpo_gates.py", parse_config), ("train/distill_gates.py", parse_distill_config)):
        for name, stage in stages_of(plan, program).items():
            extra = ["--use_cpu", "true"] if parse is parse_config else []
            parsed = parse([*stage.command[1:], *extra])
            seed = parsed[1].seed if parse is parse_config else parsed.seed
            assert name.endswith(f", seed {seed}")


def test_the_report_gets_every_run(plan: Any) -> None:
    command = plan.stages[-1].command
    given = {
        option: [command[i + 1].split("=") for i, word in enumerate(command) if word == option]
        for option in ("--gates", "--ablation")
    }
    size = plan.size
    names = [name for name, _ in given["--gates"]]
    assert list(dict.fromkeys(names)) == ["RLKV", "RLKV re-ranked", "traces", "DuoAttention"]
    assert len(names) == 4 * size.seeds
    variants = [name for name, _ in given["--ablation"]]
    assert list(dict.fromkeys(variants)) == ["no self-distilled data", "no adaptive weight", "beta x 0.2", "beta x 5"]
    assert len(variants) == 4 * size.variant_seeds
    files = [Path(file) for found in given.values() for _, file in found]
    assert {stage.done for stage in plan.stages if stage.done.suffix == ".pt"} == set(files)
    assert len(set(files)) == len(files)
    reranked = [Path(file) for name, file in given["--gates"] if name == "RLKV re-ranked"]
    assert [file.parent for file in reranked] == [run.folder for run in plan.runs if run.method == "RLKV"]


def test_results_are_collected(tmp_path: Path) -> None:
    plan = PROGRAM["Plan"](tmp_path, PROGRAM["QUICK"])
    plan.report.mkdir()
    for name in ("report.html", "report.md", "results.json", "gates.png", "other.txt"):
        (plan.report / name).write_text(name)
    (plan.report / "rows").mkdir()
    gates = HeadGates(alpha=torch.linspace(0, 1, 24).view(4, 6))
    for run in plan.runs:
        run.folder.mkdir(parents=True)
        gates.save(run.gates)
    gates.save(plan.runs[-1].folder / "reranked.pt")
    PROGRAM["collect"](plan)
    top = {entry.name for entry in tmp_path.iterdir() if entry.is_file()}
    assert top == {"report.html", "report.md", "results.json", "gates.png"}
    collected = {path.stem for path in (tmp_path / "gates").iterdir()}
    assert collected == {run.folder.name for run in plan.runs} | {f"{plan.runs[-1].folder.name}_reranked"}
    assert HeadGates.load(tmp_path / "gates" / "beta_x_0.2_0.safetensors").alpha.equal(gates.alpha)
