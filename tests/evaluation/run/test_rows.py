"""Files of rows: torn lines, other settings by name, one writer at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkv.evaluation.run.rows import differences, open_rows, read_rows

SETTINGS = {"size": 3, "cache": {"sink": 4, "policy": None}, "hash": "0" * 16}


def write(path: Path, n: int = 3) -> None:
    with open_rows(path, SETTINGS) as log:
        for i in range(n):
            log.append({"i": i})


def test_rows_come_back_and_a_torn_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"i": 3')
    assert read_rows(path, SETTINGS) == [{"i": 0}, {"i": 1}, {"i": 2}]
    assert path.read_bytes() != whole, "reading leaves the file as it is"
    with open_rows(path, SETTINGS) as log:
        assert log.rows == [{"i": 0}, {"i": 1}, {"i": 2}]
        assert path.read_bytes() == whole
        log.append({"i": 3})
    assert read_rows(path, SETTINGS)[-1] == {"i": 3}


def test_a_torn_first_line_is_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"setti')
    assert read_rows(path, SETTINGS) == []
    write(path, 1)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"settings": SETTINGS}, {"i": 0}]


def test_other_settings_are_named_with_short_values(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path)
    before = path.read_bytes()
    other = {"size": 4, "cache": {"sink": 4, "policy": {"name": "rkv", "budget": 256}}, "hash": "1" * 16, "new": True}
    message = (
        r"other settings \(cache.policy, hash, new, size\): new was absent and is now true, size was 3 and is now 4; "
    )
    for read in (lambda: read_rows(path, other), lambda: open_rows(path, other).__enter__()):
        with pytest.raises(ValueError, match=message):
            read()
    assert path.read_bytes() == before
    many = {f"name{i}": 0 for i in range(12)}
    with pytest.raises(ValueError, match=r"name3 and 7 more\)"):
        read_rows(path, many)


def test_differences_descend() -> None:
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) == {"a.c": "a.c was 2 and is now 3"}
    assert differences(SETTINGS, SETTINGS) == {}


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with open_rows(path, SETTINGS):
        with pytest.raises(ValueError, match="is being written by another process"):
            open_rows(path, SETTINGS).__enter__()
        with pytest.raises(ValueError, match="is being written by another process"):
            read_rows(path, SETTINGS)
    write(path)


@pytest.mark.parametrize("content", ["no json\n", '{"i": 1}\n', "[1]\n", '{"settings": {}}\nbroken\n'])
def test_no_file_of_rows(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="is no file of measured rows"):
        read_rows(path, {})
    with pytest.raises(ValueError, match="is no file of measured rows"):
        open_rows(path, {}).__enter__()
    assert path.read_text() == content
