"""One method on one task: every generation with its verdict in a file, resumable at any moment.

A *unit* is one sample of one problem.  A row is graded and written when its text ends, on another
thread; a run that was killed decodes the units that are missing.  Each of several processes takes
every n-th unit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlkv.cache import CacheSettings
from rlkv.cache.accounting import KVSizes, kv_nbytes
from rlkv.cache.plan import COMPRESSIBLE
from rlkv.evaluation.metrics import RepetitionRule
from rlkv.evaluation.tasks.base import EvalProblem, EvalTask
from rlkv.gates.allocation import HeadAllocation
from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import Completion, SamplingParams, check_length
from rlkv.utils.runtime import commit, digest_of, hardware_line, library_facts
from rlkv.utils.store import Row, iter_shards, open_store, recorded_of
from rlkv.verifier.extraction import opening

# rows that may wait for their verdict before decoding does: what a kill can cost besides open rows
UNGRADED = 64
ROWS = "rows"  # shards of a job are rows-0-of-4.jsonl and so on
KEY = ("key", "sample")


@dataclass(frozen=True)
class Problem:
    """One problem as the model reads it.

    Attributes:
        key: its name in the files.
        prompt: rendered; ``prompt_ids``: its tokens.
        grade: whether a text is right.
        reference: what verdicts depend on, such as the answer and the tests.
    """

    key: str
    prompt: str
    prompt_ids: list[int]
    grade: Callable[[str], bool]
    reference: str = ""


@dataclass(frozen=True)
class RunSettings:
    """Settings with which a method decodes a task.

    Attributes:
        cache: what compressible heads keep.
        sampling: of each unit; its seed numbers the run.
        num_samples: samples per problem.
        batch_size: units decoded together, which rows do not depend on.
        rule: what counts as repetitive; with ``stop_repetitive`` such texts are ended.
        planned: for each problem the length of a text, of which the policy's ratio is taken from
            the start, in place of the tokens read so far.
        rank, ranks: which share of the units this process takes; rows do not depend on it.

    Raises:
        ValueError: for several samples of greedy decoding.
    """

    cache: CacheSettings
    sampling: SamplingParams
    num_samples: int = 1
    batch_size: int = 8
    rule: RepetitionRule = field(default_factory=RepetitionRule)
    rank: int = 0
    ranks: int = 1
    stop_repetitive: bool = False
    planned: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_samples > 1 and self.sampling.greedy:
            raise ValueError(
                f"{self.num_samples} samples of greedy decoding are all the same: set a "
                "temperature or take one sample"
            )


def render_problems(
    task: EvalTask, problems: Iterable[EvalProblem], tokenizer: PreTrainedTokenizerBase
) -> list[Problem]:
    """Return ``problems`` of ``task`` as the model reads them."""
    rendered = []
    for problem in problems:
        prompt = render_prompt(tokenizer, problem.prompt, "plain")
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        grade = partial(_grade, task, problem, opening(prompt))
        rendered.append(Problem(problem.id, prompt, ids, grade, f"{problem.answer}{problem.meta}"))
    return rendered


def longest_text(task: str, problems: list[Problem], sampling: SamplingParams, most: int) -> int:
    """Return how many tokens a text of ``task`` may have with its prompt.

    Raises:
        ValueError: if they are more than ``most``, the positions of the model.
    """
    prompt = max(len(problem.prompt_ids) for problem in problems)
    check_length(f"the longest prompt of {task}", prompt, sampling.max_new_tokens, most)
    return prompt + sampling.max_new_tokens


def _grade(task: EvalTask, problem: EvalProblem, opened: str, text: str) -> bool:
    return task.grade(opened + text, problem)


class Decoder(Protocol):
    """An engine that decodes a method (:mod:`rlkv.evaluation.decoders`).

    Attributes:
        allocation: which heads are full.
        size: of what its caches hold.
        facts: what texts depend on in addition to :class:`RunSettings` and the prompts.
    """

    allocation: HeadAllocation
    size: KVSizes
    facts: dict[str, Any]

    def stream(
        self,
        prompts: list[str],
        numbers: list[int],
        settings: RunSettings,
        planned: list[int] | None,
    ) -> Generator[tuple[int, Completion], None, None]:
        """Yield ``(index into prompts, completion)`` as texts end.

        Args:
            numbers: of the rows, which with the seed fix their draws.
            planned: for each prompt the length of a text (:class:`RunSettings`).
        """
        ...


def run_method(
    decoder: Decoder,
    problems: list[Problem],
    settings: RunSettings,
    rows_file: Path,
    on_rows: Callable[[int, int, float], None],
) -> list[Row]:
    """Decode and grade what ``rows_file``, and other shards next to it, do not hold yet.

    Args:
        decoder: under the method's allocation, with compressible heads as ``settings.cache`` says.
        on_rows: called with units done, units in all, and the accuracy so far, of this process; on
            another thread.

    Returns:
        Rows in the order of problems and samples, with the fields key, sample, problem (a digest),
        text, token_ids, finish_reason, correct, repetitive, kv_bytes and kv_bytes_full (at the end
        of that text alone; of a hybrid also kv_bytes_unchanged, the part of both that is of layers
        without gates), and seconds (each moment is divided equally among the rows that are
        decoded); see docs/evaluate.md.

    Raises:
        ValueError: if one of the files was written with other settings, which are named, or for
            another problem.
        StoreInUseError: if another process is writing ``rows_file``.
    """
    units = list(product(range(len(problems)), range(settings.num_samples)))
    digests = digest_problems(problems, settings.sampling)
    units = units[settings.rank :: settings.ranks]
    keys = [(problems[place].key, sample) for place, sample in units]
    own = set(keys)
    compared = fingerprint(decoder, settings)
    full = decoder.allocation.full
    done: dict[tuple[str, int], Row] = {}
    others = iter_shards(rows_file.parent, ROWS, KEY, compared)
    recorded = {"commit": commit(), "batch_size": settings.batch_size, "hardware": hardware_line()}
    with open_store(rows_file, compared, KEY, recorded) as store:
        for row in chain(others, store.rows):
            # those of other processes too, so that all of them refuse the same
            if row["problem"] != digests.get(row["key"], row["problem"]):
                raise ValueError(
                    f"{rows_file.parent} holds rows of {row['key']} whose prompt, answer or tests "
                    "were others: use the old ones, or take another output folder"
                )
            if (row["key"], row["sample"]) in own:
                done[row["key"], row["sample"]] = row
        right = sum(row["correct"] for row in done.values())
        on_rows(len(done), len(units), right / max(1, len(done)))

        def grade_and_write(place: int, sample: int, completion: Completion) -> None:
            nonlocal right
            row = {
                "key": problems[place].key,
                "sample": sample,
                "problem": digests[problems[place].key],
                "correct": problems[place].grade(completion.text),
                **measured(completion, problems, place, settings, full, decoder.size),
            }
            store.append(row)
            done[row["key"], sample] = row
            right += row["correct"]
            on_rows(len(done), len(units), right / len(done))

        missing = [unit for unit, key in zip(units, keys, strict=True) if key not in done]
        planned = None
        if settings.planned is not None:
            planned = [settings.planned[place] for place, _ in missing]
        stream = decoder.stream(
            [problems[place].prompt for place, _ in missing],
            [place * settings.num_samples + sample for place, sample in missing],
            settings,
            planned,
        )
        with closing(stream):
            jobs = (partial(grade_and_write, *missing[i], text) for i, text in stream)
            run_in_background(jobs, max(UNGRADED, 2 * settings.batch_size))
    return [done[key] for key in keys]


def digest_problems(problems: list[Problem], sampling: SamplingParams) -> dict[str, str]:
    """Return by the key of each problem a digest of what its rows depend on."""
    found = {}
    for place, problem in enumerate(problems):
        described = [problem.key, problem.prompt, problem.reference, problem.prompt_ids]
        # draws depend on the place, too
        found[problem.key] = digest_of(described if sampling.greedy else [*described, place])
    return found


def name_unlike_rows(files: Mapping[str, Iterable[Path]]) -> list[str]:
    """Name rows by commit, batch size and machine, in a sentence, unless all have the same.

    Args:
        files: name of rows -> their files.
    """
    groups: dict[str, dict[str, None]] = {}  # names in their order
    for name, paths in files.items():
        for path in paths:
            for recorded in recorded_of(path) if path.stat().st_size else ():
                facts = f"commit {recorded['commit']}"
                if "batch_size" in recorded:
                    facts = f"{recorded['batch_size']} texts at once, {facts}"
                if "hardware" in recorded:
                    facts += f", {recorded['hardware']}"
                groups.setdefault(facts, {})[name] = None
    if len(groups) < 2:
        return []
    described = "; ".join(f"{facts}: {', '.join(names)}" for facts, names in groups.items())
    return [
        "Not all rows were made alike: seconds, in bfloat16 the tokens of texts, and verdicts of "
        f"different commits may not be comparable. {described}."
    ]


def run_in_background(jobs: Iterable[Callable[[], None]], most_open: int) -> None:
    """Run jobs in order on one other thread, while the next ones are made on this one.

    Waits while ``most_open`` of them are open.  Raises what a job raised; those that have not begun
    by then are dropped.
    """
    waiting: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, "grading") as pool:
        try:
            for job in jobs:
                while waiting and (len(waiting) >= most_open or waiting[0].done()):
                    waiting.popleft().result()
                waiting.append(pool.submit(job))
            for open_job in waiting:
                open_job.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def measured(
    completion: Completion,
    problems: list[Problem],
    place: int,
    settings: RunSettings,
    full: Tensor,
    size: KVSizes,
) -> Row:
    """Return the fields of a row that need no verdict."""
    ids = completion.token_ids
    prompt = torch.tensor([len(problems[place].prompt_ids)])
    tokens = prompt + len(ids) - 1  # the last token is never fed
    planned = None if settings.planned is None else torch.tensor([settings.planned[place]])
    held, whole = kv_nbytes(settings.cache, full, size, prompt, tokens, planned)
    unchanged = int(size.unchanged_nbytes(tokens))
    # a text that ends by itself is not checked at its end token
    checked = ids[:-1] if completion.finish_reason == "stop" else ids
    of_others = {"kv_bytes_unchanged": unchanged} if size.others else {}
    return {
        "finish_reason": completion.finish_reason,
        "repetitive": settings.rule(checked),
        "kv_bytes": int(held) + unchanged,
        "kv_bytes_full": int(whole) + unchanged,
        **of_others,
        "seconds": round(completion.seconds, 4),
        "text": completion.text,
        "token_ids": ids,
    }


def fingerprint(decoder: Decoder, settings: RunSettings) -> dict[str, Any]:
    """Return all that rows depend on besides their problems."""
    compared = asdict(settings)
    for name in ("rank", "ranks", "batch_size"):
        del compared[name]
    policy = settings.cache.eviction
    compared["cache"]["eviction"] = None if policy is None else policy.describe()
    if settings.cache.evict_from == COMPRESSIBLE:
        del compared["cache"]["evict_from"]  # rows of before the setting stay
    return compared | {
        "full_heads": decoder.allocation.full.int().flatten().tolist(),
        **decoder.facts,
        "libraries": library_facts(),
    }
