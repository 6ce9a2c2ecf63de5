"""The job behind ``rlkv-filter``: decode problems, verify the outputs, sample by their length."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from rlkv.data.curriculum import (
    CURRICULUM,
    PAPER_BUCKETS,
    SMOL_BUCKETS,
    TINY_BUCKETS,
    Bucket,
    curriculum_folder,
    notes,
    parse_buckets,
    select,
    write_curriculum,
)
from rlkv.data.problems import HUB_DATASET, Problem, load_problems, recorded_outputs
from rlkv.inference.options import ModelOptions, check_least
from rlkv.models.builtin import SMOL, TINY
from rlkv.models.loading import dtype_name, files_digest, load_tokenizer, resolve_device
from rlkv.models.prompts import choose_template, render_prompt
from rlkv.rollout.base import RolloutEngine, SamplingParams
from rlkv.rollout.footprint import (
    DEFAULT_KV_GIB,
    GIB,
    MEAN_LENGTH,
    NAMES,
    Footprint,
    card_of,
    free_memory,
    rough,
)
from rlkv.smol import MAX_NEW_TOKENS
from rlkv.utils.files import at_home, write_json, write_text
from rlkv.utils.progress import progress_bar
from rlkv.utils.runtime import digest, hardware_line, library_facts, provenance
from rlkv.utils.store import Row, check_results, iter_shards, open_store, shard_file
from rlkv.verifier import Verifier, extract_answer, reference_answer
from rlkv.verifier.extraction import opening
from rlkv.vllm.plugin import (
    check_version,
    check_vllm_options,
    choose_engine,
    installed_version,
)

# every loaded problem ends in exactly one of these
STATUSES = {
    "correct": "solved",
    "wrong": "another answer than the right one",
    "truncated": "output cut at the token limit",
    "unparsable": "output without an answer",
    "skipped": "prompt too long for the model",
    "missing": "no recorded output",
    "no_answer": "problem without a right answer",
}
SHARD = "shard"
KEY = ("index",)
REPORT = "report.json"
DEFAULT_BATCH = 16  # problems decoded together, where no GPU says what fits

# arXiv 2510.08525: max length 8192, of it 7168 for the completion
PAPER: dict[str, Any] = {
    "input": HUB_DATASET,
    "max_length": 8192,
    "max_new_tokens": 7168,
    "template": "rlkv",
    "buckets": PAPER_BUCKETS,
}
BUILT_IN: dict[str, dict[str, Any]] = {
    TINY: {
        "input": TINY,
        "max_length": 1024,
        "max_new_tokens": 440,
        "template": "rlkv",
        "buckets": TINY_BUCKETS,
    },
    SMOL: {
        "input": SMOL,
        "max_length": 1024,
        "max_new_tokens": MAX_NEW_TOKENS,
        "template": "plain",
        "buckets": SMOL_BUCKETS,
    },
}


@dataclass(frozen=True, kw_only=True)
class FilterConfig(ModelOptions):
    """One filter job: which problems, how they are decoded, and what is chosen of them."""

    model: str = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
    """hub id, local folder or GGUF file, or tiny or smol (built in)"""
    input: str | None = None
    """.jsonl or .parquet file, hub data set, tiny or smol (new problems); default: the model's, or
    DeepScaleR
    """
    num_problems: int | None = None
    """how many problems --input tiny and smol draw; default: 400"""
    limit: int | None = None
    """use only the first N problems"""
    seed: int = 0
    """seed of the sampling, and of --input tiny and smol"""
    template: str | None = None
    """prompt template: rlkv, boxed or plain; default: plain for the model smol, none for --outputs,
    else rlkv
    """
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
        """Raise ``ValueError`` for values that no job can have."""
        check_least(self, 1, "num_problems", "batch_size", "max_new_tokens", "limit", "max_length")
        check_vllm_options(self.engine, self.device, self.kv_gib)
        if self.outputs is None and self.outputs_field != FilterConfig.outputs_field:
            raise ValueError("--outputs-field is a field of --outputs, which is missing: pass both")
        if self.engine == "vllm":
            check_version()
        if self.buckets:
            parse_buckets(",".join(self.buckets))
        if self.template is not None:
            choose_template(self.template, model=self.model)
        parse_shard(self.shard)

    def of_process(self, rank: int, processes: int) -> FilterConfig:
        """Return the part of the shard that one of several processes does."""
        shard, count = parse_shard(self.shard)
        return replace(self, shard=f"{shard + count * rank}/{count * processes}")

    def resolved(self) -> FilterConfig:
        """Return the options with the model's defaults for those that were not given."""
        defaults = dict(BUILT_IN.get(self.model, PAPER))
        if self.outputs is not None:
            defaults["input"] = self.outputs  # recorded outputs that carry their answers
            del defaults["template"]  # nobody says what their prompts were
        defaults["output_dir"] = str(curriculum_folder(self.model))
        missing = {}
        for name, value in defaults.items():
            if getattr(self, name) in (None, ()):
                missing[name] = value
        resolved = replace(self, **missing)
        if resolved.engine == "auto":
            resolved = replace(resolved, engine=resolved.automatic_engine()[0])
        return resolved

    def automatic_engine(self) -> tuple[Literal["hf", "vllm"], str]:
        """Return the engine that ``auto`` stands for, and why it is not vLLM."""
        if self.model in BUILT_IN or self.device != "auto":
            return "hf", ""
        free = free_memory(resolve_device())
        engine, why = choose_engine("auto", has_gpu=free is not None)
        if engine == "hf":
            return "hf", why
        if free is not None and self.kv_gib is None:
            footprint = Footprint.of(self.model, self.dtype)
            assert self.max_length is not None
            if footprint and (lack := footprint.lacking(footprint.kv_room(free), self.max_length)):
                return "hf", f"the GPU is too small for vLLM by about {lack:.1f} GiB"
        return "vllm", ""

    def load_engine(self) -> RolloutEngine:
        """Load the model in its engine; the options must be sized (:func:`sized_and_announced`)."""
        assert self.batch_size is not None
        assert self.kv_gib is not None
        assert self.max_length is not None
        if self.engine == "vllm":
            from rlkv.vllm.engine import VLLMEngine

            return VLLMEngine(
                self.model, None, self.dtype, self.max_length, self.kv_gib, self.batch_size
            )
        from rlkv.rollout.hf import HFEngine

        return HFEngine(*self.load(), batch_size=self.batch_size)


