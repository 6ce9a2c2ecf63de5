"""Buckets: exact counts, no overlap, short ones stay short unless asked."""

import pytest

from rlkv.data.curriculum import Bucket, parse_buckets, select

BUCKETS = (Bucket(0, 10, 3), Bucket(10, 20, 3), Bucket(20, 30, 3))


def counts(fills: list[dict[str, int]], *names: str) -> list[tuple[int, ...]]:
    return [tuple(fill[name] for name in names) for fill in fills]


def test_parse() -> None:
    assert parse_buckets("64-128:40, 0-64:30") == (Bucket(0, 64, 30), Bucket(64, 128, 40))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "bucket"),
        ("0-64", "bucket"),
        ("64-0:4", "impossible"),
        ("5-5:4", "impossible"),
        ("0-64:1,60-90:1", "overlap"),
        ("0-64:-1", "bucket"),
    ],
)
def test_parse_errors(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_buckets(text)


def test_edges_belong_to_the_lower_bucket() -> None:
    chosen, fills = select({0: 1, 1: 10, 2: 11, 3: 30, 4: 31}, BUCKETS, seed=0)
    assert chosen == {0: "0-10", 1: "0-10", 2: "10-20", 3: "20-30"}
    assert counts(fills, "low", "high", "available")[0] == (0, 10, 2)


def test_samples_by_seed_and_wanted() -> None:
    lengths = {i: i % 30 + 1 for i in range(300)}
    first, fills = select(lengths, BUCKETS, seed=0)
    assert (first, fills) == select(lengths, BUCKETS, seed=0)
    assert first != select(lengths, BUCKETS, seed=1)[0]
    assert counts(fills, "available", "taken") == [(100, 3)] * 3
    for index, name in first.items():
        low, high = map(int, name.split("-"))
        assert low < lengths[index] <= high
    wider, _ = select(lengths, (BUCKETS[0], Bucket(10, 20, 50), BUCKETS[2]), seed=0)
    assert {i for i, name in first.items() if name != "10-20"} <= wider.keys()


def test_a_short_bucket_is_never_filled_unasked() -> None:
    lengths = {0: 5, **{i: 15 for i in range(1, 11)}, **{i: 25 for i in range(11, 21)}}
    plain, fills = select(lengths, BUCKETS, seed=0)
    assert counts(fills, "taken", "filled_from_others") == [(1, 0), (3, 0), (3, 0)]
    assert len(plain) == 7
    filled, fills = select(lengths, BUCKETS, seed=0, fill_short=True)
    assert counts(fills, "taken", "filled_from_others") == [(1, 2), (3, 0), (3, 0)]
    assert len(filled) == 9
    # the nearest bucket gives, under its own name
    assert sum(name == "10-20" for name in filled.values()) == 5
    assert plain.items() <= filled.items()
    _, fills = select({0: 5, 1: 25}, BUCKETS, seed=0, fill_short=True)  # takes what there is
    assert counts(fills, "taken", "filled_from_others") == [(1, 0), (0, 0), (1, 0)]
