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
from collections.abc import Callable, Iterable, Iterator
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
from rlkv.utils.store import Row, open_store, read_store
from rlkv.verifier.extraction import THINKING


class Background:
    """Jobs run in order on one other thread; ``submit`` waits while ``capacity`` are open, and
    raises what one raised.

    Leaving the context waits for all jobs or, after an error, drops those that have not begun.
    """

    def __init__(self, capacity: int) -> None:
        self._pool, self._capacity = ThreadPoolExecutor(1, "grading"), capacity
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


# rows that may wait for their verdict before decoding does: what a kill can cost besides open rows
UNGRADED = 64
KEY = ("key", "sample")
LIBRARIES = (
    "torch",
    "transformers",
    "math-verify",
    "sympy",
)  # a resumed run must have the same versions
SAMPLED = 1024  # elements of each parameter that its digest sees
Unit = tuple[int, int]  # problem, sample


@dataclass(frozen=True)
class Problem:
    """``key`` in the files, rendered ``prompt``, grader of texts, and what verdicts depend on
    (answer, tests).
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
        if (
            self.planned is not None
            and getattr(self.cache.eviction, "variant", None) == "rlkv_tables"
        ):
            raise ValueError(
                "planned lengths do not go with variant=rlkv_tables, whose budget grows with the "
                "text"
            )

    def fingerprint(self) -> dict[str, Any]:
        """All settings that rows depend on."""
        policy = self.cache.eviction
        left_out = ("rank", "ranks", "batch_size", *(["planned"] if self.planned is None else []))
        compared = {name: value for name, value in asdict(self).items() if name not in left_out}
        cache = asdict(self.cache) | {"eviction": policy.describe() if policy else None}
        if (
            not self.cache.protect_prompt
        ):  # rows that were measured before there was the setting stay valid
            del cache["protect_prompt"]
        return compared | {"cache": cache}


def render_problems(
    task: EvalTask, problems: Iterable[EvalProblem], tokenizer: PreTrainedTokenizerBase
) -> list[Problem]:
    """``problems`` of ``task`` as the model reads them."""

    def render(problem: EvalProblem) -> Problem:
        prompt = render_prompt(tokenizer, problem.prompt, "plain")
        opened = THINKING if prompt.rstrip().endswith(THINKING) else ""  # by the chat template
        grade = partial(_grade, task, problem, opened)
        return Problem(problem.id, prompt, grade, f"{problem.answer}{problem.meta}")

    return [render(problem) for problem in problems]


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
    earlier: Iterable[Path] = (),
) -> list[Row]:
    """Decode and grade what ``rows_file`` does not hold yet.

    Args:
        facts: what else the rows depend on besides settings, problems, prompts, model and versions.
        on_rows: called with units done, units in all, and the accuracy so far, of this process; on
            another thread.
        earlier: files of the same run with another number of processes, whose rows are taken over.

    Returns:
        Rows in the order of problems and samples, with the fields key, sample, text, token_ids,
        finish_reason, correct, repetitive, kv_bytes and kv_bytes_full (at the end of that text
        alone), and seconds (each moment is divided equally among the rows that are decoded); see
        docs/evaluate.md.

    Raises:
        ValueError: if one of the files was written with other settings; the differences are named.
        StoreInUseError: if another process is writing one of them.
    """
    cache = settings.cache
    engine = InferenceEngine(
        model,
        tokenizer,
        allocation,
        cache.sink,
        cache.window,
        cache.prefill,
        settings.batch_size,
        cache.eviction,
        protect_prompt=cache.protect_prompt,
    )
    run = _Run(engine, problems, settings)
    compared = run.fingerprint(facts)
    found = [row for file in earlier for row in read_store(file, KEY, compared)]
    recorded = {"commit": commit(), "batch_size": settings.batch_size}
    with open_store(rows_file, compared, KEY, recorded) as store:
        kept = {(row["key"], row["sample"]): row for row in [*found, *store.rows]}
        done = {key: kept[key] for key in map(run.key, run.units) if key in kept}
        right = sum(row["correct"] for row in done.values())
        on_rows(len(done), len(run.units), right / max(1, len(done)))

        def write(make_row: Callable[[], Row]) -> None:
            nonlocal right
            row = make_row()
            store.append(row)
            done[row["key"], row["sample"]] = row
            right += row["correct"]
            on_rows(len(done), len(run.units), right / len(done))

        missing = [unit for unit in run.units if run.key(unit) not in done]
        with Background(max(UNGRADED, 2 * settings.batch_size)) as background:
            for unit, completion in run.decode(missing):
                background.submit(partial(write, partial(run.row, unit, completion)))
    return [done[run.key(unit)] for unit in run.units]


class _Run:
    """The share of the units that this process decodes."""

    def __init__(
        self, engine: InferenceEngine, problems: list[Problem], settings: RunSettings
    ) -> None:
        self.engine, self.problems, self.settings = engine, problems, settings
        self.lengths = engine.prompt_lengths([problem.prompt for problem in problems])
        self.size = EntrySize.of(engine.model)
        units = list(product(range(len(problems)), range(settings.num_samples)))
        self.units = units[settings.rank :: settings.ranks]

    def key(self, unit: Unit) -> tuple[str, int]:
        return self.problems[unit[0]].key, unit[1]

    def fingerprint(self, facts: dict[str, Any]) -> dict[str, Any]:
        """``facts``, and all else that rows depend on."""
        prompts = [problem.prompt for problem in self.problems]
        own = self.settings.fingerprint() | {
            "full_heads": self.engine.allocation.full.int().flatten().tolist(),
            "problems": digest_of(
                [[problem.key, problem.prompt, problem.reference] for problem in self.problems]
            ),
            "prompt_tokens": digest_of(
                self.engine.tokenizer(prompts, add_special_tokens=False).input_ids
            ),
            "end_tokens": self.engine.eos_ids,
            "model_state": model_facts(self.engine.model),
            "libraries": library_facts(),
        }
        assert not own.keys() & facts.keys()
        return own | facts

    def decode(self, units: list[Unit]) -> Iterator[tuple[Unit, Completion]]:
        """The units with their texts, as these end."""
        settings, engine = self.settings, self.engine
        stream = engine.stream(
            [self.problems[problem].prompt for problem, _ in units],
            settings.sampling,
            [problem * settings.num_samples + sample for problem, sample in units],
            settings.rule if settings.stop_repetitive else None,
            full=bool(engine.allocation.full.all()),
            planned=None
            if settings.planned is None
            else [settings.planned[problem] for problem, _ in units],
        )
        with closing(stream):
            for place, completion in stream:
                yield units[place], completion

    def row(self, unit: Unit, completion: Completion) -> Row:
        """The line of the file."""
        key, sample = self.key(unit)
        prompt = torch.tensor([self.lengths[unit[0]]])
        tokens = prompt + len(completion.token_ids) - 1  # the last token is never fed
        settings, full = self.settings, self.engine.allocation.full
        # a text that ends by itself is not checked at its end token
        checked = (
            completion.token_ids[:-1]
            if completion.finish_reason == "stop"
            else completion.token_ids
        )
        planned = None if settings.planned is None else torch.tensor([settings.planned[unit[0]]])
        held, whole = kv_nbytes(settings.cache, full, self.size, prompt, tokens, planned)
        return {
            "key": key,
            "sample": sample,
            "correct": self.problems[unit[0]].grade(completion.text),
            "finish_reason": completion.finish_reason,
            "repetitive": settings.rule(checked),
            "kv_bytes": int(held),
            "kv_bytes_full": int(whole),
            "seconds": round(completion.seconds, 4),
            "text": completion.text,
            "token_ids": completion.token_ids,
        }


def digest_of(value: Any) -> str:
    """A digest of ``value`` as JSON, whatever the order of its keys."""
    return digest(json.dumps(value, sort_keys=True, default=str).encode())


def model_facts(model: PreTrainedModel) -> dict[str, Any]:
    """Config, kind of device, number type and a hash over up to 1,024 evenly spaced elements of
    each parameter.

    Another training, merge or quantization is seen, a change of single elements may not be.
    """
    config = {
        name: value for name, value in model.config.to_dict().items() if not name.startswith("_")
    }
    config.pop("transformers_version", None)
    weights = bytearray()
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().flatten()
        places = torch.linspace(
            0, flat.numel() - 1, min(SAMPLED, flat.numel()), dtype=torch.float64
        ).long()
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
    """Versions of this package and of the libraries that decode and grade.

    Absent ones are left out.
    """
    found = {"rlkv": __version__}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
