"""One method on one task: every generation with its verdict in a file, resumable at any moment.

A *unit* is one sample of one problem.  A row is graded and written when its text ends, on another
thread; a run that was killed decodes the units that are missing.  Each of several processes takes
every n-th unit.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlkv import __version__
from rlkv.cache import CacheSettings
from rlkv.cache.accounting import EntrySize, kv_nbytes
from rlkv.evaluation.metrics import RepetitionRule
from rlkv.evaluation.tasks.base import EvalProblem, EvalTask
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.engine import InferenceEngine
from rlkv.inference.options import check_positive
from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import Completion, SamplingParams
from rlkv.utils.runtime import commit, digest
from rlkv.utils.store import Row, iter_shards, open_store
from rlkv.verifier.extraction import THINKING

# rows that may wait for their verdict before decoding does: what a kill can cost besides open rows
UNGRADED = 64
ROWS = "rows"  # shards of a job are rows-0-of-4.jsonl and so on
KEY = ("key", "sample")
# a resumed run must have the same versions
LIBRARIES = ("torch", "transformers", "math-verify", "sympy")
SAMPLED = 1024  # elements of each parameter that its digest sees


class Background:
    """Jobs that run in order on one other thread.

    ``submit`` waits while ``capacity`` jobs are open, and raises what one of them raised.  Leaving
    the context waits for all jobs or, after an error, drops those that have not begun.
    """

    def __init__(self, capacity: int) -> None:
        self._pool = ThreadPoolExecutor(1, "grading")
        self._capacity = capacity
        self._open: deque[Future[None]] = deque()

    def submit(self, job: Callable[[], None]) -> None:
        while self._open and (len(self._open) >= self._capacity or self._open[0].done()):
            self._open.popleft().result()
        self._open.append(self._pool.submit(job))

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for job in self._open:
                job.result()


@dataclass(frozen=True)
class Problem:
    """One problem as the model reads it.

    Attributes:
        key: its name in the files.
        prompt: rendered.
        grade: whether a text is right.
        reference: what verdicts depend on, such as the answer and the tests.
    """

    key: str
    prompt: str
    grade: Callable[[str], bool]
    reference: str = ""


@dataclass(frozen=True)
class RunSettings:
    """How a method decodes a task.

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
        ValueError: for several samples of greedy decoding, or a number below 1.
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
        check_positive(self, "num_samples", "batch_size")
        if self.num_samples > 1 and self.sampling.greedy:
            raise ValueError(
                f"{self.num_samples} samples of greedy decoding are all the same: set a "
                "temperature or take one sample"
            )
        variant = getattr(self.cache.eviction, "variant", None)
        if self.planned is not None and variant == "rlkv_tables":
            raise ValueError(
                "planned lengths do not go with variant=rlkv_tables, whose budget grows with the "
                "text"
            )

    def engine(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        allocation: HeadAllocation,
    ) -> InferenceEngine:
        """Return what decodes."""
        return InferenceEngine(model, tokenizer, allocation, self.cache, self.batch_size)

    def fingerprint(self) -> dict[str, Any]:
        """Return all settings that rows depend on."""
        compared = asdict(self)
        for name in ("rank", "ranks", "batch_size"):
            del compared[name]
        # rows that were measured before there were these settings stay valid
        if self.planned is None:
            del compared["planned"]
        if not self.cache.protect_prompt:
            del compared["cache"]["protect_prompt"]
        policy = self.cache.eviction
        compared["cache"]["eviction"] = policy.describe() if policy else None
        return compared


def render_problems(
    task: EvalTask, problems: Iterable[EvalProblem], tokenizer: PreTrainedTokenizerBase
) -> list[Problem]:
    """Return ``problems`` of ``task`` as the model reads them."""
    rendered = []
    for problem in problems:
        prompt = render_prompt(tokenizer, problem.prompt, "plain")
        # a chat template may open the thoughts, which the text then closes
        opened = THINKING if prompt.rstrip().endswith(THINKING) else ""
        grade = partial(_grade, task, problem, opened)
        rendered.append(Problem(problem.id, prompt, grade, f"{problem.answer}{problem.meta}"))
    return rendered


def _grade(task: EvalTask, problem: EvalProblem, opened: str, text: str) -> bool:
    return task.grade(opened + text, problem)


