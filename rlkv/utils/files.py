"""Files that are the old one or the complete new one, and lines appended whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
TITLE_SIZE = 10
TEXT_SIZE = 8


def at_home(path: str | Path) -> Path:
    """Return the path with the home folder for its ``~``; ValueError if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{path}: no home folder is known that {Path(path).parts[0]} could stand for: write "
            "it out"
        ) from None


# --- writing


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Give a temporary file to write to, renamed to ``path`` when the block ends without error.

    Missing folders are made, and a symbolic link stays one.  After an error in the block an earlier
    ``path`` is as it was.

    Raises:
        ValueError: if ``path`` is a folder, a device or a pipe.
        OSError: if the disk refuses, always with ``path`` as the name of the file.
    """
    check_file(Path(path))
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        make_folder(target.parent)
        yield partial
        with partial.open("rb") as written:
            os.fsync(written.fileno())  # the rename must not reach the disk before the content
        partial.replace(target)
    except OSError as error:
        if error.filename not in (None, str(partial)):
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with suppress(OSError):  # the folder is a file, or cannot be changed: nothing was written
            partial.unlink(missing_ok=True)


def check_file(path: Path) -> None:
    """Raise ValueError if the name is that of a folder, a device or a pipe."""
    if path.exists() and not path.is_file():
        kind = "folder" if path.is_dir() else "device or pipe"
        raise ValueError(f"{path} is a {kind}: give the name of a file")


def make_folder(folder: Path) -> None:
    """Make the folder and those above it; ValueError as of :func:`check_folder`."""
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)


def check_folder(folder: Path) -> None:
    """Raise ValueError if a file has the name of the folder or of one above it."""
    there = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    if there.exists() and not there.is_dir():
        raise ValueError(f"{there} is no folder: take another name for the output")


def check_new(path: Path, overwrite: bool) -> None:
    """Raise ValueError if the file or folder holds something and ``overwrite`` is off."""
    path = at_home(path)  # as what writes gates does
    if overwrite or not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    raise ValueError(f"{path} exists: take another name, or pass --overwrite to replace it")


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 text file atomically; what UTF-8 cannot encode is escaped."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a binary file atomically."""
    with atomic_path(path) as partial:
        partial.write_bytes(content)


def write_json(path: str | Path, content: Any) -> None:
    """Write an indented JSON file atomically; what JSON does not know (paths, dtypes) as text."""
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a file of one JSON object per line atomically."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Add a line to a JSONL log; errors as of :func:`append_whole`."""
    with path.open("ab", buffering=0) as out:
        append_whole(out.fileno(), json.dumps(record).encode() + b"\n", path)


def append_whole(descriptor: int, content: bytes, path: str | Path) -> None:
    """Append to the open file ``path``: on the disk when this returns, or not at all.

    Raises:
        OSError: if the disk refuses, such as a full one; names ``path``.
    """
    size = os.fstat(descriptor).st_size
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    except OSError as error:
        os.ftruncate(descriptor, size)
        text = (
            f"{error.strerror}; what was there before is kept, and the same command goes on from it"
        )
        raise OSError(error.errno, text, str(path)) from error
    except BaseException:
        os.ftruncate(descriptor, size)
        raise


# --- reading


def parse_json(content: str | bytes) -> Any:
    """Parse JSON; ValueError also for values that are nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; ValueError with its name if it is none."""
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``(where, row)`` of each line with text; ``where`` names file and line.

    Raises:
        ValueError: if a line is not an object.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                row = parse_json(line)
            except ValueError as error:
                raise ValueError(f"{where} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where} is a {type(row).__name__}: expected an object")
            yield where, row


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL log up to the line that was cut off where a process died."""
    records = []
    for line in path.read_bytes().split(b"\n"):
        try:
            records.append(parse_json(line))
        except ValueError:
            break
    return records


def is_text(value: str) -> bool:
    """Return whether UTF-8 can encode it: it has no form for half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


# --- figures


def new_figure(
    width: float = 7.0, height: float = 4.2, columns: int = 1, lines: int = 1, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """Make an empty figure (inches) with axes in columns and lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(lines, columns, squeeze=False, sharey=sharey).flat)


def curve_figure(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """Make axes for curves or bars: labelled, with a light grid."""
    figure, (axes,) = new_figure()
    axes.set_title(title, fontsize=TITLE_SIZE)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure atomically; the suffix is the format (``.png``, ``.pdf``, ``.svg``).

    Raises:
        ValueError: for a suffix that matplotlib does not write.
    """
    kind = Path(path).suffix.lstrip(".").lower()
    if kind not in figure.canvas.get_supported_filetypes():
        raise ValueError(
            f"{path}: no figure format {kind!r}, expected a name that ends with .png, .pdf or .svg"
        )
    with atomic_path(path) as partial:
        figure.savefig(partial, format=kind, dpi=DPI)
