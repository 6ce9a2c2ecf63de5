"""Problems from a JSONL file to completions in a JSONL file, resumable at any moment.

Line i of the output answers line i of the input.  Batches are fixed: after a kill the interrupted one is decoded again
in full, so that completions do not depend on when the run was killed, and only its missing lines are written.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from rlkv.inference.session import InferSession
from rlkv.rollout.base import NO_USAGE, Completion, Usage
from rlkv.utils.progress import progress_bar
from rlkv.utils.provenance import digest, provenance
from rlkv.utils.store import open_store


@dataclass(frozen=True)
class BatchReport:
    """What a run did: all lines of the output, how many of them were there before, usage of the new ones."""

    rows: list[dict[str, Any]]
    resumed: int
    usage: Usage
    usage_full: Usage

    def accuracy(self, field: str = "correct") -> tuple[float, int] | None:
        """Share of right answers (``correct`` or ``correct_full``), and of how many; None if the input has none."""
        judged = [row[field] for row in self.rows if field in row]
        return (sum(judged) / len(judged), len(judged)) if judged else None


def run_batches(session: InferSession) -> BatchReport:
    """Decode the problems of ``--input`` that ``--output`` does not answer yet, ``engine.batch_size`` at a time.

    Raises:
        ValueError: for an output of other settings, one that was edited or that another process is writing.
    """
    config, engine, problems = session.config, session.engine, session.problems
    assert config.input is not None
    assert config.output is not None
    settings = {
        **session.settings,
        **dataclasses.asdict(session.sampling),
        "batch_size": engine.batch_size,
        "template": session.template,
        "compare_full": config.compare_full,
        "input": digest(config.input.read_bytes()),
    }
    recorded = {"options": json.loads(json.dumps(dataclasses.asdict(config), default=str)), **provenance()}
    usage = usage_full = NO_USAGE
    with (
        open_store(config.output, settings, ["index"], recorded) as store,
        progress_bar("decode", "problems", len(problems)) as bar,
    ):
        resumed, size = len(store.rows), engine.batch_size
        if [row["index"] for row in store.rows] != list(range(resumed)) or resumed > len(problems):
            raise ValueError(f"{config.output} does not answer the input line by line: the file was edited")
        bar.resume(resumed)
        first = resumed - resumed % size if resumed < len(problems) else resumed  # the last batch may be short
        for begin in range(first, len(problems), size):
            batch = problems[begin : begin + size]
            prompts = [session.render(problem["problem"]) for problem in batch]
            sampling = dataclasses.replace(session.sampling, seed=(session.sampling.seed * 1_000_003 + begin) % 2**63)
            completions, spent = engine.batch(prompts, sampling)
            usage += spent
            rows = [_row(begin + i, *pair) for i, pair in enumerate(zip(batch, completions, strict=True))]
            if config.compare_full:
                full, spent = engine.batch(prompts, sampling, full=True)
                usage_full += spent
                rows = [row | _outcome(problem, c, "_full") for row, problem, c in zip(rows, batch, full, strict=True)]
            missing = rows[len(store.rows) - begin :]
            store.append(*missing)
            bar.advance(len(missing))
        return BatchReport(store.rows, resumed, usage, usage_full)


def _row(index: int, problem: dict[str, Any], completion: Completion) -> dict[str, Any]:
    kept = {"answer": problem["answer"]} if "answer" in problem else {}
    return {"index": index, "problem": problem["problem"], **kept, **_outcome(problem, completion, "")}


def _outcome(problem: dict[str, Any], completion: Completion, suffix: str) -> dict[str, Any]:
    outcome: dict[str, Any] = {
        "output": completion.text,
        "output_tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
    if problem.get("answer") is not None:
        from rlkv.verifier.verifier import is_correct

        outcome["correct"] = is_correct(completion.text, problem["answer"])
    return {name + suffix: value for name, value in outcome.items()}
