"""The whole filter job behind ``rlkv-filter``: load, decode and verify, merge, sample, write."""

from __future__ import annotations

import json
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlkv.data.curriculum import (
    PAPER_BUCKETS,
    SMOL_BUCKETS,
    TINY_BUCKETS,
    Bucket,
    Selection,
    curriculum_folder,
    parse_buckets,
    select,
)
from rlkv.data.problems import HUB_DATASET, Problem, load_problems, read_rows, text_field
from rlkv.inference.options import ModelOptions, check_positive
from rlkv.models.builtin import SMOL, TINY
from rlkv.models.loading import dtype_name, load_tokenizer, resolve_device
from rlkv.models.prompts import choose_template, render_prompt
from rlkv.rollout.base import RolloutEngine, SamplingParams
from rlkv.rollout.footprint import MEAN_LENGTH, NAMES, Footprint, card_of, rough
from rlkv.smol import MAX_NEW_TOKENS
from rlkv.utils.files import atomic_path, write_json, write_jsonl, write_text
from rlkv.utils.progress import ProgressBar, progress_bar
from rlkv.utils.runtime import digest, hardware_line, provenance, require
from rlkv.utils.store import Row, check_results, check_settings, iter_rows, open_store
from rlkv.verifier import Verifier, extract_answer, reference_answer
from rlkv.vllm.plugin import check_vllm_options, choose_engine

if TYPE_CHECKING:
    from rlkv.rollout.base import RolloutEngine
    from rlkv.rollout.footprint import Footprint

SKIPPED, MISSING = "skipped", "missing"


@dataclass(frozen=True)
class Output:
    """One output; ``truncated`` if it was cut at the token limit."""

    text: str
    tokens: int
    truncated: bool


class EngineDecoder:
    """Greedy decoding; problems whose prompt leaves no room for ``max_new_tokens`` are skipped."""

    def __init__(
        self, engine: RolloutEngine, template: str, max_new_tokens: int, max_length: int
    ) -> None:
        """``max_length`` bounds prompt and completion together, in addition to the model's own
        limit.
        """
        self.engine, self.template = engine, template
        self.sampling = SamplingParams(max_new_tokens)
        limit = min(max_length, engine.max_positions)
        self.max_prompt = limit - max_new_tokens
        if self.max_prompt < 1:
            raise ValueError(
                f"max_new_tokens {max_new_tokens} leaves no room for a prompt in {limit} tokens "
                "(the lesser of "
                f"max_length {max_length} and the model's {engine.max_positions} positions): lower "
                "--max-new-tokens"
            )

    def stream(self, problems: list[tuple[int, Problem]]) -> Iterator[tuple[int, Output | str]]:
        prompts = [
            render_prompt(self.engine.tokenizer, problem.problem, self.template)
            for _, problem in problems
        ]
        fitting = []
        for row, length in enumerate(self.engine.prompt_lengths(prompts)):
            if length <= self.max_prompt:
                fitting.append(row)
            else:
                yield problems[row][0], SKIPPED
        for i, completion in self.engine.stream([prompts[row] for row in fitting], self.sampling):
            output = Output(
                completion.text, len(completion.token_ids), completion.finish_reason == "length"
            )
            yield problems[fitting[i]][0], output


class RecordedDecoder:
    """Outputs that were decoded elsewhere, looked up by the text of the problem.

    Where a problem occurs several times, its first occurrence gets the first recorded output, and
    so on. Tokens are counted with ``tokenizer``, plus one for the end token that a recorded text
    lacks; an output of more than ``max_new_tokens`` counts as truncated.
    """

    def __init__(
        self, path: str, field: str, problems: list[Problem], tokenizer: Any, max_new_tokens: int
    ) -> None:
        """``problems``: all problems of the input.

        ``ValueError`` if no output of the file belongs to any of them.
        """
        self.tokenizer, self.max_new_tokens = tokenizer, max_new_tokens
        recorded: dict[str, deque[str]] = defaultdict(deque)
        for where, row in read_rows(path):
            recorded[text_field(row, "problem", where)].append(text_field(row, field, where))
        self.texts = {
            i: recorded[p.problem].popleft() for i, p in enumerate(problems) if recorded[p.problem]
        }
        if not self.texts:
            raise ValueError(
                f"no recorded output in {path} belongs to a problem of the input: the problem "
                "texts differ"
            )

    def stream(self, problems: list[tuple[int, Problem]]) -> Iterator[tuple[int, Output | str]]:
        for index, _ in problems:
            text = self.texts.get(index)
            if text is None:
                yield index, MISSING
                continue
            tokens = len(self.tokenizer(text, add_special_tokens=False).input_ids) + 1
            yield index, Output(text, tokens, tokens > self.max_new_tokens)


