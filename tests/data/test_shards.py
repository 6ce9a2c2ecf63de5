"""Shard files: torn lines are cut, other settings refused, one writer at a time."""

import json
from pathlib import Path

import pytest

from rlkv.data.shards import ShardWriter, parse_shard, read_shard, shard_path

SETTINGS = {"model": "m", "max_new_tokens": 4}


def records(*indices: int) -> list[dict]:
    return [{"index": i, "status": "wrong", "output": "x\n" * i} for i in indices]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = shard_path(tmp_path, 0, 1)
    with ShardWriter(path, SETTINGS) as writer:
        writer.append(records(3, 1))
        writer.append(records(2))
    return path


def test_round_trip(path: Path) -> None:
    assert list(read_shard(path)) == [{"settings": SETTINGS}, *records(3, 1, 2)]
    with ShardWriter(path, SETTINGS) as writer:
        assert writer.done == {1, 2, 3}


def test_cut_at_every_byte_keeps_whole_lines_and_loses_nothing_else(path: Path) -> None:
    content = path.read_bytes()
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        whole = content[:size].count(b"\n")
        expected = {json.loads(line)["index"] for line in content.splitlines()[1:whole]}
        with ShardWriter(path, SETTINGS) as writer:
            assert writer.done == expected, size
            writer.append(records(9))
        rows = list(read_shard(path))
        assert {row["index"] for row in rows[1:]} == expected | {9}
        assert path.read_bytes().endswith(b"\n")


def test_a_torn_line_longer_than_a_block(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkv.data.shards.BLOCK_BYTES", 7)
    before = path.read_bytes()
    path.write_bytes(before + b"{" * 100)
    with ShardWriter(path, SETTINGS) as writer:
        assert writer.done == {1, 2, 3}
    assert path.read_bytes() == before


def test_other_settings_are_refused_and_the_file_stays(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"max_new_tokens was 4, is now 5.*--output-dir"):
        ShardWriter(path, {**SETTINGS, "max_new_tokens": 5})
    assert path.read_bytes() == before


def test_damage_in_the_middle_names_the_line(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"{broken\n", *lines[2:]]))
    with pytest.raises(ValueError, match="line 3 is damaged"):
        ShardWriter(path, SETTINGS)
    path.write_bytes(b"".join([*lines, lines[1]]))
    with pytest.raises(ValueError, match="line 5 repeats problem 3"):
        ShardWriter(path, SETTINGS)


def test_two_writers_are_refused(path: Path) -> None:
    with ShardWriter(path, SETTINGS), pytest.raises(ValueError, match="being written by another process"):
        ShardWriter(path, SETTINGS)
    with ShardWriter(path, SETTINGS) as writer:
        assert len(writer.done) == 3


def test_shard_numbers() -> None:
    assert parse_shard("0/1") == (0, 1)
    assert parse_shard("3/4") == (3, 4)
    for bad in ("4/4", "1", "a/b", "-1/4", "0/0", ""):
        with pytest.raises(ValueError, match="from 0 to n-1"):
            parse_shard(bad)
