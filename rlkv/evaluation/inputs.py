"""What comparisons read: problems, named gates files, a measured elimination order."""

from __future__ import annotations

import json
from pathlib import Path

from rlkv.cache import CacheSettings
from rlkv.data.deepscaler import load_problems
from rlkv.evaluation.error_modes import RepetitionRule
from rlkv.gates import HeadGates
from rlkv.models import ModelShape
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


def named_gates(items: list[str], reserved: tuple[str, ...] = ()) -> dict[str, HeadGates]:
    """Gates files given as FILE or NAME=FILE, by their names.

    Raises:
        ValueError: if a name is taken twice or ``reserved``, or a file is no gates file.
    """
    named = [
        (name if separator else Path(item).stem, file if separator else item)
        for item in items
        for name, separator, file in [item.partition("=")]
    ]
    names = [name for name, _ in named]
    taken = [name for name in names if names.count(name) > 1 or name in reserved]
    if taken:
        raise ValueError(f"--gates: the name {taken[0]!r} is taken twice or by the table itself: give NAME=FILE")
    return {name: HeadGates.load(file) for name, file in named}


def deployed_sizes(gates: dict[str, HeadGates], sink: int | None, window: int | None) -> tuple[int, int]:
    """Sink and window of compressible heads: as given, else what the gates files say, else 16 and 64.

    Raises:
        ValueError: if files that would decide differ.
    """
    named = {(g.deploy_sink, g.deploy_window) for g in gates.values()} or {(CacheSettings.sink, CacheSettings.window)}
    if len(named) > 1 and (sink is None or window is None):
        found = ", ".join(f"{name} {g.deploy_sink} + {g.deploy_window}" for name, g in gates.items())
        raise ValueError(f"the gates files are for different sinks and windows ({found}): pass --sink and --window")
    default = next(iter(named))
    return default[0] if sink is None else sink, default[1] if window is None else window


def read_order(path: Path, shape: ModelShape) -> list[tuple[int, int]]:
    """The elimination order of a ground-truth file (program ``inference/tiny_ground_truth.py``).

    Raises:
        ValueError: if it is no such file, or names a head that a model of this shape does not have.
    """
    try:
        order = [(step["layer"], step["head"]) for step in json.loads(path.read_text())["elimination"]]
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"--oracle {path} is no ground-truth file with an elimination order ({error})") from None
    if not all(0 <= layer < shape.num_layers and 0 <= head < shape.num_kv_heads for layer, head in order):
        raise ValueError(
            f"--oracle {path} names heads that a model with {shape.num_layers} layers x {shape.num_kv_heads} KV "
            "heads does not have"
        )
    return order


def repetition_rule(text: str) -> RepetitionRule:
    """The rule that ``--repetition WINDOW,DISTINCT`` says.

    Raises:
        ValueError: unless it is two numbers.
    """
    sizes = [int(n) for n in numbers(text, "--repetition", 1, 1_000_000)]
    if len(sizes) != 2:
        raise ValueError(f"--repetition {text!r} must be two numbers, WINDOW,DISTINCT, such as 400,40")
    return RepetitionRule(*sizes)


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
