"""The filter job: decode, verify and keep, shard by shard, resumable after a kill at any moment."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkv.data.decoders import MISSING, SKIPPED, Decoder, Output
from rlkv.data.deepscaler import Problem
from rlkv.data.shards import ShardWriter, check_settings, read_shard, shard_path
from rlkv.verifier.verifier import Verifier, extract_answer

CORRECT, WRONG, TRUNCATED, UNPARSABLE, NO_ANSWER = "correct", "wrong", "truncated", "unparsable", "no_answer"

# every loaded problem ends in exactly one of these
STATUSES = {
    CORRECT: "solved",
    WRONG: "another answer than the right one",
    TRUNCATED: "output cut at the token limit",
    UNPARSABLE: "output without an answer",
    SKIPPED: "prompt too long for the model",
    MISSING: "no recorded output",
    NO_ANSWER: "problem without a right answer",
}


def problems_digest(problems: list[Problem]) -> str:
    """A short hash of problems and answers in their order."""
    digest = hashlib.sha256()
    for p in problems:
        digest.update(json.dumps([p.problem, p.answer]).encode())
    return digest.hexdigest()[:16]


def shard_indices(num_problems: int, shard: int, num_shards: int) -> range:
    """The problems of one shard: every ``num_shards``-th, from ``shard``."""
    return range(shard, num_problems, num_shards)


def judge(outputs: list[tuple[int, Output]], problems: list[Problem], verifier: Verifier) -> list[dict[str, Any]]:
    """One record per output: ``index, status, output, output_tokens``."""
    # an output that was cut is not asked: what it boxed so far is not its last word
    whole = [index for index, output in outputs if not output.truncated]
    texts = {index: output.text for index, output in outputs}
    verdicts = dict(zip(whole, verifier.are_correct([(texts[i], problems[i].answer) for i in whole]), strict=True))
    records = []
    for index, output in outputs:
        if output.truncated:
            status = TRUNCATED
        elif verdicts[index]:
            status = CORRECT
        else:
            status = WRONG if extract_answer(output.text, verifier.extraction) else UNPARSABLE
        records.append({"index": index, "status": status, "output": output.text, "output_tokens": output.tokens})
    return records


def run_shard(
    problems: list[Problem],
    decoder: Decoder,
    verifier: Verifier,
    folder: Path,
    settings: dict[str, Any],
    shard: int = 0,
    num_shards: int = 1,
    batch_size: int = 16,
    on_resume: Callable[[Counter[str]], None] = lambda counts: None,
    on_batch: Callable[[Counter[str]], None] = lambda counts: None,
) -> int:
    """Finish one shard; returns how many of its problems were finished before.

    Records are flushed to the disk in batches of ``batch_size``.  ``on_resume`` is called once with the counts
    by status of what was finished before, ``on_batch`` with those of every batch.

    Raises:
        ValueError: if the shard was begun with other settings, is damaged, or is in use.
    """
    path = shard_path(folder, shard, num_shards)
    with ShardWriter(path, settings) as writer:
        before = len(writer.done)
        on_resume(Counter(record["status"] for record in iter_records(path)))
        open_problems = [
            (i, problems[i]) for i in shard_indices(len(problems), shard, num_shards) if i not in writer.done
        ]
        unanswerable = [i for i, problem in open_problems if not problem.answer.strip()]
        records: list[dict[str, Any]] = [{"index": i, "status": NO_ANSWER} for i in unanswerable]
        outputs: list[tuple[int, Output]] = []

        def flush() -> None:
            records.extend(judge(outputs, problems, verifier))
            if records:
                writer.append(records)
                on_batch(Counter(record["status"] for record in records))
            records.clear()
            outputs.clear()

        for index, output in decoder.stream([(i, p) for i, p in open_problems if p.answer.strip()]):
            if isinstance(output, str):
                records.append({"index": index, "status": output})
            else:
                outputs.append((index, output))
            if len(records) + len(outputs) >= batch_size:
                flush()
        flush()
    return before


def iter_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of one shard file, without the text of the outputs."""
    rows = read_shard(path)
    next(rows, None)
    for row in rows:
        row.pop("output", None)
        yield row


@dataclass(frozen=True)
class Outcome:
    """The merged shards: ``status`` and, where there is an output, ``tokens`` by problem index."""

    status: dict[int, str]
    tokens: dict[int, int]

    @property
    def counts(self) -> dict[str, int]:
        """How many problems ended in each status, all statuses named."""
        counted = Counter(self.status.values())
        return {name: counted[name] for name in STATUSES}

    def solved(self) -> dict[int, int]:
        """Output tokens of the solved problems by index."""
        return {i: self.tokens[i] for i, status in self.status.items() if status == CORRECT}


def missing_shards(folder: Path, num_problems: int, num_shards: int, settings: dict[str, Any]) -> list[tuple[int, int]]:
    """``(shard, open problems)`` of every shard that is not complete.

    Raises:
        ValueError: if a shard was written with other settings.
    """
    expected = json.loads(json.dumps(settings))
    found = []
    for shard in range(num_shards):
        path = shard_path(folder, shard, num_shards)
        wanted = set(shard_indices(num_problems, shard, num_shards))
        if path.exists():
            header = next(read_shard(path), None)
            if header is not None:
                check_settings(path, header.get("settings", {}), expected)
            wanted -= {record["index"] for record in iter_records(path)}
        if wanted:
            found.append((shard, len(wanted)))
    return found


def merge_shards(folder: Path, num_shards: int) -> Outcome:
    """The records of all shards together, in the order of the problems."""
    records = [r for shard in range(num_shards) for r in iter_records(shard_path(folder, shard, num_shards))]
    records.sort(key=lambda r: r["index"])
    tokens = {r["index"]: r["output_tokens"] for r in records if "output_tokens" in r}
    return Outcome({r["index"]: r["status"] for r in records}, tokens)


def read_outputs(folder: Path, num_shards: int, chosen: set[int]) -> dict[int, str]:
    """The output texts of the ``chosen`` problems; the others are never held in memory together."""
    texts = {}
    for shard in range(num_shards):
        rows = read_shard(shard_path(folder, shard, num_shards))
        next(rows, None)
        texts.update({row["index"]: row["output"] for row in rows if row["index"] in chosen})
    return texts
