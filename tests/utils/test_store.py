"""The store: rows outlive kills, settings are compared, one writer at a time."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlkv.utils.files import write_bytes, write_json, write_text
from rlkv.utils.store import (
    StoreInUseError,
    check_free,
    check_results,
    differences,
    free_folder,
    hold_folder,
    iter_rows,
    open_store,
    read_store,
    settings_path,
)

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
        assert [json.loads(line) for line in path.read_text().splitlines()] == store.rows, (
            "on the disk at once"
        )
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
@pytest.mark.parametrize(
    "torn", [b'{"key": "c"', b"{", b'{"key": "c", "sample": 0}', b'{"key\0\0', b"\0\0\0"]
)
def test_a_torn_line_is_cut_off(
    tmp_path: Path, torn: bytes, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("torn", [b"", b'{"ke'])
def test_a_kill_before_the_first_row_costs_nothing(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    fill(path, "z")  # the settings are written before the first row
    path.write_bytes(torn)
    fill(path, "a")
    assert read_store(path, KEY, SETTINGS) == [row("a")]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


FOREIGN = {
    "notes": ({"rows.jsonl": b"my notes"}, "left as it is"),
    "notes, several lines": ({"rows.jsonl": b"my\nnotes\n"}, "left as it is"),
    "rows of another program": (
        {"rows.jsonl": b'{"key": "a", "sample": 0}\n{"key'},
        "left as it is",
    ),
    "a beginning": ({"rows.jsonl": b'{"ke'}, "left as it is"),
    "settings of another program": (
        {"rows.jsonl.settings.json": b'{"settings": {}}'},
        "somebody else's",
    ),
    "both": ({"rows.jsonl": b"{}\n", "rows.jsonl.settings.json": b"[" * 99999}, "somebody else's"),
    "an end that is no row": (
        {"rows.jsonl": b"my notes", "rows.jsonl.settings.json": None},
        "is no row",
    ),
    "a line that is no row": (
        {"rows.jsonl": b'{"key": ["a"], "sample": 0}\n{"', "rows.jsonl.settings.json": None},
        "line 1",
    ),
    "too deep a line": (
        {"rows.jsonl": b"[" * 99999 + b"\n{", "rows.jsonl.settings.json": None},
        "line 1",
    ),
}


# where the settings are ours, fresh may drop the rest
@pytest.mark.parametrize(
    ("name", "fresh"),
    [
        (name, fresh)
        for name, (files, _) in FOREIGN.items()
        for fresh in {False, None not in files.values()}
    ],
)
def test_what_is_not_ours_is_not_touched(tmp_path: Path, name: str, fresh: bool) -> None:
    files, message = FOREIGN[name]
    fill(tmp_path / "rows.jsonl", "a")
    ours = (tmp_path / "rows.jsonl.settings.json").read_bytes()
    for path in tmp_path.iterdir():
        path.unlink()
    for file, content in files.items():
        (tmp_path / file).write_bytes(ours if content is None else content)
    before = files_of(tmp_path)
    with (
        pytest.raises(ValueError, match=message),
        open_store(tmp_path / "rows.jsonl", SETTINGS, KEY, fresh=fresh),
    ):
        pytest.fail("opened")
    assert files_of(tmp_path) == before


def test_rows_of_another_command_are_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with open_store(path, {"problems": 3}, ("index",)) as store:
        store.append({"index": 0})
    path.write_bytes(path.read_bytes() + b'{"index": 1')
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match="model, problems, sampling"):
        fill(path, "a")
    assert files_of(tmp_path) == before


def test_what_gets_no_row_is_removed_again(tmp_path: Path) -> None:
    with pytest.raises(KeyError), open_store(tmp_path / "rows.jsonl", SETTINGS, KEY):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_fresh_drops_the_rows_of_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    fill(path, "a")
    with open_store(path, {"other": 1}, KEY, fresh=True) as store:
        assert store.rows == []
        store.append(row("b"))
    assert read_store(path, KEY, {"other": 1}) == [row("b")]


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to a device", "below a file"])
def test_only_files_hold_rows_or_are_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "out"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a device":
        path.symlink_to(os.devnull)
    else:
        path.write_text("mine")
        path /= "out"
    before = sorted(tmp_path.rglob("*"))
    for write in (lambda: fill(path, "a"), lambda: write_text(path, "x")):
        with pytest.raises(
            ValueError, match=r"(is a folder|is a device or pipe|out is no folder):"
        ):
            write()
    assert sorted(tmp_path.rglob("*")) == before
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    write_text(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "x"


@pytest.fixture
def small_disk() -> Iterator[int]:
    """Files may have up to this many bytes, as if the disk were full then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield 1 << 20
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_on_a_full_disk_the_rows_before_stay(tmp_path: Path, small_disk: int) -> None:
    path, rows = (
        tmp_path / "rows.jsonl",
        [{**row(name), "text": name * (small_disk // 3)} for name in "abcd"],
    )
    with open_store(path, SETTINGS, KEY) as store:
        store.append(rows[0])
        with pytest.raises(OSError, match="goes on from it") as raised:
            store.append(*rows[1:])
        assert raised.value.filename == str(path)
        assert path.read_bytes().count(b"\n") == 1
        store.append(rows[1])
    with open_store(path, SETTINGS, KEY) as store:
        assert store.rows == rows[:2]


def test_on_a_full_disk_the_old_file_stays(tmp_path: Path, small_disk: int) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")
    for write in (write_bytes, lambda path, content: write_text(path, content.decode())):
        with pytest.raises(OSError, match=r"File too large") as raised:
            write(path, b"x" * (small_disk + 1))
        assert raised.value.filename == str(path)
    assert files_of(tmp_path) == {"file": b"old"}


def test_half_a_surrogate_pair_is_a_row_as_well(tmp_path: Path) -> None:
    with open_store(tmp_path / "rows.jsonl", SETTINGS, KEY) as store:
        store.append({**row("a"), "text": "\ud800é"})
    (tmp_path / "rows.jsonl").read_text(encoding="utf-8")
    assert read_store(tmp_path / "rows.jsonl", KEY)[0]["text"] == "\ud800é"


def test_results_of_another_command_are_not_replaced(tmp_path: Path) -> None:
    def check() -> None:
        check_results(tmp_path, "results.json", ("report.md",), ("rows",))

    check()
    ours = {"command": "x", "versions": {}, "rows": 1}
    for name, content in (
        ("report.md", "mine"),
        ("results.json", "["),
        ("results.json", "[" * 99999),
        ("results.json", json.dumps({"command": "x", "versions": {}, "analyses": 1})),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=r"report\.md"):
            check()
    write_json(tmp_path / "results.json", ours)
    check()


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    fill(path, "a")
    before = path.read_bytes(), settings_path(path).read_bytes()
    other = {"model": "x" * 99, "sampling": {"seed": 2, "top_p": 1.0}}
    for read in (
        lambda: read_store(path, KEY, other),
        lambda: open_store(path, other, KEY).__enter__(),
    ):
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
        assert read_store(path, KEY) == [row("a")]


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
    hold_folder(path.parent)
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
    for take in (check_free, hold_folder):
        with pytest.raises(StoreInUseError, match="another process"):
            take(tmp_path)
    other.kill()  # which frees both
    other.join()
    fill(path, "a")
    for _ in range(2):
        hold_folder(tmp_path)  # once more by the same process
        check_free(tmp_path)
    free_folder(tmp_path)


def test_differences_descend() -> None:
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) == {
        "a.c": "a.c was 2 and is now 3"
    }
    assert differences({"a": 1}, {}) == {"a": "a was 1 and is now absent"}
    assert differences(SETTINGS, SETTINGS) == {}