Decoder = EngineDecoder | RecordedDecoder

Preset = dict[str, Any]
DEFAULT_BATCH = 16  # problems decoded together, where no GPU says what fits


def _preset(
    input: str, max_length: int, max_new_tokens: int, template: str, buckets: tuple[Bucket, ...]
) -> Preset:
    sizes = {"max_length": max_length, "max_new_tokens": max_new_tokens}
    return {"input": input, **sizes, "template": template, "buckets": tuple(map(str, buckets))}


# arXiv 2510.08525: max length 8192, of it 7168 for the completion
PAPER = _preset(HUB_DATASET, 8192, 7168, "rlkv", PAPER_BUCKETS)
BUILT_IN = {
    TINY: _preset(TINY, 1024, 440, "rlkv", TINY_BUCKETS),
    SMOL: _preset(SMOL, 1024, MAX_NEW_TOKENS, "plain", SMOL_BUCKETS),
}


@dataclass(frozen=True, kw_only=True)
class FilterConfig(ModelOptions):
    """One filter job: which problems, how they are decoded, and what is chosen of them."""

    model: str = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
    """hub id, local folder, or tiny or smol (built in)"""
    input: str | None = None
    """.jsonl or .parquet file, hub data set, tiny or smol (new problems); default: the model's, or
    DeepScaleR
    """
    num_problems: int = 400
    """how many problems --input tiny and smol draw"""
    limit: int | None = None
    """use only the first N problems"""
    seed: int = 0
    """seed of the sampling, and of --input tiny and smol"""
    template: str | None = None
    """prompt template: rlkv, boxed or plain; default: plain for the model smol, else rlkv"""
    engine: Literal["auto", "hf", "vllm"] = "auto"
    """what decodes: transformers (hf) or vLLM; auto: vLLM where it is installed, transformers for
    built-in models
    """
    batch_size: int | None = None
    """problems decoded together; default: what the GPU holds, without one 16"""
    kv_gib: float | None = None
    """vllm: memory of its KV cache in GiB; default: what the GPU has left, without one 4"""
    max_new_tokens: int | None = None
    """tokens of a completion; default: 440 for the model tiny, 448 for smol, else 7168"""
    outputs: str | None = None
    """file of recorded outputs (problem + output) to filter; nothing is decoded"""
    outputs_field: str = "output"
    """field of --outputs that holds the output, e.g. solution"""
    output_dir: str | None = None
    """where shards, curriculum and report go; default: results/curriculum_MODEL"""
    buckets: tuple[str, ...] = ()
    """output tokens LOW-HIGH:COUNT (above LOW, at most HIGH), several with commas or spaces.

    Default: the paper's
    """
    fill_short_buckets: bool = False
    """fill short buckets from what others have left over"""
    max_length: int | None = None
    """tokens of prompt and completion together; default: 1024 for the models tiny and smol, else
    8192
    """
    shard: str = "0/1"
    """i/n: do every n-th problem, from the i-th (counted from 0).

    The processes of a launcher divide a shard further
    """

    def check(self) -> None:
        check_positive(self, "num_problems", "batch_size", "max_new_tokens", "limit", "max_length")
        check_vllm_options(self.engine, self.device, self.kv_gib)
        if self.engine == "vllm" and find_spec("vllm") is None:
            raise ValueError(
                "engine 'vllm' comes with the extra rlkv[vllm], which is not installed: use "
                "--engine hf"
            )
        if self.buckets:
            parse_buckets(",".join(self.buckets))
        parse_shard(self.shard)

    def of_process(self, rank: int, processes: int) -> FilterConfig:
        """The part of the shard that one of several processes does."""
        shard, count = parse_shard(self.shard)
        return replace(self, shard=f"{shard + count * rank}/{count * processes}")

    def resolved(self) -> FilterConfig:
        """With the model's default for everything that was not given."""
        preset = dict(BUILT_IN.get(self.model, PAPER))
        if self.outputs is not None:
            preset["input"] = self.outputs  # recorded outputs that carry their answers
        preset["output_dir"] = str(curriculum_folder(self.model))
        chosen = {
            name: value for name, value in preset.items() if getattr(self, name) in (None, ())
        }
        resolved = replace(self, **chosen)
        assert resolved.max_length is not None
        return replace(resolved, engine=resolved.chosen_engine(resolved.max_length)[0])

    def chosen_engine(self, positions: int) -> tuple[Literal["hf", "vllm"], str]:
        """The engine that ``auto`` stands for, for texts of ``positions`` tokens, and why it is not
        vLLM.
        """
        if self.engine != "auto":
            return self.engine, ""
        if self.model in BUILT_IN or self.device != "auto":
            return "hf", ""
        from rlkv.models.loading import resolve_device
        from rlkv.rollout.footprint import Footprint, free_memory

        free = free_memory(resolve_device())
        engine, why = choose_engine("auto", has_gpu=free is not None)
        if engine == "hf":
            return "hf", why
        footprint = (
            None
            if free is None or self.kv_gib is not None
            else Footprint.of(self.model, self.dtype)
        )
        lacking = (
            0.0
            if footprint is None or free is None
            else footprint.lacking(footprint.kv_room(free), positions)
        )
        return (
            ("hf", f"the GPU is too small for vLLM by about {lacking:.1f} GiB")
            if lacking
            else ("vllm", "")
        )

    def sized(self, footprint: Footprint | None, positions: int) -> FilterConfig:
        """With rows of ``positions`` tokens and memory that fit the GPU, where none were given.

        Of a chosen engine.

        Raises:
            ValueError: if the GPU is too small for vLLM.
        """
        from rlkv.models.loading import resolve_device
        from rlkv.rollout.footprint import DEFAULT_KV_GIB, GIB, free_memory

        free, kv_gib, rows = free_memory(resolve_device(self.device)), self.kv_gib, self.batch_size
        if footprint is not None and free is not None:
            room = footprint.kv_room(free)
            if self.engine == "vllm":
                kv_gib = kv_gib or footprint.vllm_kv_gib(free, positions)
                room = int(kv_gib * GIB)
            rows = rows or footprint.rows(self.engine, room, positions)
        return replace(self, kv_gib=kv_gib or DEFAULT_KV_GIB, batch_size=rows or DEFAULT_BATCH)

    def load_engine(self, positions: int) -> RolloutEngine:
        """The model in its engine, for texts of up to ``positions`` tokens; of sized options."""
        assert self.batch_size is not None
        assert self.kv_gib is not None
        if self.engine == "vllm":
            from rlkv.vllm.engine import VLLMEngine

            return VLLMEngine(self.model, None, self.dtype, positions, self.kv_gib, self.batch_size)
        from rlkv.rollout.hf import HFEngine

        return HFEngine(*self.load(), batch_size=self.batch_size)


