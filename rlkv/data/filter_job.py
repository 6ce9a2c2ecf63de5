"""The whole filter job behind ``rlkv-filter``: load, decode and verify, merge, sample, write."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlkv.data.curriculum import parse_buckets, select
from rlkv.data.decoders import Decoder, EngineDecoder, RecordedDecoder
from rlkv.data.deepscaler import Problem, load_problems
from rlkv.data.filter_config import FilterConfig, parse_shard
from rlkv.data.filter_report import build_report, write_curriculum, write_report
from rlkv.data.filtering import Shards, run_shard
from rlkv.inference.engines import load_engine
from rlkv.models.loading import load_tokenizer, resolve_device, resolve_dtype
from rlkv.models.prompts import fill_template
from rlkv.utils.progress import progress_bar
from rlkv.verifier.verifier import Verifier


def problems_digest(problems: list[Problem]) -> str:
    """A short hash of problems and answers in their order."""
    digest = hashlib.sha256()
    for p in problems:
        digest.update(json.dumps([p.problem, p.answer]).encode())
    return digest.hexdigest()[:16]


def job_settings(config: FilterConfig, problems: list[Problem], num_shards: int) -> dict[str, Any]:
    """What must not change between a run and its resumption; buckets and their seed may."""
    names = ["model", "max_new_tokens"]
    names += ["engine", "template", "max_length"] if config.outputs is None else ["outputs_field"]
    settings = {name: getattr(config, name) for name in names}
    settings |= {"problems": f"{len(problems)} with hash {problems_digest(problems)}", "num_shards": num_shards}
    if config.outputs is None:
        settings["dtype"] = str(resolve_dtype(config.dtype, resolve_device(config.device))).removeprefix("torch.")
    else:
        path = Path(config.outputs)
        settings["outputs"] = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else config.outputs
    return settings


def build_decoder(config: FilterConfig, problems: list[Problem]) -> Decoder:
    """The recorded outputs if there are any, else the model in its engine."""
    assert config.max_new_tokens is not None
    assert config.max_length is not None
    if config.outputs is not None:
        tokenizer = load_tokenizer(config.model)
        return RecordedDecoder(config.outputs, config.outputs_field, problems, tokenizer, config.max_new_tokens)
    engine = load_engine(config.engine, config.model, config.dtype, config.device, config.batch_size)
    return EngineDecoder(engine, config.template, config.max_new_tokens, config.max_length)


@dataclass(frozen=True)
class FilterResult:
    """``report`` once all shards are complete; until then ``open_shards``: shard -> problems not yet done."""

    report: dict[str, Any] | None
    open_shards: dict[int, int]


def run_filter(config: FilterConfig) -> FilterResult:
    """Do this process's shard, then, if all shards are complete, write curriculum and report.

    Raises:
        ValueError: for whatever the user can put right.
    """
    config.check()
    config = config.resolved()
    assert config.input is not None
    started = time.monotonic()
    fill_template("", config.template)  # an unknown template fails before anything is loaded
    problems = load_problems(config.input, config.num_problems, config.seed, config.limit)
    shard, num_shards = parse_shard(config.shard)
    if num_shards > len(problems):
        raise ValueError(f"shard {config.shard}: there are only {len(problems)} problems to share out")
    settings = job_settings(config, problems, num_shards)
    shards = Shards(Path(config.output_dir), len(problems), num_shards, settings)
    if shard in shards.missing():
        decoder = build_decoder(config, problems)
        title = "filter" if num_shards == 1 else f"filter, shard {config.shard}"
        bar = progress_bar(title, "problems", len(shards.indices(shard)))
        with bar as progress, closing(Verifier()) as verifier:
            run_shard(shards, shard, problems, decoder, verifier, config.batch_size, progress)
    still_open = shards.missing()
    return FilterResult(None if still_open else finish(config, shards, problems, started), still_open)


def finish(config: FilterConfig, shards: Shards, problems: list[Problem], started: float) -> dict[str, Any]:
    """Merge the complete shards, sample the buckets, write the files; returns the report."""
    outcome = shards.outcome()
    buckets = parse_buckets(",".join(config.buckets))
    selection = select(outcome.solved(), buckets, config.seed, config.fill_short_buckets)
    chosen = selection.chosen
    outputs = {row["index"]: row["output"] for row in shards.rows() if row["index"] in chosen}
    rows = [
        {
            "problem": problems[i].problem,
            "answer": problems[i].answer,
            "output": outputs[i],
            "output_tokens": outcome.tokens[i],
            "bucket": bucket,
        }
        for i, bucket in chosen.items()
    ]
    write_curriculum(shards.folder, rows)
    settings = {**asdict(config), "buckets": ",".join(map(str, buckets))}
    report = build_report(outcome, selection, settings, time.monotonic() - started)
    write_report(shards.folder, report)
    return report
