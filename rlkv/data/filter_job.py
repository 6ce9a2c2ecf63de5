"""The whole filter job behind ``data_prep/filter_deepscaler.py``: load, decode and verify, merge, sample, write."""

from __future__ import annotations

import hashlib
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkv.data.curriculum import select
from rlkv.data.decoders import Decoder, EngineDecoder, RecordedDecoder
from rlkv.data.deepscaler import Problem, load_problems
from rlkv.data.filter_config import FilterConfig
from rlkv.data.filter_report import build_report, write_curriculum, write_report
from rlkv.data.filtering import merge_shards, missing_shards, problems_digest, read_outputs, run_shard
from rlkv.data.shards import parse_shard
from rlkv.inference.engines import load_engine
from rlkv.models.loading import load_tokenizer, resolve_device, resolve_dtype
from rlkv.models.prompts import fill_template
from rlkv.utils.progress import progress_bar
from rlkv.verifier.verifier import Verifier


def job_settings(config: FilterConfig, problems: list[Problem], num_shards: int) -> dict[str, Any]:
    """What must not change between a run and its resumption; buckets and their seed may."""
    common = {
        "model": config.model,
        "problems": f"{len(problems)} with hash {problems_digest(problems)}",
        "max_new_tokens": config.max_new_tokens,
        "num_shards": num_shards,
    }
    if config.outputs is not None:
        path = Path(config.outputs)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else config.outputs
        return {**common, "outputs": digest, "outputs_field": config.outputs_field}
    dtype = str(resolve_dtype(config.dtype, resolve_device(config.device))).removeprefix("torch.")
    return {
        **common,
        "engine": config.engine,
        "dtype": dtype,
        "template": config.template,
        "max_length": config.max_length,
    }


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
    assert config.input is not None
    assert config.buckets is not None
    started = time.monotonic()
    fill_template("", config.template)  # an unknown template fails before anything is loaded
    problems = load_problems(config.input, config.num_problems, config.seed, config.limit)
    shard, num_shards = parse_shard(config.shard)
    if num_shards > len(problems):
        raise ValueError(f"shard {config.shard}: there are only {len(problems)} problems to share out")
    folder = Path(config.output_dir)
    settings = job_settings(config, problems, num_shards)
    still_open = dict(missing_shards(folder, len(problems), num_shards, settings))
    if shard in still_open:
        decoder = build_decoder(config, problems)
        total = len(range(shard, len(problems), num_shards))
        title = "filter" if num_shards == 1 else f"filter, shard {config.shard}"
        with progress_bar(title, "problems", total) as progress, closing(Verifier()) as verifier:
            run_shard(
                problems,
                decoder,
                verifier,
                folder,
                settings,
                shard,
                num_shards,
                config.batch_size,
                on_resume=progress.resume,
                on_batch=progress.advance,
            )
    still_open = dict(missing_shards(folder, len(problems), num_shards, settings))
    if still_open:
        return FilterResult(None, still_open)
    return FilterResult(finish(config, problems, num_shards, time.monotonic() - started), {})


def finish(config: FilterConfig, problems: list[Problem], num_shards: int, seconds: float) -> dict[str, Any]:
    """Merge the complete shards, sample the buckets, write the files; returns the report."""
    assert config.buckets is not None
    folder = Path(config.output_dir)
    outcome = merge_shards(folder, num_shards)
    selection = select(outcome.solved(), config.buckets, config.seed, config.fill_short_buckets)
    texts = read_outputs(folder, num_shards, set(selection.chosen))
    rows = [
        {
            "problem": problems[i].problem,
            "answer": problems[i].answer,
            "output": texts[i],
            "output_tokens": outcome.tokens[i],
            "bucket": bucket,
        }
        for i, bucket in selection.chosen.items()
    ]
    write_curriculum(folder, rows)
    report = build_report(outcome, selection, config.to_dict(), seconds)
    write_report(folder, report)
    return report
