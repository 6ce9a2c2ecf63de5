"""Reading the curriculum that ``data_prep/filter_deepscaler.py`` writes, as Parquet or JSONL."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyarrow import ArrowException, parquet


def read_rows(path: str | Path, fields: Sequence[str] = ("problem", "answer")) -> list[dict[str, Any]]:
    """The rows of a curriculum.

    Raises:
        ValueError: if the file is absent, damaged, of another kind, or a row lacks one of ``fields``.
    """
    file = Path(path)
    if file.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"{path}: no curriculum, expected a .parquet or .jsonl file with {' and '.join(fields)}")
    if not file.exists():
        raise ValueError(f"{path}: there is no such file; data_prep/filter_deepscaler.py writes one")
    try:
        if file.suffix == ".parquet":
            rows = parquet.read_table(file).to_pylist()
        else:
            rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    except (ValueError, ArrowException) as error:
        raise ValueError(f"{path}: cannot be read as {file.suffix[1:]} ({error})") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or not set(fields) <= row.keys():
            raise ValueError(f"{path}: row {number} has no fields {' and '.join(fields)}")
    return rows
