"""The whole filter job behind ``rlkv-filter``: load, decode and verify, merge, sample, write."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlkv.data.curriculum import Selection, parse_buckets, select
from rlkv.data.decoders import Decoder, EngineDecoder, RecordedDecoder
from rlkv.data.deepscaler import Problem, load_problems
from rlkv.data.filter_config import BUILT_IN, DEFAULT_BATCH, FilterConfig, parse_shard
from rlkv.data.filtering import STATUSES, WRONG, Outcome, Shards, run_shard
from rlkv.models.loading import dtype_name, load_tokenizer, resolve_device
from rlkv.models.prompts import choose_template
from rlkv.rollout.cards import card_of
from rlkv.rollout.estimate import MEAN_LENGTH, NAMES, Footprint, rough
from rlkv.utils.atomic import atomic_path, write_json, write_text
from rlkv.utils.extras import require
from rlkv.utils.jsonl import write_jsonl
from rlkv.utils.progress import progress_bar
from rlkv.utils.provenance import digest, hardware_line, provenance
from rlkv.utils.store import Row, check_results
from rlkv.verifier.verifier import Verifier

REPORT, CURRICULUM = "report.json", ("curriculum.jsonl", "curriculum.parquet")


def problems_digest(problems: list[Problem]) -> str:
    """A short hash of problems and answers in their order."""
    return digest("".join(json.dumps([p.problem, p.answer]) for p in problems).encode())


def job_settings(config: FilterConfig, problems: list[Problem]) -> dict[str, Any]:
    """What must not change between a run and its resumption; buckets, their seed and the number of shards may."""
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
        return RecordedDecoder(config.outputs, config.outputs_field, problems, tokenizer, config.max_new_tokens)
    template = choose_template(config.template, model=config.model)
    engine = config.load_engine(config.max_length)
    return EngineDecoder(engine, template, config.max_new_tokens, config.max_length)


def sized_and_announced(config: FilterConfig, count: int, positions: int) -> FilterConfig:
    """``config`` with sizes that fit the GPU, after one line with the engine and an estimate of the time.

    Args:
        positions: tokens of the longest prompt and its completion.
    """
    footprint = None if config.model in BUILT_IN else Footprint.of(config.model, config.dtype, config.device)
    why = replace(config, engine="auto").chosen_engine(positions)[1] if config.engine == "hf" else ""
    config = config.sized(footprint, positions)
    assert config.batch_size is not None
    line = f"{count:,} problems through {NAMES[config.engine]}{why and f' ({why})'}, {config.batch_size} at once"
    if footprint is not None:
        card, mean = card_of(resolve_device(config.device)), MEAN_LENGTH * (config.max_new_tokens or 0)
        rate = footprint.rate(config.engine, config.batch_size, card, mean)
        line += (
            f": about {rough(count * mean / rate)} on {'this CPU' if card is None else 'a GPU'}, if it makes "
            f"{rate:,.0f} tokens/s and a problem takes {mean:,.0f} tokens (assumed; the bar shows the measured pace)"
        )
    print(line, flush=True)
    return config


@dataclass(frozen=True)
class FilterResult:
    """``report`` once all shards are complete; until then ``open_shards``: shard -> problems not yet done."""

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
    check_results(Path(config.output_dir), REPORT, ("report.md", *CURRICULUM), ("selected", "buckets"))
    choose_template(config.template, model=config.model)  # an unknown one fails before anything is loaded
    problems = load_problems(config.input, config.num_problems, config.seed, config.limit)
    shard, num_shards = parse_shard(config.shard)
    if num_shards > len(problems):
        raise ValueError(f"shard {config.shard}: there are only {len(problems)} problems to share out")
    shards = Shards(Path(config.output_dir), len(problems), num_shards, job_settings(config, problems))
    still_open = shards.missing()
    if shard in still_open:
        if config.outputs is None:
            assert config.max_length is not None
            config = sized_and_announced(config, still_open[shard], config.max_length)
        decoder = build_decoder(config, problems)
        title = "filter" if num_shards == 1 else f"filter, shard {config.shard}"
        bar = progress_bar(title, "problems", len(shards.indices(shard)))
        with bar as progress, closing(Verifier()) as verifier:
            run_shard(shards, shard, problems, decoder, verifier, config.batch_size or DEFAULT_BATCH, progress)
    still_open = shards.missing()
    return FilterResult(None if still_open else finish(config, shards, problems, started), still_open)


def finish(config: FilterConfig, shards: Shards, problems: list[Problem], started: float) -> dict[str, Any]:
    """Merge the complete shards, sample the buckets, write the files; returns the report."""
    outcome, buckets = shards.outcome(), parse_buckets(",".join(config.buckets))
    selection = select(outcome.solved(), buckets, config.seed, config.fill_short_buckets)
    outputs = {row["index"]: row["output"] for row in shards.rows() if row["index"] in selection.chosen}
    rows = [
        {
            "problem": problems[i].problem,
            "answer": problems[i].answer,
            "output": outputs[i],
            "output_tokens": outcome.tokens[i],
            "bucket": bucket,
            "template": config.template,
            "model": config.model if config.outputs is None else None,  # nobody says what recorded outputs come from
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
        parquet.write_table(arrow.Table.from_pylist(rows, schema=arrow.schema(fields.items())), path)


def notes(outcome: Outcome, selection: Selection, problems: list[Problem]) -> list[str]:
    """What a reader must not miss: nothing solved, short buckets, outputs outside all buckets."""
    if not outcome.solved():
        loaded = len(outcome.status)
        found = [f"None of the {loaded} problems was solved: the curriculum is empty and there is nothing to train on."]
        wrong = [index for index, status in outcome.status.items() if status == WRONG]
        if wrong:
            found.append(
                f"{len(wrong)} outputs give an answer and all are wrong: check that the field 'answer' of the input "
                f"holds the answer alone, or GSM8K's '... #### 72'; the first is {problems[wrong[0]].answer[-80:]!r}."
            )
        return found
    found = []
    for fill in selection.fills:
        if fill.short > 0:
            line = f"Bucket {fill.bucket.name} is short: {fill.bucket.wanted} wanted, {fill.taken} there, all taken"
            filled = f"; {fill.filled_from_others} came from other buckets in their place"
            found.append(line + (filled if fill.filled_from_others else "") + ".")
    if selection.outside:
        found.append(
            f"{selection.outside} solved problems have an output length outside all buckets and were left out."
        )
    return found


def markdown(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = ["# Curriculum", "", *report["notes"], *([""] if report["notes"] else [])]
    lines += ["| | problems |", "|---|---|", f"| loaded | {report['loaded']} |"]
    lines += [f"| {status}: {meaning} | {report[status]} |" for status, meaning in STATUSES.items()]
    lines += [f"| solved, outside all buckets | {report['outside_buckets']} |", f"| selected | {report['selected']} |"]
    lines += ["", "| output tokens | wanted | available | taken | filled from others |", "|---|---|---|---|---|"]
    for b in report["buckets"]:
        cells = [f"{b['low']} < n <= {b['high']}", b["wanted"], b["available"], b["taken"], b["filled_from_others"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    config = ", ".join(f"{key} {value}" for key, value in report["config"].items())
    packages = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines += ["", f"Settings: {config}.", "", f"{packages}; {hardware_line()}; last run {report['seconds']:.1f} s."]
    return "\n".join(lines) + "\n"