def parse_shard(text: str) -> tuple[int, int]:
    """``(shard, number of shards)`` of ``i/n``, i counted from 0; ``ValueError`` for another form,
    or i not below n.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if not match or not int(match.group(1)) < int(match.group(2)):
        raise ValueError(
            f"shard {text!r} is not of the form i/n with i from 0 to n-1, for instance 0/4, 1/4, "
            "2/4, 3/4"
        )
    return int(match.group(1)), int(match.group(2))


CORRECT, WRONG, TRUNCATED, UNPARSABLE, NO_ANSWER = (
    "correct",
    "wrong",
    "truncated",
    "unparsable",
    "no_answer",
)
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
    """The result files of a job: shard i of ``count`` does every ``count``-th problem, from the
    i-th (from 0).

    Rows do not depend on the shard: a run with another ``count`` goes on from the files of all of
    them.  A row has the problem's index and status and, where there is an output, ``output`` and
    ``output_tokens``.
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
        """One row of each problem that was done, one in memory at a time.

        Other processes may be writing.

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
        found = {
            shard: sum(index not in done for index in self.indices(shard))
            for shard in range(self.count)
        }
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


def judge(
    outputs: list[tuple[int, Output]], problems: list[Problem], verifier: Verifier
) -> list[Row]:
    """One row per output; an output that was cut at the limit is not verified."""
    pairs = [
        (output.text, problems[index].answer) for index, output in outputs if not output.truncated
    ]
    verdicts = iter(verifier.are_correct(pairs))
    rows = []
    for index, output in outputs:
        if output.truncated:
            status = TRUNCATED
        elif next(verdicts):
            status = CORRECT
        else:
            status = WRONG if extract_answer(output.text) else UNPARSABLE
        rows.append(
            {
                "index": index,
                "status": status,
                "output": output.text,
                "output_tokens": output.tokens,
            }
        )
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


REPORT, CURRICULUM = "report.json", ("curriculum.jsonl", "curriculum.parquet")


def problems_digest(problems: list[Problem]) -> str:
    """A short hash of problems and answers in their order."""
    return digest("".join(json.dumps([p.problem, p.answer]) for p in problems).encode())


def job_settings(config: FilterConfig, problems: list[Problem]) -> dict[str, Any]:
    """What must not change between a run and its resumption.

    Buckets, their seed and the number of shards may.
    """
    names = ["model", "max_new_tokens"]
    names += ["engine", "template", "max_length"] if config.outputs is None else ["outputs_field"]
    settings = {name: getattr(config, name) for name in names}
    settings["problems"] = f"{len(problems)} with hash {problems_digest(problems)}"
    if config.outputs is None:
        settings["dtype"] = dtype_name(config.dtype, resolve_device(config.device))
    else:
        path = Path(config.outputs)
        settings["outputs"] = digest(path.read_bytes()) if path.is_file() else config.outputs
    return settings


def build_decoder(config: FilterConfig, problems: list[Problem]) -> Decoder:
    """The recorded outputs if there are any, else the model in its engine."""
    assert config.max_new_tokens is not None
    assert config.max_length is not None
    if config.outputs is not None:
        tokenizer = load_tokenizer(config.model)
        return RecordedDecoder(
            config.outputs, config.outputs_field, problems, tokenizer, config.max_new_tokens
        )
    template = choose_template(config.template, model=config.model)
    engine = config.load_engine(config.max_length)
    return EngineDecoder(engine, template, config.max_new_tokens, config.max_length)


def sized_and_announced(config: FilterConfig, count: int, positions: int) -> FilterConfig:
    """``config`` with sizes that fit the GPU, after one line with the engine and an estimate of the
    time.

    Args:
        positions: tokens of the longest prompt and its completion.
    """
    footprint = (
        None
        if config.model in BUILT_IN
        else Footprint.of(config.model, config.dtype, config.device)
    )
    why = (
        replace(config, engine="auto").chosen_engine(positions)[1] if config.engine == "hf" else ""
    )
    config = config.sized(footprint, positions)
    assert config.batch_size is not None
    line = (
        f"{count:,} problems through {NAMES[config.engine]}{why and f' ({why})'}, "
        f"{config.batch_size} at once"
    )
    if footprint is not None:
        card, mean = (
            card_of(resolve_device(config.device)),
            MEAN_LENGTH * (config.max_new_tokens or 0),
        )
        rate = footprint.rate(config.engine, config.batch_size, card, mean)
        line += (
            f": about {rough(count * mean / rate)} on {'this CPU' if card is None else 'a GPU'}, "
            "if it makes "
            f"{rate:,.0f} tokens/s and a problem takes {mean:,.0f} tokens (assumed; the bar shows "
            "the measured pace)"
        )
    print(line, flush=True)
    return config


@dataclass(frozen=True)
class FilterResult:
    """``report`` once all shards are complete; until then ``open_shards``: shard -> problems not
    yet done.
    """

    report: dict[str, Any] | None
    open_shards: dict[int, int]


def run_filter(config: FilterConfig) -> FilterResult:
    """Do this process's shard, then, if all shards are complete, write curriculum and report.

    Raises:
        ValueError: for impossible settings, and problems or a model that cannot be loaded.
    """
    config.check()
    config = config.resolved()
    assert config.input is not None
    assert config.output_dir is not None
    started = time.monotonic()
    check_results(
        Path(config.output_dir), REPORT, ("report.md", *CURRICULUM), ("selected", "buckets")
    )
    choose_template(
        config.template, model=config.model
    )  # an unknown one fails before anything is loaded
    problems = load_problems(config.input, config.num_problems, config.seed, config.limit)
    shard, num_shards = parse_shard(config.shard)
    if num_shards > len(problems):
        raise ValueError(
            f"shard {config.shard}: there are only {len(problems)} problems to share out"
        )
    shards = Shards(
        Path(config.output_dir), len(problems), num_shards, job_settings(config, problems)
    )
    still_open = shards.missing()
    if shard in still_open:
        if config.outputs is None:
            assert config.max_length is not None
            config = sized_and_announced(config, still_open[shard], config.max_length)
        decoder = build_decoder(config, problems)
        title = "filter" if num_shards == 1 else f"filter, shard {config.shard}"
        bar = progress_bar(title, "problems", len(shards.indices(shard)))
        with bar as progress, closing(Verifier()) as verifier:
            run_shard(
                shards,
                shard,
                problems,
                decoder,
                verifier,
                config.batch_size or DEFAULT_BATCH,
                progress,
            )
    still_open = shards.missing()
    return FilterResult(
        None if still_open else finish(config, shards, problems, started), still_open
    )


def finish(
    config: FilterConfig, shards: Shards, problems: list[Problem], started: float
) -> dict[str, Any]:
    """Merge the complete shards, sample the buckets, write the files; returns the report."""
    outcome, buckets = shards.outcome(), parse_buckets(",".join(config.buckets))
    selection = select(outcome.solved(), buckets, config.seed, config.fill_short_buckets)
    outputs = {
        row["index"]: row["output"] for row in shards.rows() if row["index"] in selection.chosen
    }
    rows = [
        {
            "problem": problems[i].problem,
            "answer": problems[i].answer,
            "output": outputs[i],
            "output_tokens": outcome.tokens[i],
            "bucket": bucket,
            "template": config.template,
            "model": config.model
            if config.outputs is None
            else None,  # nobody says what recorded outputs come from
        }
        for i, bucket in selection.chosen.items()
    ]
    report = {
        "loaded": len(outcome.status),
        **outcome.counts,
        "outside_buckets": selection.outside,
        "selected": len(rows),
        "buckets": [{**fill.pop("bucket"), **fill} for fill in map(asdict, selection.fills)],
        "notes": notes(outcome, selection, problems),
        "config": {**asdict(config), "buckets": ",".join(map(str, buckets))},
        "seconds": round(time.monotonic() - started, 3),  # of the run that finished the job
        **provenance(),
    }
    write_json(shards.folder / REPORT, report)  # first: by it the other files are known to be ours
    write_curriculum(shards.folder, rows)
    write_text(shards.folder / "report.md", markdown(report))
    return report


def write_curriculum(folder: Path, rows: list[Row]) -> None:
    """``curriculum.jsonl`` and ``curriculum.parquet``, with the same fields."""
    arrow, parquet = require("pyarrow", "train"), require("pyarrow.parquet", "train")
    as_lines, as_table = CURRICULUM
    write_jsonl(folder / as_lines, rows)
    text, count = arrow.string(), arrow.int64()
    names = ("problem", "answer", "output", "output_tokens", "bucket", "template", "model")
    fields = {name: count if name == "output_tokens" else text for name in names}
    with atomic_path(folder / as_table) as path:
        parquet.write_table(
            arrow.Table.from_pylist(rows, schema=arrow.schema(fields.items())), path
        )


def notes(outcome: Outcome, selection: Selection, problems: list[Problem]) -> list[str]:
    """What a reader must not miss: nothing solved, short buckets, outputs outside all buckets."""
    if not outcome.solved():
        loaded = len(outcome.status)
        found = [
            f"None of the {loaded} problems was solved: the curriculum is empty and there is "
            "nothing to train on."
        ]
        wrong = [index for index, status in outcome.status.items() if status == WRONG]
        if wrong:
            found.append(
                f"{len(wrong)} outputs give an answer and all are wrong: check that the field "
                "'answer' of the input "
                "holds the answer alone, or GSM8K's '... #### 72'; the first is "
                f"{problems[wrong[0]].answer[-80:]!r}."
            )
        return found
    found = []
    for fill in selection.fills:
        if fill.short > 0:
            line = (
                f"Bucket {fill.bucket.name} is short: {fill.bucket.wanted} wanted, {fill.taken} "
                "there, all taken"
            )
            filled = f"; {fill.filled_from_others} came from other buckets in their place"
            found.append(line + (filled if fill.filled_from_others else "") + ".")
    if selection.outside:
        found.append(
            f"{selection.outside} solved problems have an output length outside all buckets and "
            "were left out."
        )
    return found


def markdown(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = ["# Curriculum", "", *report["notes"], *([""] if report["notes"] else [])]
    lines += ["| | problems |", "|---|---|", f"| loaded | {report['loaded']} |"]
    lines += [f"| {status}: {meaning} | {report[status]} |" for status, meaning in STATUSES.items()]
    lines += [
        f"| solved, outside all buckets | {report['outside_buckets']} |",
        f"| selected | {report['selected']} |",
    ]
    lines += [
        "",
        "| output tokens | wanted | available | taken | filled from others |",
        "|---|---|---|---|---|",
    ]
    for b in report["buckets"]:
        cells = [
            f"{b['low']} < n <= {b['high']}",
            b["wanted"],
            b["available"],
            b["taken"],
            b["filled_from_others"],
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    config = ", ".join(f"{key} {value}" for key, value in report["config"].items())
    packages = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines += [
        "",
        f"Settings: {config}.",
        "",
        f"{packages}; {hardware_line()}; last run {report['seconds']:.1f} s.",
    ]
    return "\n".join(lines) + "\n"
