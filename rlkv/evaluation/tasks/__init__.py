"""The benchmarks: where their problems come from, what the model reads, and what counts as a right answer."""

from __future__ import annotations

from rlkv.evaluation.tasks.base import EvalProblem, EvalTask, HubData
from rlkv.evaluation.tasks.maths import math_task
from rlkv.evaluation.tasks.registry import TASKS, find_task, find_tasks, load_task, registered, trained_template

__all__ = [
    "TASKS",
    "EvalProblem",
    "EvalTask",
    "HubData",
    "find_task",
    "find_tasks",
    "load_task",
    "math_task",
    "registered",
    "trained_template",
]
