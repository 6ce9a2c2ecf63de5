"""The store: rows outlive kills, settings are compared, one writer at a time."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlkv.utils.files import write_bytes, write_json, write_text
from rlkv.utils.store import (
    StoreInUseError,
    check_free,
    check_results,
    check_settings,
    free_folder,
    hold_folder,
    iter_rows,
    open_store,
    recorded_of,
    settings_path,
)

SETTINGS = {"model": "tiny", "sampling": {"seed": 1, "top_p": 1.0}}
KEY = ("key", "sample")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "rows.jsonl"


def row(key: str, sample: int = 0) -> dict[str, Any]:
    return {"key": key, "sample": sample, "text": "é\n" * 3}


def fill(path: Path, *keys: str) -> None:
    with open_store(path, SETTINGS, KEY, {"commit": "abc"}) as store:
        store.append(*(row(key) for key in keys))


def read(path: Path) -> list[dict[str, Any]]:
    return list(iter_rows(path, KEY))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_rows_come_back_and_more_are_added(path: Path) -> None:
    fill(path, "a", "b")
    with open_store(path, SETTINGS, KEY, {"commit": "later"}) as store:
        assert store.rows == [row("a"), row("b")]
        assert store.done == {("a", 0), ("b", 0)}
        store.append(row("a", 1), {**row("c"), "text": "\ud800é"})  # half a surrogate pair
        on_disk = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert on_disk == store.rows
        for again in ([row("a")], [row("d"), row("d")]):
            with pytest.raises(ValueError, match="already"):
                store.append(*again)
    assert read(path) == on_disk
    assert recorded_of(path) == [{"commit": "abc"}, {"commit": "later"}]
    for commit in ("later", "abc", "never"):  # the last one adds no row
        with open_store(path, SETTINGS, KEY, {"commit": commit}) as store:
            if commit != "never":
                store.append(row(commit))
    assert recorded_of(path) == [{"commit": "abc"}, {"commit": "later"}]


@pytest.mark.parametrize(
    "torn", [b'{"key": "c"', b"{", b'{"key": "c", "sample": 0}', b'{"key\0\0', b"\0\0\0"]
)
def test_a_torn_line_is_cut_off(path: Path, torn: bytes) -> None:
    fill(path, "a", "b")
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert len(read(path)) == 2
    assert path.read_bytes() == whole + torn, "reading changes nothing"
    fill(path, "c")
    assert path.read_bytes().startswith(whole + b'{"key": "c"')
    assert len(read(path)) == 3
    for before_the_first_row in (b"", torn):
        path.write_bytes(before_the_first_row)
        fill(path, "a")
        assert read(path) == [row("a")]


FOREIGN = {
    "notes": ({"rows.jsonl": b"my\nnotes\n"}, "left as it is"),
    "rows of a program": ({"rows.jsonl": b'{"key": "a", "sample": 0}\n{"key'}, "left as it is"),
    "a beginning": ({"rows.jsonl": b'{"ke'}, "left as it is"),
    "settings": ({"rows.jsonl.settings.json": b'{"settings": {}}'}, "somebody else's"),
    "both": ({"rows.jsonl": b"{}\n", "rows.jsonl.settings.json": b"[" * 99999}, "somebody else's"),
}
# where the settings are ours
DAMAGED = {
    "an end that is no row": (b"my notes", "is no row"),
    "a line that is no row": (b'{"key": ["a"], "sample": 0}\n{"', "line 1"),
    "too deep a line": (b"[" * 99999 + b"\n{", "line 1"),
}


@pytest.mark.parametrize("name", [*FOREIGN, *DAMAGED])
def test_what_is_not_ours_is_not_touched(path: Path, name: str) -> None:
    fill(path, "a")
    if name in FOREIGN:
        for file in path.parent.iterdir():
            file.unlink()
        files, message = FOREIGN[name]
        for file_name, content in files.items():
            (path.parent / file_name).write_bytes(content)
    else:
        content, message = DAMAGED[name]
        path.write_bytes(content)
    before = files_of(path.parent)
    with pytest.raises(ValueError, match=message), open_store(path, SETTINGS, KEY):
        pytest.fail("opened")
    assert files_of(path.parent) == before


def test_other_settings_are_refused_and_named(path: Path) -> None:
    fill(path, "a")
    path.write_bytes(path.read_bytes() + b'{"index": 1')
    before = files_of(path.parent)
    other = {"model": "x" * 99, "sampling": {"seed": 2, "top_p": 1.0}}
    with pytest.raises(ValueError, match=r"\(model, sampling.seed\): .*x', sampling.seed.*1.*2"):
        check_settings(path, other)
    with pytest.raises(ValueError, match="and 6 more"):
        open_store(path, {f"n{i}": i for i in range(12)}, KEY).__enter__()
    assert files_of(path.parent) == before
    with pytest.raises(ValueError, match=r"sampling was .* and is now absent"):
        check_settings(path, {"model": "tiny"})
    check_settings(path, SETTINGS)


def test_rows_without_their_settings_are_refused(path: Path) -> None:
    fill(path, "a")
    for content in (None, "{", "[]", "{}"):
        settings_path(path).unlink()
        if content is not None:
            settings_path(path).write_text(content)
        with pytest.raises(ValueError, match=r"rows\.jsonl\.settings\.json"):
            fill(path, "b")
        settings_path(path).touch()
        assert read(path) == [row("a")]


def test_damaged_and_repeated_lines_are_named(path: Path) -> None:
    fill(path, "a", "b")
    lines = path.read_bytes().splitlines(keepends=True)
    for content, message in (
        (lines[0] + b'{"key": "b"}\n' + lines[1], "line 2 is damaged"),
        (b"oh\n" + lines[1], "line 1 is damaged"),
        (b"".join(lines) + lines[0], "line 3 repeats"),
    ):
        path.write_bytes(content)
        for use in (lambda: read(path), lambda: fill(path, "c")):
            with pytest.raises(ValueError, match=message):
                use()
        assert path.read_bytes() == content


def test_what_gets_no_row_is_removed_again(path: Path) -> None:
    with pytest.raises(KeyError), open_store(path, SETTINGS, KEY):
        raise KeyError
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("folder", "is a folder"),
        ("pipe", "is a device or pipe"),
        ("link to a device", "is a device or pipe"),
        ("below a file", "out is no folder"),
    ],
)
def test_only_files_hold_rows_or_are_replaced(tmp_path: Path, kind: str, message: str) -> None:
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
        with pytest.raises(ValueError, match=message):
            write()
    assert sorted(tmp_path.rglob("*")) == before
    assert Path(os.devnull).is_char_device()


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


def test_on_a_full_disk_what_was_there_stays(path: Path, small_disk: int) -> None:
    rows = [{**row(name), "text": name * (small_disk // 3)} for name in "abcd"]
    with open_store(path, SETTINGS, KEY) as store:
        store.append(rows[0])
        with pytest.raises(OSError, match="goes on from it") as raised:
            store.append(*rows[1:])
        assert raised.value.filename == str(path)
        store.append(rows[1])
    assert read(path) == rows[:2]
    file = path.parent / "file"
    write_bytes(file, b"old")
    names = sorted(path.parent.iterdir())
    with pytest.raises(OSError, match=r"File too large") as raised:
        write_text(file, "x" * (small_disk + 1))
    assert raised.value.filename == str(file)
    assert file.read_bytes() == b"old"
    assert sorted(path.parent.iterdir()) == names


def test_results_of_another_command_are_not_replaced(tmp_path: Path) -> None:
    def check() -> None:
        check_results(tmp_path, "results.json", ("report.md",), ("rows",))

    check()
    (tmp_path / "report.md").write_text("mine")
    for content in (None, "[", "[" * 99999, '{"command": "x", "versions": {}, "analyses": 1}'):
        if content is not None:
            (tmp_path / "results.json").write_text(content)
        with pytest.raises(ValueError, match=r"report\.md"):
            check()
    write_json(tmp_path / "results.json", {"command": "x", "versions": {}, "rows": 1})
    check()


def _hold(path: Path, ready: Any, end: Any) -> None:
    hold_folder(path.parent)
    with open_store(path, SETTINGS, KEY):
        ready.set()
        end.wait(60)


def test_one_process_writes_at_a_time(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    end = context.Event()
    other = context.Process(target=_hold, args=(path, ready, end))
    other.start()
    assert ready.wait(60)
    for take in (
        lambda: fill(path, "a"),
        lambda: check_free(path.parent),
        lambda: hold_folder(path.parent),
    ):
        with pytest.raises(StoreInUseError, match="another process"):
            take()
    other.kill()  # which frees both
    other.join()
    fill(path, "a")
    for _ in range(2):
        hold_folder(path.parent)  # once more by the same process
        check_free(path.parent)
    free_folder(path.parent)
