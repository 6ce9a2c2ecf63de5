"""Problems from a JSONL file to completions in a JSONL file, resumable at any moment.

Line i of the output answers line i of the input.  Problems are decoded in fixed batches of the input's order; a batch
is written and flushed as one.  After a kill the interrupted batch is decoded again in full (so that its completions
do not depend on when the run was killed) and only its missing lines are written.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rlkv.inference.engine import InferenceEngine
from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import NO_USAGE, Completion, SamplingParams, Usage
from rlkv.utils.atomic import atomic_path

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class BatchReport:
    """What a run did: all lines of the output, how many of them were there before, usage of the new ones."""

    rows: list[dict[str, Any]]
    resumed: int
    usage: Usage
    usage_full: Usage

    def accuracy(self, field: str = "correct") -> float | None:
        """Share of right answers (``correct`` or ``correct_full``); None if the input has no answers."""
        judged = [row[field] for row in self.rows if field in row]
        return sum(judged) / len(judged) if judged else None


def read_problems(path: Path) -> list[dict[str, Any]]:
    """One object per line, each with a text ``problem`` and, if known, an ``answer``.

    Raises:
        ValueError: if the file is absent or empty, or a line is no such object; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the problems from {path}: {error}") from None
    problems = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            problem = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from None
        if not isinstance(problem, dict) or not isinstance(problem.get("problem"), str) or not problem["problem"]:
            raise ValueError(f"{path}, line {number} has no text field 'problem'")
        problems.append(problem)
    if not problems:
        raise ValueError(f"{path} holds no problems: it needs one JSON object with a field 'problem' per line")
    return problems


def run_batches(
    engine: InferenceEngine,
    input_path: Path,
    output_path: Path,
    sampling: SamplingParams,
    settings: dict[str, Any],
    template: str = "rlkv",
    compare_full: bool = False,
    on_progress: OnProgress | None = None,
) -> BatchReport:
    """Decode the problems of ``input_path`` that ``output_path`` does not answer yet, ``engine.batch_size`` at a time.

    Args:
        settings: everything else that the completions depend on (model, gates, sparsity, ...); kept in
            ``<output>.settings.json`` and compared when a run is resumed.
        compare_full: decode each batch with the full cache too (fields ``*_full``).
        on_progress: called with (problems done, problems in all).

    Raises:
        ValueError: for unreadable problems, an output of other settings or that another process is writing.
    """
    problems = read_problems(input_path)
    settings = {
        **settings,
        **dataclasses.asdict(sampling),
        **engine.cache_settings(),
        "batch_size": engine.batch_size,
        "template": template,
        "compare_full": compare_full,
        "input": hashlib.sha256(input_path.read_bytes()).hexdigest(),
    }
    output_path.parent.mkdir(parents=True, exist_ok=True)
    usage = usage_full = NO_USAGE
    with _locked(output_path) as output:
        _check_settings(output_path, settings, is_new=os.fstat(output.fileno()).st_size == 0)
        rows = _read_finished(output, output_path, problems)
        resumed = len(rows)
        size = engine.batch_size
        first = resumed - resumed % size if resumed < len(problems) else resumed  # the last batch may be short
        for begin in range(first, len(problems), size):
            if on_progress:
                on_progress(len(rows), len(problems))
            batch = problems[begin : begin + size]
            prompts = [render_prompt(engine.tokenizer, problem["problem"], template) for problem in batch]
            own = dataclasses.replace(sampling, seed=sampling.seed * 1_000_003 + begin)
            completions, spent = engine.batch(prompts, own)
            usage += spent
            new = [_row(begin + i, *pair) for i, pair in enumerate(zip(batch, completions, strict=True))]
            if compare_full:
                full, spent = engine.batch(prompts, own, full=True)
                usage_full += spent
                new = [row | _outcome(problem, c, "_full") for row, problem, c in zip(new, batch, full, strict=True)]
            missing = new[len(rows) - begin :]
            output.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in missing).encode())
            output.flush()
            os.fsync(output.fileno())
            rows += missing
        if on_progress:
            on_progress(len(rows), len(problems))
    return BatchReport(rows, resumed, usage, usage_full)


def _row(index: int, problem: dict[str, Any], completion: Completion) -> dict[str, Any]:
    kept = {"answer": problem["answer"]} if "answer" in problem else {}
    return {"index": index, "problem": problem["problem"], **kept, **_outcome(problem, completion, "")}


def _outcome(problem: dict[str, Any], completion: Completion, suffix: str) -> dict[str, Any]:
    outcome: dict[str, Any] = {
        "output": completion.text,
        "output_tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
    if "answer" in problem:
        from rlkv.verifier.verifier import is_correct

        outcome["correct"] = is_correct(completion.text, str(problem["answer"]))
    return {name + suffix: value for name, value in outcome.items()}


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """The output, open to read and append, for this process alone."""
    with path.open("a+b") as output:
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{path} is being written by another process: wait for it or take another --output"
            ) from None
        yield output


def _check_settings(output_path: Path, settings: dict[str, Any], is_new: bool) -> None:
    path = output_path.with_name(output_path.name + ".settings.json")
    if is_new:
        with atomic_path(path) as partial:
            partial.write_text(json.dumps(settings, indent=2) + "\n")
        return
    try:
        before = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        raise ValueError(
            f"{output_path} exists but {path.name}, which says how it was made, does not: take another --output"
        ) from None
    names = [name for name in {**before, **settings} if before.get(name) != settings.get(name)]
    if names:
        changes = "; ".join(f"{name} was {before.get(name)!r} and is now {settings.get(name)!r}" for name in names)
        raise ValueError(f"{output_path} was made with other settings: {changes}. Take another --output to start anew")


def _read_finished(output: IO[bytes], path: Path, problems: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The whole lines of the output; a torn last line, which a kill leaves, is cut off."""
    output.seek(0)
    content = output.read()
    whole = content[: content.rfind(b"\n") + 1]
    output.truncate(len(whole))
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(whole.splitlines()):
        try:
            row = json.loads(line)
            fits = row["index"] == number and row["problem"] == problems[number]["problem"]
        except (json.JSONDecodeError, KeyError, TypeError, IndexError):
            fits = False
        if not fits:
            raise ValueError(
                f"{path}, line {number + 1} is no answer to that problem of the input: the file was changed"
            )
        rows.append(row)
    return rows