def run_method(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    allocation: HeadAllocation,
    settings: RunSettings,
    rows_file: Path,
    facts: dict[str, Any],
    on_rows: Callable[[int, int, float], None],
) -> list[Row]:
    """Decode and grade what ``rows_file``, and other shards next to it, do not hold yet.

    Args:
        facts: what else the rows depend on besides settings, problems, prompts, model and versions.
        on_rows: called with units done, units in all, and the accuracy so far, of this process; on
            another thread.

    Returns:
        Rows in the order of problems and samples, with the fields key, sample, text, token_ids,
        finish_reason, correct, repetitive, kv_bytes and kv_bytes_full (at the end of that text
        alone), and seconds (each moment is divided equally among the rows that are decoded); see
        docs/evaluate.md.

    Raises:
        ValueError: if one of the files was written with other settings; the differences are named.
        StoreInUseError: if another process is writing ``rows_file``.
    """
    engine = settings.engine(model, tokenizer, allocation)
    prompts = [problem.prompt for problem in problems]
    lengths = engine.prompt_lengths(prompts)
    size = EntrySize.of(model)
    units = list(product(range(len(problems)), range(settings.num_samples)))
    units = units[settings.rank :: settings.ranks]
    keys = [(problems[problem].key, sample) for problem, sample in units]
    compared = fingerprint(engine, problems, settings, facts)
    done: dict[tuple[str, int], Row] = {}
    wanted = set(keys)
    for row in iter_shards(rows_file.parent, ROWS, KEY, compared):
        if (row["key"], row["sample"]) in wanted:
            done[row["key"], row["sample"]] = row
    recorded = {"commit": commit(), "batch_size": settings.batch_size}
    with open_store(rows_file, compared, KEY, recorded) as store:
        for row in store.rows:
            done[row["key"], row["sample"]] = row
        right = sum(row["correct"] for row in done.values())
        on_rows(len(done), len(units), right / max(1, len(done)))

        def grade_and_write(problem: int, sample: int, completion: Completion) -> None:
            nonlocal right
            row = {
                "key": problems[problem].key,
                "sample": sample,
                "correct": problems[problem].grade(completion.text),
                **measured(completion, settings, allocation, size, lengths[problem], problem),
            }
            store.append(row)
            done[row["key"], sample] = row
            right += row["correct"]
            on_rows(len(done), len(units), right / len(done))

        missing = [unit for unit, key in zip(units, keys, strict=True) if key not in done]
        stream = engine.stream(
            [prompts[problem] for problem, _ in missing],
            settings.sampling,
            [problem * settings.num_samples + sample for problem, sample in missing],
            settings.rule if settings.stop_repetitive else None,
            full=bool(allocation.full.all()),
            planned=settings.planned and [settings.planned[problem] for problem, _ in missing],
        )
        capacity = max(UNGRADED, 2 * settings.batch_size)
        with Background(capacity) as background, closing(stream):
            for place, completion in stream:
                background.submit(partial(grade_and_write, *missing[place], completion))
    return [done[key] for key in keys]


def measured(
    completion: Completion,
    settings: RunSettings,
    allocation: HeadAllocation,
    size: EntrySize,
    prompt_length: int,
    problem: int,
) -> Row:
    """Return the fields of a row that need no verdict."""
    ids = completion.token_ids
    prompt = torch.tensor([prompt_length])
    tokens = prompt + len(ids) - 1  # the last token is never fed
    planned = None if settings.planned is None else torch.tensor([settings.planned[problem]])
    held, whole = kv_nbytes(settings.cache, allocation.full, size, prompt, tokens, planned)
    # a text that ends by itself is not checked at its end token
    checked = ids[:-1] if completion.finish_reason == "stop" else ids
    return {
        "finish_reason": completion.finish_reason,
        "repetitive": settings.rule(checked),
        "kv_bytes": int(held),
        "kv_bytes_full": int(whole),
        "seconds": round(completion.seconds, 4),
        "text": completion.text,
        "token_ids": ids,
    }


def fingerprint(
    engine: InferenceEngine,
    problems: list[Problem],
    settings: RunSettings,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Return ``facts``, and all else that rows depend on."""
    prompts = [problem.prompt for problem in problems]
    described = [[problem.key, problem.prompt, problem.reference] for problem in problems]
    ids = engine.tokenizer(prompts, add_special_tokens=False).input_ids
    return settings.fingerprint() | {
        "full_heads": engine.allocation.full.int().flatten().tolist(),
        "problems": digest_of(described),
        "prompt_tokens": digest_of(ids),
        "end_tokens": engine.eos_ids,
        "model_state": model_facts(engine.model),
        "libraries": library_facts(),
        **facts,
    }


def digest_of(value: Any) -> str:
    """Return a digest of ``value`` as JSON, whatever the order of its keys."""
    return digest(json.dumps(value, sort_keys=True, default=str).encode())


def model_facts(model: PreTrainedModel) -> dict[str, Any]:
    """Return config, kind of device, number type, and a hash of the weights.

    The hash is over up to 1,024 evenly spaced elements of each parameter: another training, merge
    or quantization is seen, a change of single elements may not be.
    """
    config = model.config.to_dict()
    for name in list(config):
        if name.startswith("_") or name == "transformers_version":
            del config[name]
    weights = bytearray()
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().flatten()
        count = min(SAMPLED, flat.numel())
        places = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64).long()
        sample = flat[places.to(flat.device)].cpu()
        weights += f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()
        weights += sample.contiguous().view(torch.uint8).numpy().tobytes()
    return {
        "config": digest_of(config),
        "weights": digest(bytes(weights)),
        "dtype": str(model.dtype),
        "device": model.device.type,
    }


@functools.cache
def library_facts() -> dict[str, str]:
    """Return the versions of this package and of the installed libraries that decode and grade."""
    found = {"rlkv": __version__}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
