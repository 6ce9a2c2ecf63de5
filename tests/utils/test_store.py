"""The store: rows outlive kills, settings are compared, one writer at a time."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from rlkv.utils.store import StoreInUseError, differences, iter_rows, open_store, read_store, settings_path

SETTINGS = {"model": "tiny", "sampling": {"seed": 1, "top_p": 1.0}}
KEY = ("key", "sample")


def row(key: str, sample: int = 0) -> dict:
    return {"key": key, "sample": sample, "text": "é\n" * 3}


def fill(path: Path, *keys: str) -> None:
    with open_store(path, SETTINGS, KEY, {"commit": "abc"}) as store:
        store.append(*(row(key) for key in keys))


def test_rows_come_back_and_more_are_added(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    fill(path, "a", "b")
    with open_store(path, SETTINGS, KEY, {"commit": "later"}) as store:
        assert store.rows == [row("a"), row("b")]
        assert store.done == {("a", 0), ("b", 0)}
        store.append(row("a", 1))
        assert [json.loads(line) for line in path.read_text().splitlines()] == store.rows, "on the disk at once"
    assert read_store(path, KEY, SETTINGS) == [row("a"), row("b"), row("a", 1)]
    assert json.loads(settings_path(path).read_text())["recorded"] == {"commit": "abc"}


def test_rows_need_not_be_kept_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    fill(path, "a")
    with open_store(path, SETTINGS, ("key",), keep_rows=False) as store:
        assert (store.rows, store.done) == ([], {"a"})
        store.append(row("b"))
        assert (store.rows, store.done) == ([], {"a", "b"})
    assert len(list(iter_rows(path, ("key",)))) == 2


@pytest.mark.parametrize("block", [1 << 20, 7])
@pytest.mark.parametrize("torn", [b'{"key": "c"', b"\xff", b'{"key": "c", "sample": 0}'])
def test_a_torn_line_is_cut_off(tmp_path: Path, torn: bytes, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkv.utils.store.BLOCK_BYTES", block)
    path = tmp_path / "rows.jsonl"
    fill(path, "a", "b")
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert len(read_store(path, KEY)) == 2
    assert path.read_bytes() == whole + torn, "reading changes nothing"
    fill(path, "c")
    assert path.read_bytes().startswith(whole + b'{"key": "c"')
    assert len(read_store(path, KEY)) == 3


def test_a_kill_before_the_first_row_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"ke')
    fill(path, "a")
    assert read_store(path, KEY, SETTINGS) == [row("a")]


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    fill(path, "a")
    before = path.read_bytes(), settings_path(path).read_bytes()
    other = {"model": "x" * 99, "sampling": {"seed": 2, "top_p": 1.0}}
    for read in (lambda: read_store(path, KEY, other), lambda: open_store(path, other, KEY).__enter__()):
        with pytest.raises(ValueError, match=r"\(model, sampling.seed\): sampling.seed.*1.*2"):
            read()
    many = {f"n{i}": i for i in range(12)}
    with pytest.raises(ValueError, match="and 6 more"):
        read_store(path, KEY, many)
    assert (path.read_bytes(), settings_path(path).read_bytes()) == before


def test_rows_without_their_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    fill(path, "a")
    for content in (None, "{", "[]", "{}"):
        settings_path(path).unlink()
        if content is not None:
            settings_path(path).write_text(content)
        with pytest.raises(ValueError, match=r"rows\.jsonl\.settings\.json"):
            fill(path, "b")
        settings_path(path).touch()


def test_damaged_and_repeated_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    fill(path, "a", "b")
    first, second = path.read_text().splitlines(keepends=True)
    for content, what in ((f"{first}]{second}", "line 2"), (f"{first}[]\n", "line 2")):
        path.write_text(content)
        with pytest.raises(ValueError, match=what):
            fill(path, "c")
    path.write_text(first + second + first)
    with pytest.raises(ValueError, match=r"line 3.* \('a', 0\)"):
        fill(path, "c")


def test_a_row_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with open_store(path, SETTINGS, KEY) as store:
        store.append(row("a"))
        for rows in ([row("a")], [row("b"), row("b")]):
            with pytest.raises(ValueError, match="already"):
                store.append(*rows)
    assert read_store(path, KEY) == [row("a")]


def _hold(path: Path, ready: multiprocessing.Event, end: multiprocessing.Event) -> None:
    with open_store(path, SETTINGS, KEY):
        ready.set()
        end.wait(60)


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    path, context = tmp_path / "rows.jsonl", multiprocessing.get_context("spawn")
    ready, end = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(path, ready, end))
    other.start()
    assert ready.wait(60)
    for read in (lambda: fill(path, "a"), lambda: read_store(path, KEY)):
        with pytest.raises(StoreInUseError, match="another process"):
            read()
    end.set()
    other.join()
    fill(path, "a")


def test_differences_descend() -> None:
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) == {"a.c": "a.c was 2 and is now 3"}
    assert differences({"a": 1}, {}) == {"a": "a was 1 and is now absent"}
    assert differences(SETTINGS, SETTINGS) == {}
