"""The curriculum: solved problems sampled per bucket of output tokens.

Source: arXiv 2510.08525, section on training data: of the problems that the full-cache model
solves, 600 with 0-2k output tokens, 600 with 2-4k, 1,000 with 4-6k and 800 with 6-8k.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rlkv.models.shape import short_name


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


PAPER_BUCKETS = (
    Bucket(0, 2000, 600),
    Bucket(2000, 4000, 600),
    Bucket(4000, 6000, 1000),
    Bucket(6000, 8000, 800),
)
SMOL_BUCKETS = (
    Bucket(0, 160, 40),
    Bucket(160, 220, 40),
    Bucket(220, 280, 40),
    Bucket(280, 448, 40),
)
TINY_BUCKETS = (
    Bucket(0, 64, 60),
    Bucket(64, 128, 60),
    Bucket(128, 256, 60),
    Bucket(256, 440, 60),
)


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


@dataclass(frozen=True)
class BucketFill:
    """One bucket: problems available, taken from it, and taken from others in its place."""

    bucket: Bucket
    available: int
    taken: int
    filled_from_others: int

    @property
    def short(self) -> int:
        return self.bucket.wanted - self.taken


@dataclass(frozen=True)
class Selection:
    """What was sampled.

    Attributes:
        chosen: index of a problem -> name of the bucket that its own length falls into.
        outside: outputs that fall into no bucket.
    """

    chosen: dict[int, str]
    fills: list[BucketFill]
    outside: int


def select(
    lengths: dict[int, int], buckets: tuple[Bucket, ...], seed: int, fill_short: bool = False
) -> Selection:
    """Sample per bucket from ``lengths`` (problem index -> output tokens).

    The same arguments give the same sample.  A bucket with too few gives all it has.  With
    ``fill_short``, what is missing is then taken from what the nearest buckets have left over.
    """
    pools = {}
    for bucket in buckets:
        pools[bucket] = [i for i in sorted(lengths) if bucket.low < lengths[i] <= bucket.high]
    available = {bucket: len(pool) for bucket, pool in pools.items()}
    chosen: dict[int, str] = {}

    def take(bucket: Bucket, number: int) -> int:
        taken = pools[bucket][:number]
        del pools[bucket][:number]
        chosen.update(dict.fromkeys(taken, bucket.name))
        return len(taken)

    taken = {}
    filled = dict.fromkeys(buckets, 0)
    for bucket, pool in pools.items():
        # a generator per bucket: changing one bucket leaves the draws of the others as they were
        random.Random(f"rlkv-curriculum-{seed}-{bucket.name}").shuffle(pool)
        taken[bucket] = take(bucket, bucket.wanted)
    if fill_short:
        for bucket in buckets:
            middle = bucket.low + bucket.high
            # itself first, but nothing is left in it where something is missing
            for donor in sorted(buckets, key=lambda b: abs(b.low + b.high - middle)):
                filled[bucket] += take(donor, bucket.wanted - taken[bucket] - filled[bucket])
    fills = [BucketFill(b, available[b], taken[b], filled[b]) for b in buckets]
    return Selection(
        dict(sorted(chosen.items())), fills, outside=len(lengths) - sum(available.values())
    )
