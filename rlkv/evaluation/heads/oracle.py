"""Ground-truth files (program ``inference/tiny_ground_truth.py``): what each head is measured to be needed for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rlkv.models.shape import ModelShape

ORACLE = "oracle (measured)"


def read_order(path: Path, shape: ModelShape) -> list[tuple[int, int]]:
    """The elimination order; an elimination that stops early leaves out the heads that are needed most.

    Raises:
        ValueError: if it is not such a file, names a head twice, or one that a model of this shape does not have.
    """
    try:
        order = [(step["layer"], step["head"]) for step in json.loads(path.read_text())["elimination"]]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--oracle {path} is not a ground-truth file with an elimination order ({error})") from None
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
