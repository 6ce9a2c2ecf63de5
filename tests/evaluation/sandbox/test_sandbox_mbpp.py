"""MBPP through the sandbox: reference programs pass, empty and wrong ones do not."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rlkv.evaluation.sandbox import Limits, run_tests
from tests.helpers.paths import SHARED

FILE = SHARED / "data" / "mbpp_test.jsonl"
STEP = int(os.environ.get("RLKV_TEST_MBPP_STEP", "10"))  # 1: all 500
WITHOUT_SETUP = {367}  # its tests use trees that the published file leaves out
LIMITS = Limits(wall_seconds=120, cpu_seconds=60)  # a busy machine must not fail a right program


@pytest.fixture(scope="module")
def tasks() -> list[dict[str, Any]]:
    if not FILE.is_file():
        pytest.skip(f"needs {FILE}")
    return [json.loads(line) for line in FILE.read_text().splitlines()][::STEP]


def passed(tasks: list[dict[str, Any]], programs: list[str]) -> set[int]:
    with ThreadPoolExecutor(4) as pool:
        verdicts = pool.map(
            lambda program, task: run_tests(program, task["test"], LIMITS), programs, tasks
        )
        return {
            task["task_id"] for task, verdict in zip(tasks, verdicts, strict=True) if verdict.passed
        }


def test_reference_programs_pass(tasks: list[dict[str, Any]]) -> None:
    assert (
        passed(tasks, [task["code"] for task in tasks])
        == {task["task_id"] for task in tasks} - WITHOUT_SETUP
    )


def test_empty_programs_fail(tasks: list[dict[str, Any]]) -> None:
    assert passed(tasks, [""] * len(tasks)) == set()


def test_wrong_functions_fail(tasks: list[dict[str, Any]]) -> None:
    # every function of the reference answers something that no test expects
    names = [re.findall(r"^def +(\w+)", task["code"], re.MULTILINE) for task in tasks]
    assert all(names)
    wrong = [
        "\n".join(f"def {name}(*a, **k): return 'no such value'" for name in found)
        for found in names
    ]
    assert passed(tasks, wrong) == set()
