"""All tasks by name, and their problems."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from rlkv.data.problems import DRAWN, SUFFIXES, read_rows, text_field
from rlkv.evaluation.tasks.base import EvalProblem, EvalTask, HubData, ParsedRow, Row
from rlkv.evaluation.tasks.choice import CHOICE
from rlkv.evaluation.tasks.code import CODE
from rlkv.evaluation.tasks.maths import MATHS
from rlkv.models.builtin import dataset_rows
from rlkv.models.prompts import TEMPLATES, choose_template
from rlkv.utils.files import at_home
from rlkv.utils.runtime import require
from rlkv.verifier.extraction import after_thinking

EXTRA = "ifeval"


def grade_ifeval(text: str, problem: EvalProblem) -> bool:
    """Return whether the text after the thoughts obeys all instructions (prompt-level, strict)."""
    return _follows(after_thinking(text).strip(), problem.meta)


def _follows(response: str, meta: Any) -> bool:
    utils = _checkers()
    given = utils.InputExample(0, meta["instructions"], meta["problem"], meta["arguments"])
    return bool(utils.test_instruction_following_strict(given, response).follow_all_instructions)


@functools.cache
def _checkers() -> ModuleType:
    """Import lm-eval's checkers; ``ValueError`` if they or their data are not installed."""
    nltk = require("nltk", EXTRA)
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:  # lm-eval would try to download it, and count no sentences without it
        raise ValueError(
            "IFEval counts sentences with NLTK's punkt_tab, which is not installed: python -m "
            "nltk.downloader punkt_tab"
        ) from None
    detector = require("langdetect", EXTRA).DetectorFactory
    detector.seed = 0  # else its verdicts differ from run to run
    return require("lm_eval.tasks.ifeval.utils", EXTRA)


def parse_ifeval(row: dict[str, Any], where: str) -> ParsedRow:
    """Parse a row of IFEval.

    Its fields: prompt, instruction_id_list, kwargs (a dict for each instruction).
    """
    prompt = text_field(row, "prompt", where)
    names = row.get("instruction_id_list", [])
    arguments = row.get("kwargs", [])
    are_lists = isinstance(names, list) and isinstance(arguments, list)
    if not (prompt.strip() and are_lists and names and len(names) == len(arguments)):
        raise ValueError(
            f"{where}: it needs a prompt, and as many kwargs as there are names in "
            "instruction_id_list"
        )
    meta = {
        "problem": prompt,
        "instructions": names,
        "arguments": arguments,
        "checkers": version(_checkers().__name__.partition(".")[0]),
    }
    try:
        meta["arguments"] = [dict(each or {}) for each in arguments]
        _follows("", meta)
    except Exception as error:  # whatever a checker raises for arguments that are not its own
        raise ValueError(
            f"{where}: {', '.join(map(str, names))}: {type(error).__name__}: {error}"
        ) from None
    return ParsedRow({"problem": prompt}, "", meta)


IFEVAL = EvalTask(
    name="ifeval",
    kind="instructions",
    template="{problem}",
    max_new_tokens=32768,
    file="ifeval",
    fields="prompt, instruction_id_list and kwargs",
    ids=("key",),
    hub=HubData("google/IFEval", split="train"),
    parse=parse_ifeval,
    grade=grade_ifeval,
)

_TASKS = (*MATHS, *CODE, *CHOICE, IFEVAL)
TASKS = MappingProxyType({task.name: task for task in _TASKS})
assert len(TASKS) == len(_TASKS), "two tasks have one name"


def find_task(name: str) -> EvalTask:
    """Return the task ``name``; ``ValueError`` with the names if there is none."""
    if name in TASKS:
        return TASKS[name]
    raise ValueError(f"unknown task {name!r}: choose one of {', '.join(TASKS)}")


def find_tasks(names: Sequence[str], data: Path | None) -> list[EvalTask]:
    """Return the tasks ``names``.

    Raises:
        ValueError: if one is unknown or named twice, or ``data`` is one file for several tasks.
    """
    found = [find_task(name) for name in names]
    if len(set(names)) < len(found):
        raise ValueError(f"--tasks {' '.join(names)} names a task twice: leave one out")
    if data is not None and len(found) > 1 and at_home(data).is_file():
        raise ValueError(
            f"--data {data} is one file, but --tasks names {len(found)} tasks: give a folder that "
            "holds a file for each, or name one task"
        )
    return found


def load_task(
    name: str, path: str | Path | None = None, limit: int | None = None, template: str | None = None
) -> list[EvalProblem]:
    """Load the problems of a task, in the order of its data.

    Args:
        path: a local ``.jsonl`` or ``.parquet`` file, or a folder that holds one under the task's
            file name (such as ``gsm8k_test.jsonl``); None: the hub's copy.  ``tiny`` and ``smol``
            are drawn unless a file is given.
        limit: use only the first N problems; of tasks that are drawn, how many are (400).
        template: a name in :data:`rlkv.models.prompts.TEMPLATES` for a maths task; None: the task's
            own.

    Raises:
        ValueError: if the task is unknown, its data absent or unreachable, or a row broken.
    """
    task = find_task(name)
    if template is not None and task.kind == "math":
        task = replace(task, template=TEMPLATES[choose_template(template, model=None)])
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    source = None if path is None else at_home(path)
    if task.draw is not None and (source is None or source.is_dir()):
        drawn = task.draw(limit or DRAWN)
        rows: Iterable[Row] = [(f"{name} problem {i}", dict(row)) for i, row in enumerate(drawn, 1)]
    elif source is not None:
        rows = read_rows(str(_local_file(task, source)))
    elif task.hub is not None:
        hub = task.hub
        what = f"task {name!r} ({hub.id})"
        rows = dataset_rows(hub.id, "eval", what, _what_to_give(task), hub.config, hub.split)
    else:
        raise ValueError(f"task {name!r} has no data on the hub: {_what_to_give(task)}")
    problems = task.problems(rows)
    if not problems:
        raise ValueError(f"task {name!r}: {path or task.hub} holds no problems")
    return problems[:limit]


def _local_file(task: EvalTask, path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"task {task.name!r}: {path} does not exist: {_what_to_give(task)}")
    for suffix in SUFFIXES:
        file = path / f"{task.file}{suffix}"
        if file.is_file():
            return file
    raise ValueError(
        f"task {task.name!r}: the folder {path} holds no {task.file}.jsonl or {task.file}.parquet"
    )


def _what_to_give(task: EvalTask) -> str:
    return (
        f"give a local copy with --data, a .jsonl or .parquet file with the fields {task.fields}, "
        f"or a folder that holds {task.file}.jsonl"
    )
