"""Files that are either the old one or the whole new one, whatever moment the process dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary file beside ``path`` to write to; it takes the name ``path`` when the block ends without error.

    The folder is made if it is absent. An error inside the block leaves an earlier ``path`` as it was.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        with partial.open("rb") as written:
            os.fsync(written.fileno())  # the rename must not reach the disk before the content
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
