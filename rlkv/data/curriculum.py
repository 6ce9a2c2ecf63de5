"""The curriculum: solved problems sampled per bucket of output tokens.

Source: arXiv 2510.08525, section on training data: of the problems that the full-cache model solves, 600 with
0-2k output tokens, 600 with 2-4k, 1,000 with 4-6k and 800 with 6-8k.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Bucket:
    """Outputs of more than ``low`` and at most ``high`` tokens, of which ``wanted`` are to be sampled."""

    low: int
    high: int
    wanted: int

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high or self.wanted < 0:
            raise ValueError(f"bucket {self} is impossible: it needs 0 <= low < high and a count of at least 0")

    def __str__(self) -> str:
        return f"{self.low}-{self.high}:{self.wanted}"

    @property
    def name(self) -> str:
        return f"{self.low}-{self.high}"

    def holds(self, tokens: int) -> bool:
        return self.low < tokens <= self.high


PAPER_BUCKETS = (Bucket(0, 2000, 600), Bucket(2000, 4000, 600), Bucket(4000, 6000, 1000), Bucket(6000, 8000, 800))
TINY_BUCKETS = (Bucket(0, 64, 60), Bucket(64, 128, 60), Bucket(128, 256, 60), Bucket(256, 440, 60))


def parse_buckets(text: str) -> tuple[Bucket, ...]:
    """Buckets written as ``LOW-HIGH:COUNT,...``, for instance ``0-64:40,64-128:40``; in ascending order.

    Raises:
        ValueError: if the text is of another form, or buckets are impossible or overlap.
    """
    buckets = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)-(\d+):(\d+)", part.strip())
        if not match:
            raise ValueError(
                f"bucket {part.strip()!r} is not of the form LOW-HIGH:COUNT, for instance 0-64:40,64-128:40"
            )
        buckets.append(Bucket(*map(int, match.groups())))
    ordered = tuple(sorted(buckets, key=lambda b: b.low))
    for first, second in pairwise(ordered):
        if second.low < first.high:
            raise ValueError(f"buckets {first} and {second} overlap: an output would count twice")
    return ordered


@dataclass(frozen=True)
class BucketFill:
    """What became of one bucket: how many were there, how many it gave, how many others gave in its place."""

    bucket: Bucket
    available: int
    taken: int
    filled_from_others: int

    @property
    def short(self) -> int:
        return self.bucket.wanted - self.taken


@dataclass(frozen=True)
class Selection:
    """``chosen`` maps the index of a problem to the name of the bucket that its own length falls into."""

    chosen: dict[int, str]
    fills: list[BucketFill]
    outside: int


def select(lengths: dict[int, int], buckets: tuple[Bucket, ...], seed: int, fill_short: bool = False) -> Selection:
    """Sample per bucket from ``lengths`` (problem index -> output tokens), the same for the same arguments.

    A bucket with too few gives all it has.  With ``fill_short``, what is missing is then taken from what the
    nearest buckets have left over.  ``outside`` counts outputs that fall into no bucket.
    """
    pools: dict[Bucket, list[int]] = {bucket: [] for bucket in buckets}
    outside = 0
    for index in sorted(lengths):
        home = next((bucket for bucket in buckets if bucket.holds(lengths[index])), None)
        if home is None:
            outside += 1
        else:
            pools[home].append(index)
    available = {bucket: len(pool) for bucket, pool in pools.items()}
    chosen: dict[int, str] = {}
    taken: dict[Bucket, int] = {}
    for bucket, pool in pools.items():
        # a generator per bucket: changing one bucket leaves the draws of the others as they were
        random.Random(f"rlkv-curriculum-{seed}-{bucket.name}").shuffle(pool)
        drawn, pools[bucket] = pool[: bucket.wanted], pool[bucket.wanted :]
        chosen.update(dict.fromkeys(drawn, bucket.name))
        taken[bucket] = len(drawn)
    filled = dict.fromkeys(buckets, 0)
    if fill_short:
        for bucket in buckets:
            near = sorted(
                (b for b in buckets if b != bucket), key=lambda b: abs(b.low + b.high - bucket.low - bucket.high)
            )
            for donor in near:
                missing = bucket.wanted - taken[bucket] - filled[bucket]
                given, pools[donor] = pools[donor][:missing], pools[donor][missing:]
                chosen.update(dict.fromkeys(given, donor.name))
                filled[bucket] += len(given)
    fills = [BucketFill(b, available[b], taken[b], filled[b]) for b in buckets]
    return Selection(dict(sorted(chosen.items())), fills, outside)
