"""One result per problem of the filter: decoded, verified and kept, shard by shard, resumable after a kill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkv.data.decoders import MISSING, SKIPPED, Decoder, Output
from rlkv.data.deepscaler import Problem
from rlkv.utils.progress import ProgressBar
from rlkv.utils.store import Row, check_settings, iter_rows, open_store
from rlkv.verifier.verifier import Verifier, extract_answer, reference_answer

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
KEY = ("index",)


@dataclass(frozen=True)
class Shards:
    """The result files of a job: shard i of ``count`` does every ``count``-th problem, from the i-th (from 0).

    Rows do not depend on the shard: a run with another ``count`` goes on from the files of all of them.  A row has the
    problem's index and status and, where there is an output, ``output`` and ``output_tokens``.
    """

    folder: Path
    num_problems: int
    count: int
    settings: dict[str, Any]

    def path(self, shard: int) -> Path:
        return self.folder / "shards" / f"shard-{shard}-of-{self.count}.jsonl"

    def indices(self, shard: int) -> range:
        return range(shard, self.num_problems, self.count)

    def rows(self) -> Iterator[Row]:
        """One row of each problem that was done, one in memory at a time; other processes may be writing.

        Raises:
            ValueError: if a shard was written with other settings, or is damaged.
        """
        seen: set[int] = set()
        for path in sorted(self.path(0).parent.glob("shard-*.jsonl")):
            if path.stat().st_size:
                check_settings(path, self.settings)
            for row in iter_rows(path, KEY):
                if row["index"] not in seen:  # two runs may have done it at the same time
                    seen.add(row["index"])
                    yield row

    def missing(self) -> dict[int, int]:
        """``shard: open problems`` of every shard that is not complete; errors as :meth:`rows`."""
        done = {row["index"] for row in self.rows()}
        found = {shard: sum(index not in done for index in self.indices(shard)) for shard in range(self.count)}
        return {shard: number for shard, number in found.items() if number}

    def outcome(self) -> Outcome:
        """The results of all shards together, in the order of the problems."""
        status, tokens = {}, {}
        for row in self.rows():
            status[row["index"]] = row["status"]
            if "output_tokens" in row:
                tokens[row["index"]] = row["output_tokens"]
        return Outcome(dict(sorted(status.items())), tokens)


@dataclass(frozen=True)
class Outcome:
    """``status`` and, where there is an output, ``tokens`` by problem index."""

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


def judge(outputs: list[tuple[int, Output]], problems: list[Problem], verifier: Verifier) -> list[Row]:
    """One row per output; an output that was cut at the limit is not verified."""
    pairs = [(output.text, problems[index].answer) for index, output in outputs if not output.truncated]
    verdicts = iter(verifier.are_correct(pairs))
    rows = []
    for index, output in outputs:
        if output.truncated:
            status = TRUNCATED
        elif next(verdicts):
            status = CORRECT
        else:
            status = WRONG if extract_answer(output.text) else UNPARSABLE
        rows.append({"index": index, "status": status, "output": output.text, "output_tokens": output.tokens})
    return rows


def run_shard(
    shards: Shards,
    shard: int,
    problems: list[Problem],
    decoder: Decoder,
    verifier: Verifier,
    batch_size: int,
    progress: ProgressBar,
) -> None:
    """Finish one shard; rows go to the disk in batches of ``batch_size``.

    Raises:
        ValueError: if the shard was started with other settings, is damaged, or is in use.
    """
    own = shards.indices(shard)
    with open_store(shards.path(shard), shards.settings, KEY, keep_rows=False) as store:
        done = {row["index"]: row["status"] for row in shards.rows() if row["index"] in own}
        progress.resume(Counter(done.values()))
        still_open = [index for index in own if index not in done]
        answerable = [(i, problems[i]) for i in still_open if reference_answer(problems[i].answer)]
        without = sorted(set(still_open) - {index for index, _ in answerable})
        rows: list[Row] = [{"index": index, "status": NO_ANSWER} for index in without]
        outputs: list[tuple[int, Output]] = []

        def flush() -> None:
            rows.extend(judge(outputs, problems, verifier))
            store.append(*rows)
            progress.advance(Counter(row["status"] for row in rows))
            rows.clear()
            outputs.clear()

        for index, output in decoder.stream(answerable):
            if isinstance(output, str):
                rows.append({"index": index, "status": output})
            else:
                outputs.append((index, output))
            if len(rows) + len(outputs) >= batch_size:
                flush()
        flush()
