"""The curriculum: solved problems sampled per bucket of output tokens.

Source: arXiv 2510.08525, section on training data: of the problems that the full-cache model
solves, 600 with 0-2k output tokens, 600 with 2-4k, 1,000 with 4-6k and 800 with 6-8k.
"""

from __future__ import annotations

import random
import re
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlkv.models.shape import short_name
from rlkv.utils.files import atomic_path, write_jsonl
from rlkv.utils.runtime import require
from rlkv.utils.store import Row

CURRICULUM = ("curriculum.jsonl", "curriculum.parquet")
COLUMNS = ("problem", "answer", "output", "output_tokens", "bucket", "template", "model")


def curriculum_folder(model: str) -> Path:
    """Return where the filter writes the curriculum of ``model``, and where training looks."""
    return Path("results") / f"curriculum_{short_name(model)}"


@dataclass(frozen=True)
class Bucket:
    """Outputs of more than ``low`` and at most ``high`` tokens, to sample ``wanted`` from."""

    low: int
    high: int
    wanted: int

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"bucket {self} is impossible: it needs low < high")

    def __str__(self) -> str:
        return f"{self.low}-{self.high}:{self.wanted}"

    @property
    def name(self) -> str:
        return f"{self.low}-{self.high}"


PAPER_BUCKETS = ("0-2000:600", "2000-4000:600", "4000-6000:1000", "6000-8000:800")
SMOL_BUCKETS = ("0-160:40", "160-220:40", "220-280:40", "280-448:40")
TINY_BUCKETS = ("0-64:60", "64-128:60", "128-256:60", "256-440:60")


def parse_buckets(text: str) -> tuple[Bucket, ...]:
    """Parse buckets written as ``LOW-HIGH:COUNT,...`` and return them in ascending order.

    Raises:
        ValueError: if the text is of another form, or buckets are impossible or overlap.
    """
    buckets = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)-(\d+):(\d+)", part.strip())
        if not match:
            raise ValueError(
                f"bucket {part.strip()!r} is not of the form LOW-HIGH:COUNT, for instance "
                "0-64:40,64-128:40"
            )
        buckets.append(Bucket(*map(int, match.groups())))
    ordered = tuple(sorted(buckets, key=lambda b: b.low))
    for first, second in pairwise(ordered):
        if second.low < first.high:
            raise ValueError(f"buckets {first} and {second} overlap: an output would count twice")
    return ordered


def select(
    lengths: dict[int, int], buckets: tuple[Bucket, ...], seed: int, fill_short: bool = False
) -> tuple[dict[int, str], list[dict[str, int]]]:
    """Sample per bucket from ``lengths`` (problem index -> output tokens).

    The same arguments give the same sample.  A bucket with too few gives all it has.  With
    ``fill_short``, what is missing is then taken from what the nearest buckets have left over.

    Returns:
        Index of a chosen problem -> name of the bucket that its own length falls into; and per
        bucket its limits, ``wanted``, ``available``, ``taken`` and ``filled_from_others``.
    """
    chosen: dict[int, str] = {}
    left: dict[Bucket, list[int]] = {}
    fills = []
    for bucket in buckets:
        pool = [i for i in sorted(lengths) if bucket.low < lengths[i] <= bucket.high]
        # a generator per bucket: changing one bucket leaves the draws of the others as they were
        random.Random(f"rlkv-curriculum-{seed}-{bucket.name}").shuffle(pool)
        taken = pool[: bucket.wanted]
        left[bucket] = pool[bucket.wanted :]
        chosen |= dict.fromkeys(taken, bucket.name)
        counts = {"available": len(pool), "taken": len(taken), "filled_from_others": 0}
        fills.append({**asdict(bucket), **counts})
    if fill_short:
        for bucket, fill in zip(buckets, fills, strict=True):
            missing = fill["wanted"] - fill["taken"]
            middle = bucket.low + bucket.high
            # itself first, but nothing is left in it where something is missing
            for donor in sorted(buckets, key=lambda b: abs(b.low + b.high - middle)):
                moved = left[donor][:missing]
                del left[donor][:missing]
                missing -= len(moved)
                chosen |= dict.fromkeys(moved, donor.name)
                fill["filled_from_others"] += len(moved)
    return dict(sorted(chosen.items())), fills


def notes(report: dict[str, Any], wrong: list[str]) -> list[str]:
    """Return what a reader must not miss; ``wrong`` has the answers that outputs did not give.

    Nothing solved, short buckets, or outputs outside all buckets.
    """
    if not report["correct"]:
        nothing = [
            f"None of the {report['loaded']} problems was solved: the curriculum is empty and "
            "there is nothing to train on."
        ]
        if wrong:
            nothing.append(
                f"{len(wrong)} outputs give an answer and all are wrong: check that the field "
                "'answer' of the input holds the answer alone, or GSM8K's '... #### 72'; the first "
                f"is {wrong[0][-80:]!r}."
            )
        if report["unparsable"]:
            nothing.append(
                f"{report['unparsable']} outputs give no answer in a box or behind 'the final "
                "answer is', which is where the verifier looks: take another --template, or write "
                "the curriculum yourself (docs/find-heads.md)."
            )
        return nothing
    found = []
    for bucket in report["buckets"]:
        if bucket["taken"] < bucket["wanted"]:
            line = (
                f"Bucket {bucket['low']}-{bucket['high']} is short: {bucket['wanted']} wanted, "
                f"{bucket['taken']} there, all taken"
            )
            if bucket["filled_from_others"]:
                line += f"; {bucket['filled_from_others']} came from other buckets in their place"
            found.append(f"{line}.")
    if report["outside_buckets"]:
        found.append(
            f"{report['outside_buckets']} solved problems have an output length outside all "
            "buckets and were left out."
        )
    return found


def write_curriculum(folder: Path, rows: list[Row]) -> None:
    """Write ``curriculum.jsonl`` and ``curriculum.parquet``, with the same fields."""
    arrow = require("pyarrow", "train")
    parquet = require("pyarrow.parquet", "train")
    as_lines, as_table = CURRICULUM
    write_jsonl(folder / as_lines, rows)
    types = {name: arrow.string() for name in COLUMNS}
    types["output_tokens"] = arrow.int64()
    table = arrow.Table.from_pylist(rows, schema=arrow.schema(types.items()))
    with atomic_path(folder / as_table) as path:
        parquet.write_table(table, path)
