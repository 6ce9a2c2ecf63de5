"""What `make study` would run: the settings of every stage, the order, and what it hands to the report."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.cli.options import parse
from rlkv.data.draw import DrawConfig
from rlkv.data.filter_config import FilterConfig
from rlkv.evaluation.study.config import StudyConfig
from rlkv.gates.head_gates import HeadGates
from rlkv.training.config import parse_config
from rlkv.training.distill_config import parse_distill_config
from rlkv.utils.stages import Stage
from tests.helpers.paths import ROOT
from tests.helpers.programs import load_program

PROGRAM = runpy.run_path(str(ROOT / "inference" / "full_study.py"))
FOLDER = Path("results/a study")


SIZES = {"tiny": PROGRAM["TINY"], "smol": PROGRAM["SMOL"]}
SIZES |= {f"quick {model}": size for model, size in PROGRAM["QUICK"].items()}


@pytest.fixture(params=SIZES)
def plan(request: pytest.FixtureRequest) -> Any:
    return PROGRAM["Plan"](FOLDER, SIZES[request.param])


@pytest.fixture(params=["tiny", "quick tiny"])
def tiny_plan(request: pytest.FixtureRequest) -> Any:
    return PROGRAM["Plan"](FOLDER, SIZES[request.param])


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
    assert cells.command == [*study.command, "--measure-only"]


def test_rlkv_is_the_shipped_configuration_with_fewer_steps(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stages_of(plan, "train/grpo_gates.py")["RLKV, seed 0"]
    config = f"configs/{plan.size.model}.yaml"
    shipped = Stage("", ["", "--config", config], Path(f"outputs/{plan.size.model}/gates.pt"))
    found, base = grpo_settings(stage, monkeypatch), grpo_settings(shipped, monkeypatch)
    changed = {name for name in base if found[name] != base[name]}
    # micro-batches bound the memory of a step and do not change it
    memory = {"per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size"}
    memory |= {"steps_per_generation"}
    assert {"curriculum"} < changed <= {"max_steps", "save_steps", "curriculum"} | memory


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
    tiny_plan: Any, method: str, setting: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = stages_of(tiny_plan, "train/grpo_gates.py")
    base = grpo_settings(stages["RLKV, seed 0"], monkeypatch)
    variants = [stage for name, stage in stages.items() if name.startswith(method)]
    assert len(variants) == tiny_plan.size.variant_seeds
    for stage in variants:
        found = grpo_settings(stage, monkeypatch)
        assert {name: found[name] for name in base if found[name] != base[name]} == {setting: value}


def test_the_other_programs_know_their_options(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    demo = runpy.run_path(str(ROOT / "inference" / "demo.py"))["plan"](FOLDER, plan.size.model, quick=True)
    kinds = {
        "data_prep/filter_deepscaler.py": FilterConfig,
        "data_prep/draw_problems.py": DrawConfig,
        "inference/rerank_heads.py": load_program("inference/rerank_heads.py").RerankConfig,
        "inference/study.py": StudyConfig,
    }
    seen = set()
    for stage in [*demo, *plan.stages]:
        program, *options = stage.command
        if program in kinds:
            parsed = vars(parse(kinds[program], arguments=options))
            written = {parsed[name] for name in ("output", "output_dir") if parsed.get(name)}
            assert any(path == stage.done or path in stage.done.parents for path in map(Path, written)), stage.name
            seen.add(program)
    assert seen == set(kinds)


def test_seeds_differ(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for program, read in (("train/grpo_gates.py", parse_config), ("train/distill_gates.py", parse_distill_config)):
        for name, stage in stages_of(plan, program).items():
            extra = ["--use_cpu", "true"] if read is parse_config else []
            parsed = read([*stage.command[1:], *extra])
            seed = parsed[1].seed if read is parse_config else parsed.seed
            assert name.endswith(f", seed {seed}")


def test_the_report_gets_every_run(tiny_plan: Any) -> None:
    plan = tiny_plan
    given: dict[str, list[list[str]]] = {}
    option = ""
    for word in plan.stages[-1].command:
        option = word if word.startswith("--") else option
        given.setdefault(option, []).append(word.split("="))
    given = {name: given[name][1:] for name in ("--gates", "--ablation")}
    size = plan.size
    names = [name for name, _ in given["--gates"]]
    assert list(dict.fromkeys(names)) == list(PROGRAM["METHODS"])
    assert len(names) == 7 * size.seeds
    variants = [name for name, _ in given["--ablation"]]
    assert list(dict.fromkeys(variants)) == ["no self-distilled data", "no adaptive weight", "beta x 0.2", "beta x 5"]
    assert len(variants) == 4 * size.variant_seeds
    files = [Path(file) for found in given.values() for _, file in found]
    assert {stage.done for stage in plan.stages if stage.done.suffix == ".pt"} == set(files)
    assert len(set(files)) == len(files)
    for method in ("RLKV", "traces"):
        reranked = [Path(file) for name, file in given["--gates"] if name == f"{method} re-ranked"]
        assert [file.parent for file in reranked] == [file.parent for file in plan.gates[method]]


def test_results_are_collected(tmp_path: Path) -> None:
    plan = PROGRAM["Plan"](tmp_path, SIZES["quick tiny"])
    plan.report.mkdir()
    for name in ("report.html", "report.md", "results.json", "gates.png", "other.txt"):
        (plan.report / name).write_text(name)
    (plan.report / "rows").mkdir()
    gates = HeadGates(alpha=torch.linspace(0, 1, 24).view(4, 6))
    files = [file for found in (*plan.gates.values(), *plan.ablations.values()) for file in found]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        gates.save(file)
    PROGRAM["collect"](plan)
    top = {entry.name for entry in tmp_path.iterdir() if entry.is_file()}
    assert top == {"report.html", "report.md", "results.json", "gates.png"}
    collected = {path.stem for path in (tmp_path / "gates").iterdir()}
    assert len(collected) == len(files)
    assert {"rlkv_0", "rlkv_0_reranked", "duoattention_1"} <= collected
    assert HeadGates.load(tmp_path / "gates" / "beta_x_0.2_0.safetensors").alpha.equal(gates.alpha)
