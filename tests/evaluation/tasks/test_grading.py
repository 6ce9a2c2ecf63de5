"""Verdicts on completions, and the check of the graders on references."""

from __future__ import annotations

import json
import runpy
import sys
from contextlib import closing
from pathlib import Path

import pytest

from rlkv.evaluation.sandbox import isolation
from rlkv.evaluation.tasks.base import EvalProblem
from rlkv.evaluation.tasks.code import extract_code
from rlkv.evaluation.tasks.registry import TASKS, load_task
from rlkv.verifier import Verifier
from tests.helpers.paths import ROOT, SHARED
from tests.helpers.programs import load_program

DATA = SHARED / "data"
PROGRAM = ROOT / "inference" / "check_graders.py"
GRADERS = load_program("inference/check_graders.py")
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="the benchmarks' files (../shared/data) are not here"
)
ADD = EvalProblem(
    "mbpp/1",
    "p",
    "def add(a, b):\n    return a + b",
    {"tests": ["assert add(1, 2) == 3"], "setup": "", "problem": "p"},
)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("First:\n```python\nx = 1\n```\nBetter:\n```python\nx = 2\n```\nDone.", "x = 2\n"),
        ("```py\nx = 1\n```\n\n```\noutput\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```bash\nls\n```\n```\nx = 1\n```", "x = 1\n"),
        ("```Python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),
        ("  ```python\n  x = 1\n  ```", "  x = 1\n"),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("```python\nx = 1\n```python\nx = 2\n```", "x = 2\n"),
        ("<think>```python\nx = 1\n```</think>\n```python\nx = 2\n```", "x = 2\n"),
        ("def f():\n    return 1", "def f():\n    return 1"),
        (
            "Here it is:\nimport re\ndef f():\n    return 1\nThat is all.",
            "import re\ndef f():\n    return 1",
        ),
        ("```bash\nls\n```", None),
        ("I cannot do it.", None),
        ("", None),
        ("```python\n```", None),
        ("def is the keyword", None),
    ],
)
def test_the_program_in_a_completion(text: str, program: str | None) -> None:
    assert extract_code(text) == program


def test_maths_verdicts() -> None:
    problem = EvalProblem("math500/1", "p", r"\frac{1}{2}")
    task = TASKS["math500"]
    assert task.grade(
        r"Therefore, the final answer is: $\boxed{0.5}$. I hope it is correct", problem
    )
    assert not task.grade(r"\boxed{2}", problem)
    assert not task.grade("", problem)


def test_choice_verdicts() -> None:
    problem = EvalProblem("mmlu_pro:law/1", "p", "C", {"options": ["w", "x", "y"]})
    task = TASKS["mmlu_pro:law"]
    assert task.grade("Answer: C", problem)
    assert not task.grade("Answer: B", problem)
    assert not task.grade("Answer: D", problem)


def test_code_verdicts() -> None:
    task = TASKS["mbpp"]
    assert task.grade(f"Here:\n```python\n{ADD.answer}\n```", ADD)
    assert not task.grade("```python\ndef add(a, b):\n    return a - b\n```", ADD)
    assert not task.grade("I cannot.", ADD)
    ready = EvalProblem(
        "mbpp/2", "p", "", {"tests": ["assert add(1, 2) == THREE"], "setup": "THREE = 3"}
    )
    assert task.grade(f"```python\n{ADD.answer}\n```", ready)


def test_a_wrong_program_has_the_right_names() -> None:
    assert "def add(*args" in GRADERS.wrong_program(ADD.answer)
    assert GRADERS.wrong_program("x = 1") == ""


def test_the_code_check_counts_every_case() -> None:
    broken = EvalProblem("mbpp/2", "p", "def add(a, b):\n    return 0", ADD.meta)
    found = GRADERS.check_code([ADD, broken])
    assert (found["reference"], found["refused"], found["sandbox"]) == (2, ["mbpp/2"], isolation())
    assert (found["empty_passed"], found["wrong_passed"]) == ([], [])
    assert found["next_passed"] == ["mbpp/2"]  # the program of mbpp/1 passes its tests


@needs_data
@pytest.mark.parametrize("name", ["gsm8k", "aime24", "aime25"])
def test_references_are_accepted_and_others_refused(name: str) -> None:
    problems = load_task(name, DATA)
    with closing(Verifier(num_workers=1)) as verifier:
        found = GRADERS.check_math(problems, verifier, name)
    assert found["own"] == len(problems)
    assert found["next"] > 0
    assert (found["refused"], found["accepted"]) == ([], [])


def test_the_stated_form_is_that_of_the_prompt() -> None:
    problem = EvalProblem("gsm8k/1", "p", "18", {"solution": "2 * 9\n#### 18"})
    assert GRADERS.stated(problem).endswith(
        "#### 18\nTherefore, the final answer is: $\\boxed{18}$. I hope it is correct"
    )


def test_the_program_writes_counts_and_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {
        "gsm8k_test": [{"question": f"q{i}", "answer": f"#### {i}"} for i in (3, 4)],
        "math500": [
            {"problem": "p", "answer": "5", "solution": r"\boxed{6}"},
            {"problem": "p", "answer": "x=5"},
        ],
        "aime24": [{"problem": "p", "answer": "7"}],
        "aime25": [{"prompt": "p", "answer": 8}],
    }
    for name, content in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    out = tmp_path / "out"
    argv = [
        "check_graders.py",
        "--data",
        str(tmp_path),
        "--output-dir",
        str(out),
        "--no-code",
        "--workers",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    assert ended.value.code == 0
    found = json.loads((out / "graders.json").read_text())
    assert found["code"] is None
    assert [(row["task"], row["own"], len(row["refused"])) for row in found["math"]] == [
        ("gsm8k", 2, 0),
        ("math500", 2, 0),
        ("math500", 1, 1),
        ("aime24", 1, 0),
        ("aime25", 1, 0),
    ]
    table = (out / "graders.md").read_text()
    assert (
        "| math500 | answer in the prompt's form | 2 of 2 (100.00%) | 0 of 2 (0.00%) |" in table
    )  # x=5 is 5
    assert "| aime24 | answer in the prompt's form | 1 of 1 (100.00%) | none |" in table
    assert "MBPP" not in table
    assert "gsm8k" in capsys.readouterr().out
