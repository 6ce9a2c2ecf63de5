"""What comparisons read: problems, a measured elimination order."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rlkv.data.deepscaler import load_problems
from rlkv.evaluation.stats.error_modes import RepetitionRule
from rlkv.models.shape import ModelShape
from rlkv.tiny import problems as tiny_problems

ORACLE = "oracle (measured)"


def study_problems(path: Path | None, n: int, seed: int, definitions: str) -> list[dict[str, str]]:
    """The first ``n`` problems of a JSONL or Parquet file, or ``n`` fresh ones of the tiny task.

    Args:
        definitions: chain lengths of the drawn problems, such as ``3-12``.

    Raises:
        ValueError: if the file is absent or a row of it is broken (names it), a problem has no answer, or
            ``definitions`` is no range.
    """
    if path is None:
        low, _, high = definitions.partition("-")
        if not (low.isdigit() and high.isdigit()):
            raise ValueError(f"--definitions {definitions!r} is no range: write it as 3-12")
        return tiny_problems(n, seed, int(low), int(high))
    if not path.exists():
        raise ValueError(f"--input {path} does not exist: give a .jsonl or .parquet file of problems with answers")
    problems = load_problems(str(path), limit=n)
    blank = sum(not p.answer.strip() for p in problems)
    if blank:
        raise ValueError(
            f"--input {path}: {blank} of {len(problems)} problems have no answer to compare with: drop them"
        )
    return [{"problem": p.problem, "answer": p.answer} for p in problems]


def read_order(path: Path, shape: ModelShape) -> list[tuple[int, int]]:
    """The elimination order of a ground-truth file (program ``inference/tiny_ground_truth.py``).

    An elimination that stops early leaves out the heads that are needed most.

    Raises:
        ValueError: if it is no such file, names a head twice, or one that a model of this shape does not have.
    """
    try:
        order = [(step["layer"], step["head"]) for step in json.loads(path.read_text())["elimination"]]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--oracle {path} is no ground-truth file with an elimination order ({error})") from None
    if not all(0 <= layer < shape.num_layers and 0 <= head < shape.num_kv_heads for layer, head in order):
        raise ValueError(
            f"--oracle {path} names heads that a model with {shape.num_layers} layers x {shape.num_kv_heads} KV "
            "heads does not have"
        )
    if len(set(order)) < len(order):
        raise ValueError(f"--oracle {path} eliminates a head twice: every head can go once")
    return order


def read_truth(path: Path, shape: ModelShape) -> dict[str, Any]:
    """A ground-truth file, whole, with what :func:`rlkv.evaluation.heads.agreement.agreement` needs.

    Raises:
        ValueError: as :func:`read_order`, and unless it has a number for the accuracy lost by each head.
    """
    read_order(path, shape)
    truth: dict[str, Any] = json.loads(path.read_text())
    lost = truth.get("accuracy_lost_by_single_head")
    rows = lost if isinstance(lost, list) else []
    sizes = [len(row) if isinstance(row, list) else None for row in rows]
    if sizes != [shape.num_kv_heads] * shape.num_layers or not all(_is_number(value) for row in rows for value in row):
        raise ValueError(
            f"--oracle {path}: accuracy_lost_by_single_head must be {shape.num_layers} lists of {shape.num_kv_heads} "
            "numbers, the accuracy that each head alone costs: measure it with inference/tiny_ground_truth.py"
        )
    return truth


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def repetition_rule(text: str) -> RepetitionRule:
    """The rule that ``--repetition WINDOW,DISTINCT`` says.

    Raises:
        ValueError: unless it is two whole numbers, the second not above the first: fewer distinct tokens than that
            would be in every window.
    """
    sizes = numbers(text, "--repetition", 1, 1_000_000)
    if len(sizes) != 2 or any(size != int(size) for size in sizes):
        raise ValueError(f"--repetition {text!r} must be two whole numbers, WINDOW,DISTINCT, such as 400,40")
    window, distinct = map(int, sizes)
    if distinct > window:
        raise ValueError(
            f"--repetition {text!r}: a window of {window} tokens never holds {distinct} distinct ones, so every text "
            "would be repetitive: give WINDOW,DISTINCT, such as 400,40"
        )
    return RepetitionRule(window, distinct)


def numbers(text: str, option: str, low: float, high: float) -> list[float]:
    """Comma-separated numbers within [low, high].

    Raises:
        ValueError: for anything else.
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text!r} must be numbers separated by commas") from None
    if not all(low <= value <= high for value in values):
        raise ValueError(f"{option} {text!r} holds a number outside {low:g} to {high:g}")
    return values