def parse_shard(text: str) -> tuple[int, int]:
    """Return the shard, counted from 0, and the number of shards that ``i/n`` names.

    Raises:
        ValueError: for another form, or i not below n.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if not match or not int(match[1]) < int(match[2]):
        raise ValueError(
            f"shard {text!r} is not of the form i/n with i from 0 to n-1, for instance 0/4, 1/4, "
            "2/4, 3/4"
        )
    return int(match[1]), int(match[2])


def sized_and_announced(config: FilterConfig, count: int) -> FilterConfig:
    """Return ``config`` with a batch and a cache that fit the GPU, where none were given.

    Prints one line with the engine and an estimate of the time for ``count`` problems.

    Raises:
        ValueError: if the GPU is too small for vLLM.
    """
    assert config.max_length is not None
    assert config.max_new_tokens is not None
    why = config.automatic_engine()[1] if config.engine == "hf" else ""
    kv_gib = config.kv_gib
    rows = config.batch_size
    device = resolve_device(config.device)
    footprint = None
    if config.model not in BUILT_IN:
        footprint = Footprint.of(config.model, config.dtype, config.device)
    free = free_memory(device)
    if footprint is not None and free is not None:
        room = footprint.kv_room(free)
        if config.engine == "vllm":
            kv_gib = kv_gib or footprint.vllm_kv_gib(free, config.max_length)
            room = int(kv_gib * GIB)
        rows = rows or footprint.rows(config.engine, room, config.max_length)
    rows = rows or DEFAULT_BATCH
    line = f"{count:,} problems through {NAMES[config.engine]}{why and f' ({why})'}, {rows} at once"
    if footprint is not None:
        card = card_of(device)
        tokens = MEAN_LENGTH * config.max_new_tokens
        rate = footprint.rate(config.engine, rows, card, tokens)
        line += (
            f": about {rough(count * tokens / rate)} on {'this CPU' if card is None else 'a GPU'}, "
            f"if it makes {rate:,.0f} tokens/s and a problem takes {tokens:,.0f} tokens (assumed; "
            "the bar shows the measured pace)"
        )
    print(line, flush=True)
    return replace(config, kv_gib=kv_gib or DEFAULT_KV_GIB, batch_size=rows)


# --- outputs: a row per problem, with an empty status where the verifier decides


def open_outputs(
    config: FilterConfig, problems: list[Problem], indices: list[int]
) -> Iterator[Row]:
    """Load the model, or the recorded outputs, and return the rows of ``indices`` as they come.

    Raises:
        ValueError: if the model or the outputs cannot be loaded, or leave no room for a prompt.
    """
    assert config.max_length is not None
    assert config.max_new_tokens is not None
    if config.outputs is not None:
        texts = recorded_outputs(config.outputs, config.outputs_field, problems)
        tokenizer = load_tokenizer(config.model)
        return read_outputs(texts, indices, tokenizer, config.max_new_tokens)
    engine = sized_and_announced(config, len(indices)).load_engine()
    limit = min(config.max_length, engine.max_positions)
    if config.max_new_tokens >= limit:
        raise ValueError(
            f"max_new_tokens {config.max_new_tokens} leaves no room for a prompt in {limit} tokens "
            f"(the lesser of max_length {config.max_length} and the model's "
            f"{engine.max_positions} positions): lower --max-new-tokens"
        )
    assert config.template is not None
    prompts = {}
    for index in indices:
        problem = problems[index].problem
        prompts[index] = render_prompt(engine.tokenizer, problem, config.template)
    return decode_outputs(engine, prompts, limit - config.max_new_tokens, config.max_new_tokens)


def decode_outputs(
    engine: RolloutEngine, prompts: dict[int, str], room: int, max_new_tokens: int
) -> Iterator[Row]:
    """Decode greedily, in the order in which texts end; prompts of over ``room`` are skipped."""
    fitting = []
    lengths = engine.prompt_lengths(list(prompts.values()))
    for index, length in zip(prompts, lengths, strict=True):
        if length <= room:
            fitting.append(index)
        else:
            yield {"index": index, "status": "skipped"}
    stream = engine.stream([prompts[index] for index in fitting], SamplingParams(max_new_tokens))
    for i, completion in stream:
        ids = completion.token_ids
        ended = completion.finish_reason == "stop"
        mark = opening(prompts[fitting[i]])
        yield {
            **({"opened": mark} if mark else {}),
            "index": fitting[i],
            "status": "truncated" if completion.finish_reason == "length" else "",
            # special tokens inside it (gpt-oss's channels) too: finders read the text again
            "output": engine.tokenizer.decode(ids[:-1] if ended else ids),
            "output_tokens": len(ids),
        }


def read_outputs(
    texts: dict[int, str], indices: list[int], tokenizer: Any, max_new_tokens: int
) -> Iterator[Row]:
    """Yield recorded outputs; those of more than ``max_new_tokens`` tokens count as truncated."""
    for index in indices:
        if index not in texts:
            yield {"index": index, "status": "missing"}
            continue
        ids = tokenizer(texts[index], add_special_tokens=False).input_ids
        tokens = len(ids) + 1  # a recorded text lacks the end token
        yield {
            "index": index,
            "status": "truncated" if tokens > max_new_tokens else "",
            "output": texts[index],
            "output_tokens": tokens,
        }


def judge(rows: list[Row], problems: list[Problem], verifier: Verifier) -> None:
    """Set the status of the rows that have none, and drop the marks of thoughts they opened."""
    undecided = []
    texts = []
    for row in rows:
        mark = row.pop("opened", "")
        if not row["status"]:
            undecided.append(row)
            texts.append(mark + row["output"])
    answers = [problems[row["index"]].answer for row in undecided]
    verdicts = verifier.are_correct(zip(texts, answers, strict=True))
    for row, text, is_correct in zip(undecided, texts, verdicts, strict=True):
        if is_correct:
            row["status"] = "correct"
        else:
            row["status"] = "wrong" if extract_answer(text) else "unparsable"


# --- the job


@dataclass(frozen=True)
class FilterResult:
    """Report of a run, or what is still open.

    Attributes:
        report: None until all shards are complete.
        open_shards: shard -> problems that are not done yet.
    """

    report: dict[str, Any] | None
    open_shards: dict[int, int]


def job_settings(config: FilterConfig, problems: list[Problem]) -> dict[str, Any]:
    """Return what must not change between a run and its resumption.

    Buckets, their seed and the number of shards may.
    """
    content = "".join(json.dumps([p.problem, p.answer]) for p in problems)
    settings: dict[str, Any] = {
        "model": config.model,
        "max_new_tokens": config.max_new_tokens,
        "problems": f"{len(problems)} with hash {digest(content.encode())}",
    }
    if config.outputs is None:
        if files := files_digest(config.model):
            settings["model_files"] = files
        settings["engine"] = config.engine
        if config.engine == "vllm":
            settings["engine"] += f" {installed_version()}"
        settings["template"] = config.template
        settings["max_length"] = config.max_length
        settings["dtype"] = dtype_name(config.dtype, resolve_device(config.device))
    else:
        path = at_home(config.outputs)
        settings["outputs"] = digest(path.read_bytes()) if path.is_file() else config.outputs
        settings["outputs_field"] = config.outputs_field
    return settings | {"libraries": library_facts()}


def run_filter(config: FilterConfig) -> FilterResult:
    """Do this process's shard, then, if all shards are complete, write curriculum and report.

    Raises:
        ValueError: for impossible settings, problems or a model that cannot be loaded, or a shard
            that was started with other settings, is damaged or in use.
    """
    started = time.monotonic()
    config = config.resolved()
    buckets = parse_buckets(",".join(config.buckets))
    assert config.input is not None
    assert config.output_dir is not None
    folder = Path(config.output_dir)
    check_results(folder, REPORT, ("report.md", *CURRICULUM), ("selected", "buckets"))
    problems = load_problems(config.input, config.num_problems, config.seed, config.limit)
    _, count = parse_shard(config.shard)
    if count > len(problems):
        raise ValueError(
            f"shard {config.shard}: there are only {len(problems)} problems to share out"
        )
    settings = job_settings(config, problems)
    run_shard(config, problems, settings)
    # of the paper's 40,000 problems all outputs together have about 1 GB
    found = iter_shards(folder / "shards", SHARD, KEY, settings)
    rows = {row["index"]: row for row in found}
    open_shards = Counter(index % count for index in range(len(problems)) if index not in rows)
    if open_shards:
        return FilterResult(None, dict(sorted(open_shards.items())))
    report, curriculum = summarize(config, buckets, problems, rows)
    report["seconds"] = round(time.monotonic() - started, 3)  # of the run that finished the job
    report |= provenance()
    page = markdown(report)
    write_json(folder / REPORT, report)  # first: by it the other files are known to be ours
    write_curriculum(folder, curriculum)
    write_text(folder / "report.md", page)
    return FilterResult(report, {})


def run_shard(config: FilterConfig, problems: list[Problem], settings: dict[str, Any]) -> None:
    """Finish the problems of the shard that no run has finished; rows go to the disk in batches."""
    assert config.output_dir is not None
    folder = Path(config.output_dir) / "shards"
    done = {row["index"]: row["status"] for row in iter_shards(folder, SHARD, KEY, settings)}
    shard, count = parse_shard(config.shard)
    own = range(shard, len(problems), count)
    answerable = []
    unanswerable: list[Row] = []
    for index in own:
        if index in done:
            continue
        if reference_answer(problems[index].answer):
            answerable.append(index)
        else:
            unanswerable.append({"index": index, "status": "no_answer"})
    if not answerable and not unanswerable:
        return
    outputs = chain(unanswerable, open_outputs(config, problems, answerable))
    file = shard_file(folder, SHARD, shard, count)
    title = "filter" if count == 1 else f"filter, shard {config.shard}"
    with (
        open_store(file, settings, KEY) as store,
        progress_bar(title, "problems", len(own)) as bar,
        closing(Verifier()) as verifier,
    ):
        bar.resume(Counter(done[index] for index in own if index in done))
        while rows := list(islice(outputs, config.batch_size or DEFAULT_BATCH)):
            # another process may have finished the shard while this one loaded the model
            rows = [row for row in rows if row["index"] not in store.done]
            judge(rows, problems, verifier)
            store.append(*rows)
            bar.advance(Counter(row["status"] for row in rows))


# --- the curriculum


def summarize(
    config: FilterConfig,
    buckets: tuple[Bucket, ...],
    problems: list[Problem],
    rows: dict[int, Row],
) -> tuple[dict[str, Any], list[Row]]:
    """Sample the buckets from the rows of all problems; returns the report and the curriculum."""
    status = {index: rows[index]["status"] for index in sorted(rows)}
    solved = {index: rows[index]["output_tokens"] for index in status if status[index] == "correct"}
    chosen, fills = select(solved, buckets, config.seed, config.fill_short_buckets)
    curriculum = []
    for index, bucket in chosen.items():
        row = {
            "problem": problems[index].problem,
            "answer": problems[index].answer,
            "output": rows[index]["output"],
            "output_tokens": rows[index]["output_tokens"],
            "bucket": bucket,
            "template": config.template,
            # nobody says what recorded outputs come from
            "model": config.model if config.outputs is None else None,
        }
        curriculum.append(row)
    counted = Counter(status.values())
    report = {
        "loaded": len(status),
        **{name: counted[name] for name in STATUSES},
        "outside_buckets": len(solved) - sum(fill["available"] for fill in fills),
        "selected": len(curriculum),
        "buckets": fills,
    }
    wrong = [problems[index].answer for index in status if status[index] == "wrong"]
    found = notes(report, wrong)
    if config.template is None:
        found.append(
            "The curriculum names no prompt template: training puts problems into that of the "
            "model, for most the maths instruction 'rlkv', unless --template is passed here or "
            "there."
        )
    report["notes"] = found
    report["config"] = {**asdict(config), "buckets": ",".join(map(str, buckets))}
    return report, curriculum


def markdown(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = ["# Curriculum", "", *report["notes"]]
    if report["notes"]:
        lines.append("")
    lines += ["| | problems |", "|---|---|", f"| loaded | {report['loaded']} |"]
    for status, meaning in STATUSES.items():
        lines.append(f"| {status}: {meaning} | {report[status]} |")
    lines.append(f"| solved, outside all buckets | {report['outside_buckets']} |")
    lines.append(f"| selected | {report['selected']} |")
    lines.append("")
    lines.append("| output tokens | wanted | available | taken | filled from others |")
    lines.append("|---|---|---|---|---|")
    for bucket in report["buckets"]:
        lines.append(
            f"| {bucket['low']} < n <= {bucket['high']} | {bucket['wanted']} | "
            f"{bucket['available']} | {bucket['taken']} | {bucket['filled_from_others']} |"
        )
    config = ", ".join(f"{key} {value}" for key, value in report["config"].items())
    packages = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines += ["", f"Settings: {config}.", ""]
    lines.append(f"{packages}; {hardware_line()}; last run {report['seconds']:.1f} s.")
    return "\n".join(lines) + "\n"
