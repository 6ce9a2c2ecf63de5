"""What a resumed measurement compares: any other model is seen, and all code that decodes and grades is in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_model

from rlkv.evaluation import fingerprint
from rlkv.evaluation.fingerprint import CODE, code_facts, library_facts, model_facts

# modules that decoding and grading load, with the reason why their content is compared otherwise or does not count
ELSEWHERE = {
    "rlkv": "the version",
    "rlkv.allocation": "the full heads",
    "rlkv.atomic": "files",
    "rlkv.data": "nothing in it",
    "rlkv.data.deepscaler": "the problems",
    "rlkv.evaluation": "nothing in it",
    "rlkv.evaluation.fingerprint": "only compares",
    "rlkv.evaluation.rows": "files",
    "rlkv.extras": "error messages",
    "rlkv.gates": "the full heads",
    "rlkv.gates_header": "the full heads",
    "rlkv.gates_io": "the full heads",
    "rlkv.gates_peft": "the full heads",
    "rlkv.hub": "error messages",
    "rlkv.inference": "nothing in it",
    "rlkv.rollout": "nothing in it",
    "rlkv.tiny": "the model",
    "rlkv.tiny.task": "the problems",
}


SCRIPT = """
import sys
from rlkv import tiny
from rlkv.allocation import HeadAllocation
from rlkv.cache import CacheSettings
from rlkv.evaluation.runner import *
from rlkv.evaluation.sandbox import run_tests
from rlkv.eviction import RKV
model, tokenizer = tiny.load()
settings = RunSettings(CacheSettings(eviction=RKV(budget=40)), SamplingParams(30))
problems = task_problems("tiny", None, 2, 0, tokenizer)
half = HeadAllocation.random(4, 6, 0.5, 0)
run_method(model, tokenizer, problems, half, settings, Path(sys.argv[1]), {}, lambda *_: 0)
print(*(name for name in sys.modules if name.split(".")[0] == "rlkv"))
"""


def test_all_code_that_decodes_and_grades_is_compared(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "rows.jsonl")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = set(done.stdout.split())
    assert "rlkv.cache.evicting" in loaded
    covered = set(code_facts())
    for module in loaded - ELSEWHERE.keys():
        name = module.removeprefix("rlkv.").replace(".", "/")
        assert {f"{name}.py", f"{name}/__init__.py"} & covered, f"{module} is not in CODE"
    assert "evaluation/sandbox/inside/judge.py" in covered


def test_files_of_the_code_are_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CODE:
        file = tmp_path / (name if name.endswith(".py") else f"{name}/inside/file.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1\n")
    monkeypatch.setattr(fingerprint, "PACKAGE", tmp_path)
    read = code_facts.__wrapped__  # without its memory
    before = read()
    assert before.keys() == {"version"} | {n if n.endswith(".py") else f"{n}/inside/file.py" for n in CODE}
    (tmp_path / "cache/inside/file.py").write_text("x = 2\n")
    (tmp_path / "report.py").write_text("not of it\n")
    after = read()
    assert {name for name in before if before[name] != after[name]} == {"cache/inside/file.py"}


def test_versions_of_the_libraries() -> None:
    assert library_facts().keys() >= {"torch", "transformers"}


@pytest.mark.parametrize("place", [0, -1])
def test_another_state_of_the_model_is_seen(family: str, place: int) -> None:
    model = make_tiny_model(family)
    before = model_facts(model)
    assert model_facts(make_tiny_model(family)) == before
    for name, parameter in list(model.named_parameters())[::5]:
        with torch.no_grad():
            old = parameter.view(-1)[place].item()
            parameter.view(-1)[place] += 1
            after = model_facts(model)
            parameter.view(-1)[place] = old
        assert after | {"weights": ""} == before | {"weights": ""}
        assert after["weights"] != before["weights"], name
    assert model_facts(model) == before
    model.config.rope_theta = 5e4
    assert model_facts(model)["config"] != before["config"]


def test_number_types_and_names() -> None:
    model = make_tiny_model("llama")
    before = model_facts(model)
    model.config._name_or_path = "another/folder"
    assert model_facts(model) == before, "a folder may move"
    half = model_facts(model.to(torch.bfloat16))
    assert half["dtype"] == "torch.bfloat16"
    assert half["weights"] != before["weights"]


def test_a_large_parameter_is_sampled_to_its_end() -> None:
    model = make_tiny_model("llama", vocab_size=4001, hidden_size=64)
    before = model_facts(model)["weights"]
    with torch.no_grad():
        model.lm_head.weight[-1, -1] += 1
    assert model_facts(model)["weights"] != before
