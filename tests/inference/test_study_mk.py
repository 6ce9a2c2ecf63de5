"""The stages of `make demo`, `smol`, `study` and `llm`: settings, order, what they hand on."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rlkv.cli.app import parse
from rlkv.cli.train import parse_config, parse_distill_config
from rlkv.data.filter import FilterConfig
from rlkv.evaluation.evaluate import EvalConfig, parse_methods
from rlkv.evaluation.study import StudyConfig
from tests.helpers.paths import ROOT
from tests.helpers.programs import load_program

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

FOLDER = Path("results/of_tests")
METHODS = ["RLKV", "RLKV re-ranked", "elimination", "distilled elimination"]
METHODS += ["traces", "traces re-ranked", "DuoAttention"]
VARIANTS = ["no self-distilled data", "no adaptive weight", "beta x 0.2", "beta x 5"]
KINDS = {
    "data_prep/filter_deepscaler.py": FilterConfig,
    "data_prep/fetch_llm.py": load_program("data_prep/fetch_llm.py").FetchConfig,
    "data_prep/draw_problems.py": load_program("data_prep/draw_problems.py").DrawConfig,
    "inference/rerank_heads.py": load_program("inference/rerank_heads.py").RerankConfig,
    "inference/study.py": StudyConfig,
    "inference/evaluate.py": EvalConfig,
}
PLANS = [
    (goal, model, quick)
    for goal in ("demo", "study")
    for model in ("tiny", "smol")
    for quick in ("", "1")
]
PLANS += [("llm", "qwen_coder", quick) for quick in ("", "1")]
# writes what the program of its first argument would
STUB = """#!/bin/sh
echo "$OMP_NUM_THREADS $*" >> "$CALLS"
case "$*" in *"$BROKEN"*) echo "what went wrong"; exit 3 ;; esac
out=$(echo "$*" | sed -E 's/.*--output([-_]dir)? ([^ ]+).*/\\2/')
case "$*" in
data_prep/fetch*) files=/config.json ;;
data_prep/filter*) files=/report.md ;;
train/*) files="/gates.pt /gates.safetensors /heat_map.png /training_curves.png" ;;
inference/eval*) files="/report.html /report.md"
    for method in ${*##*--methods }; do
        files="$files /gsm8k/$method/rows-0-of-1.jsonl"
        mkdir -p $out/gsm8k/$method
    done ;;
inference/study*--measure-only) files=/measured.json ;;
inference/study*) files="/report.html /report.md /table.md /results.json /sweep-tiny.png" ;;
*) echo x > $out; exit ;;
esac
mkdir -p $out
for file in $files; do echo x > $out$file; done
"""


class Stage(NamedTuple):
    program: str
    options: list[str]
    folder: Path


def make(
    goal: str, folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = ["make", "-f", "inference/study.mk", goal, f"OUT={folder}", *arguments]
    # this test may itself be run by make
    env = {**{k: v for k, v in os.environ.items() if not k.startswith("MAKE")}, **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


@cache
def stages(goal: str, model: str, quick: str) -> list[Stage]:
    """What a goal would run, in its order."""
    done = make(goal, FOLDER, f"MODEL={model}", f"QUICK={quick}", "-n")
    assert done.returncode == 0, done.stderr
    found = []
    for line in re.findall(r"^echo 'python (.*)'$", done.stdout, re.M):
        program, *options = shlex.split(line)
        assert (ROOT / program).is_file()
        written = options[
            [word.replace("_", "-").startswith("--output") for word in options].index(True) + 1
        ]
        found.append(Stage(program, options, Path(written)))
    return found


def grpo_settings(options: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """All settings of a GRPO run but those that every run has of its own."""
    monkeypatch.chdir(ROOT)
    settings, training = parse_config([*options, "--use-cpu"])
    found = {**vars(settings), **training.to_dict()}
    return {
        name: value
        for name, value in found.items()
        if name not in ("seed", "logging_dir", "run_name", "output_dir")
    }


def run_options(run: str, model: str = "tiny", quick: str = "") -> list[str]:
    """The options of a training of the study, by its folder."""
    (stage,) = (
        stage for stage in stages("study", model, quick) if stage.folder == FOLDER / "runs" / run
    )
    return stage.options


@pytest.mark.parametrize(("goal", "model", "quick"), PLANS)
def test_every_program_knows_its_options(
    goal: str, model: str, quick: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("rlkv.data.filter.check_version", bool)  # vLLM need not be installed
    for program, options, folder in stages(goal, model, quick):
        if program in KINDS:
            parsed = vars(parse(KINDS[program], arguments=options))
            assert str(folder) in [str(parsed.get("output")), str(parsed.get("output_dir"))]
            continue
        if program == "train/grpo_gates.py":
            seed = parse_config([*options, "--use-cpu"])[1].seed
        else:
            seed = parse_distill_config(options).seed
        assert goal == "demo" or folder.name.endswith(f"_{seed}")


@pytest.mark.parametrize(
    ("model", "quick"), [("tiny", ""), ("tiny", "1"), ("smol", ""), ("smol", "1")]
)
def test_the_report_gets_every_run(model: str, quick: str) -> None:
    *found, cells, study = stages("study", model, quick)
    assert cells.options == [*study.options, "--measure-only"]
    given = [word.split("=") for word in study.options if "=" in word]
    names = [name for name, _ in given]
    assert list(dict.fromkeys(names)) == METHODS + (VARIANTS if model == "tiny" else [])
    assert names.count("RLKV") == (2 if quick or model == "smol" else 3)
    assert names.count("traces") == (2 if quick else 3)
    files = [Path(file) for _, file in given]
    trained = ("train/", "inference/rerank")
    made = [stage.folder for stage in found if stage.program.startswith(trained)]
    named = [file if file.stem == "reranked" else file.parent for file in files]
    assert sorted(named) == sorted(made)
    assert len({stage.folder for stage in found}) == len(found)


@pytest.mark.parametrize(("model", "quick"), [("tiny", ""), ("smol", "1")])
def test_rlkv_is_the_shipped_configuration_with_fewer_steps(
    model: str, quick: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = grpo_settings(run_options("rlkv_0", model, quick), monkeypatch)
    base = grpo_settings(["--config", f"configs/{model}.yaml"], monkeypatch)
    changed = {name for name in base if found[name] != base[name]}
    # micro-batches bound the memory of a step and do not change it
    memory = {"per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size"}
    memory |= {"steps_per_generation"}
    assert {"curriculum"} < changed <= {"max_steps", "save_steps", "curriculum"} | memory


@pytest.mark.parametrize(
    ("run", "setting", "value"),
    [
        ("no_adaptive_weight_0", "adaptive", False),
        ("no_self-distilled_data_0", "curriculum", str(FOLDER / "unfiltered.jsonl")),
        ("beta_x_0.2_0", "l1_beta", 0.2 * 0.02),
        ("beta_x_5_0", "l1_beta", 5 * 0.02),
    ],
)
def test_an_ablation_changes_one_setting(
    run: str, setting: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = grpo_settings(run_options("rlkv_0"), monkeypatch)
    assert base["l1_beta"] == 0.02
    found = grpo_settings(run_options(run), monkeypatch)
    assert {name: found[name] for name in base if found[name] != base[name]} == {setting: value}


@pytest.fixture
def stub(tmp_path: Path) -> dict[str, str]:
    """The environment of a run in which a script stands in for Python."""
    program = tmp_path / "stub"
    program.write_text(STUB)
    program.chmod(0o755)
    return {
        "PYTHON": str(program),
        "CALLS": str(tmp_path / "calls"),
        "BROKEN": "nothing",
        "OMP_NUM_THREADS": "7",
    }


def programs(calls: Path) -> list[str]:
    return [Path(line.split()[1]).stem for line in calls.read_text().splitlines()]


def test_stages_run_once_and_again_when_what_they_need_is_newer(
    tmp_path: Path, stub: dict[str, str]
) -> None:
    out, calls = tmp_path / "demo", tmp_path / "calls"
    failed = make("demo", out, **{**stub, "BROKEN": "train/grpo"})
    assert failed.returncode == 2
    assert "what went wrong\nall of it: " in failed.stderr
    assert not (out / "gates.pt").exists()
    done = make("demo", out, **stub)
    assert (done.returncode, done.stderr) == (0, "")
    first = ["filter_deepscaler", "grpo_gates", "grpo_gates", "draw_problems", "study"]
    assert programs(calls) == first
    assert {file.name for file in out.iterdir() if file.is_file()} == {
        *("started", "problems.jsonl", "accuracy.png", "results.json", "table.md"),
        *("gates.pt", "gates.safetensors", "heat_map.png", "training_curves.png"),
    }
    calls.unlink()
    assert make("demo", out, **stub).returncode == 0
    assert not calls.exists()
    os.utime(out / "curriculum" / "report.md")
    os.utime(out / "training" / "gates.pt", (1, 1))
    assert make("demo", out, **stub).returncode == 0
    assert programs(calls) == ["grpo_gates", "study"]


def test_the_capable_model_goes_from_stage_to_stage(
    tmp_path: Path, stub: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calls = tmp_path / "llm", tmp_path / "calls"
    given = ["MODEL=qwen_coder", "LLM_DATA=my/data", "LLM_GGUF=my.gguf", "-j4"]
    assert make("llm", out, *given, **{**stub, "BROKEN": "traces@0.6"}).returncode == 2
    done = make("llm", out, *given, **stub)
    assert (done.returncode, done.stderr) == (0, "")
    first = ["fetch_llm", "filter_deepscaler", "distill_gates", "grpo_gates"]
    # one that fails, the same again, and policies
    assert programs(calls) == [*first, *["evaluate"] * 3]
    lines = [shlex.split(line)[1:] for line in calls.read_text().splitlines()]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("rlkv.data.filter.check_version", bool)
    fetch, pool, *_, heads, policies = [
        parse(KINDS[program], arguments=options) for program, *options in lines if program in KINDS
    ]
    assert (fetch.gguf, fetch.data) == (Path("my.gguf"), Path("my/data"))
    assert pool.input == "my/data/deepscaler_math.jsonl"
    assert {pool.model, heads.model, policies.model} == {str(fetch.output)}
    assert [heads.engine, policies.engine] == ["vllm", "hf"]
    for config in (heads, policies):
        names = [item.partition("=")[0] for item in config.gates]
        files = [Path(item.partition("=")[2]) for item in config.gates]
        assert all(file.is_file() for file in files)
        assert len(parse_methods(config.methods, names)) == len(config.methods)
    calls.unlink()
    assert make("llm", out, *given, **stub).returncode == 0
    other = make("llm", out, *given, "LLM_DATA=other/data", **stub)
    assert "was not started with these settings" in other.stderr
    assert not calls.exists()


def test_a_program_ends_with_make(tmp_path: Path, stub: dict[str, str]) -> None:
    program, pid = tmp_path / "stub", tmp_path / "pid"
    program.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 60\n")
    command = ["make", "-f", "inference/study.mk", "demo", f"OUT={tmp_path / 'demo'}"]
    running = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **stub}, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    running.terminate()
    assert running.wait(30) != 0
    status = Path(f"/proc/{pid.read_text().strip()}/stat")
    while status.exists() and ") Z " not in status.read_text():
        assert time.monotonic() < end, "it goes on"
        time.sleep(0.05)


def test_a_study_collects_reports_and_gates(tmp_path: Path, stub: dict[str, str]) -> None:
    out = tmp_path / "study"
    done = make("study", out, "QUICK=1", "-j4", **stub)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    calls = (tmp_path / "calls").read_text().splitlines()
    assert {line.split()[0] for line in calls} == {"1"}  # thread
    top = {file.name for file in out.iterdir() if file.is_file()}
    assert top >= {"report.html", "report.md", "table.md", "results.json", "sweep-tiny.png"}
    collected = {file.stem for file in (out / "gates").iterdir()}
    assert len(collected) == 2 * 7 + 4
    assert {"rlkv_0", "rlkv_0_reranked", "duoattention_1", "beta_x_0.2_0"} <= collected


def test_a_folder_of_other_settings_or_of_something_else_is_refused(
    tmp_path: Path, stub: dict[str, str]
) -> None:
    out = tmp_path / "demo"
    out.mkdir()
    assert make("demo", out, **stub).returncode == 0
    (tmp_path / "calls").unlink()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").touch()
    for goal, folder, change in (
        ("demo", out, "QUICK=1"),
        ("study", out, "QUICK="),
        ("demo", foreign, "QUICK="),
    ):
        refused = make(goal, folder, change, **stub)
        assert refused.returncode == 2
        assert f"{folder} was not started with these settings" in refused.stderr
        assert "FRESH=1" in refused.stderr
    assert not (tmp_path / "calls").exists()
