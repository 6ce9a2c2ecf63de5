"""Problems with their answers: from the hub, a file, or drawn for a built-in model."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkv import smol, tiny
from rlkv.models.builtin import SMOL, TINY, dataset_rows
from rlkv.models.shape import same_model
from rlkv.utils.files import at_home, read_jsonl
from rlkv.utils.runtime import first_line, require

if TYPE_CHECKING:
    from datasets import Dataset

HUB_DATASET = "agentica-org/DeepScaleR-Preview-Dataset"
SUFFIXES = (".jsonl", ".parquet")
DRAWN = 400  # new problems, unless their number is given
_ADVICE = (
    "pass a local file with --input FILE.jsonl (or .parquet) and a local model with --model "
    "FOLDER, or take the built-in model and its problems with --model tiny"
)


@dataclass(frozen=True)
class Problem:
    """A problem; its answer and its reference solution are empty where the data set has none."""

    problem: str
    answer: str
    solution: str = ""


def load_problems(
    source: str, num_problems: int | None = None, seed: int = 0, limit: int | None = None
) -> list[Problem]:
    """Load the problems of ``source``, in its order, at most ``limit``.

    ``source`` is ``tiny`` or ``smol`` (``num_problems`` new ones drawn with ``seed``, else 400), a
    local ``.jsonl`` or ``.parquet`` file with the fields problem, answer and perhaps solution, or
    the id of a hub data set.

    Raises:
        ValueError: if the source is absent or unreachable, a row of it is broken (names file and
            row), or ``num_problems`` is given for problems that are not drawn.
    """
    if source in (TINY, SMOL):
        draw = tiny.problems if source == TINY else smol.problems
        loaded = [Problem(**row) for row in draw(num_problems or DRAWN, seed)]
    elif num_problems is not None:
        raise ValueError(
            f"--num-problems {num_problems} belongs to new problems of tiny and smol, not to "
            f"{source}: leave it out, also of --config, and give --limit"
        )
    else:
        loaded = [parse_problem(row, where) for where, row in read_rows(source)]
    if not loaded:
        raise ValueError(f"{source} holds no problems")
    return loaded[:limit]


def recorded_outputs(path: str, field: str, problems: list[Problem]) -> dict[int, str]:
    """Return the recorded outputs by the index of their problem, found by the problem's text.

    Where a problem occurs several times, its first occurrence gets the first output, and so on.

    Raises:
        ValueError: if no output of the file belongs to any problem.
    """
    recorded: dict[str, deque[str]] = defaultdict(deque)
    for where, row in read_rows(path):
        recorded[text_field(row, "problem", where)].append(text_field(row, field, where))
    found = {}
    for index, problem in enumerate(problems):
        if recorded[problem.problem]:
            found[index] = recorded[problem.problem].popleft()
    if not found:
        raise ValueError(
            f"no recorded output in {path} belongs to a problem of the input: the problem texts "
            "differ"
        )
    return found


def read_curriculum(
    path: str | Path, fields: Sequence[str] = ("problem", "answer")
) -> list[dict[str, Any]]:
    """Read the rows of a curriculum that ``rlkv-filter`` wrote, as Parquet or JSONL.

    Raises:
        ValueError: if the file is absent, damaged, of another kind, or a row lacks one of
            ``fields``.
    """
    if Path(path).suffix not in SUFFIXES:
        raise ValueError(
            f"{path}: not a curriculum, expected a .parquet or .jsonl file with "
            f"{' and '.join(fields)}"
        )
    if not Path(path).exists():
        raise ValueError(f"{path}: there is no such file; rlkv-filter writes one")
    rows = []
    for where, row in read_rows(str(path)):
        if not set(fields) <= row.keys():
            raise ValueError(f"{where} has no fields {' and '.join(fields)}")
        found = parse_problem({name: row[name] for name in ("problem", "answer")}, where)
        rows.append(row | {"problem": found.problem, "answer": found.answer})
    return rows


def curriculum_template(path: str | Path | None) -> str | None:
    """Return the prompt template of a curriculum's outputs, or None if it does not say.

    Raises:
        ValueError: if its rows name several, and as :func:`read_curriculum`.
    """
    names = set() if path is None else {row.get("template") for row in read_curriculum(path)}
    if len(names) > 1:
        found = ", ".join(sorted(map(str, names)))
        raise ValueError(
            f"{path}: its rows name several prompt templates ({found}): pass --template"
        )
    return next(iter(names), None)


def other_models(path: str | Path, model: str) -> list[str]:
    """Return the models other than ``model`` that a curriculum's rows name as their source."""
    named = {str(row["model"]) for row in read_curriculum(path) if row.get("model")}
    return sorted(name for name in named if not same_model(name, model))


def hold_out(curriculum: Dataset, number: int, args: Any) -> tuple[Dataset, Dataset | None]:
    """Return the problems to train on and those held out, drawn with the seed of ``args``.

    The latter are None where ``number`` is 0.

    Raises:
        ValueError: if none would be left, or the processes cannot share out the others evenly.
    """
    if number == 0:
        return curriculum, None
    if number >= len(curriculum):
        raise ValueError(
            f"held_out={number} leaves none of {len(curriculum)} problems to train on: lower it"
        )
    if number % args.world_size:
        raise ValueError(
            f"held_out={number} is not a multiple of the {args.world_size} processes: change it"
        )
    parts = curriculum.train_test_split(test_size=number, seed=args.seed)
    held = list(parts["test"]["prompt"])
    # a curriculum may have a problem twice, also with its answer in two forms
    others = [at for at, prompt in enumerate(parts["train"]["prompt"]) if prompt not in held]
    return parts["train"].select(others), parts["test"]


def read_rows(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``(where, row)`` of a local JSONL or Parquet file or a hub data set.

    ``where`` names file and row.

    Raises:
        ValueError: as :func:`load_problems`.
    """
    path = at_home(source)
    if path.suffix not in SUFFIXES and not path.exists():
        yield from dataset_rows(source, "train", f"data set {source!r}", _ADVICE)
    elif not path.is_file():
        fault = "is no file" if path.exists() else "does not exist"
        raise ValueError(
            f"{source} {fault}: pass a .jsonl or .parquet file, or a data set of the hub"
        )
    elif path.suffix == ".jsonl":
        yield from read_jsonl(path)
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path)
    else:
        raise ValueError(f"{source} is neither .jsonl nor .parquet: convert it, one problem a row")


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    parquet = require("pyarrow.parquet", "train")
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a readable Parquet file: {first_line(error)}") from None
    yield from ((f"{path} row {number}", row) for number, row in enumerate(rows, start=1))


def parse_problem(row: dict[str, Any], where: str) -> Problem:
    """Return a row as a problem; ``ValueError`` with ``where`` if a field is missing or no text."""
    problem = text_field(row, "problem", where)
    if not problem.strip():
        raise ValueError(f"{where}: field 'problem' is empty")
    solution = text_field(row, "solution", where) if "solution" in row else ""
    return Problem(problem, text_field(row, "answer", where), solution)


def text_field(row: dict[str, Any], name: str, where: str) -> str:
    """Return the field as text: a number as its digits, null as nothing.

    Raises:
        ValueError: if there is no such field, or it is something else; names ``where``.
    """
    if name not in row:
        raise ValueError(
            f"{where} has no field {name!r}: it has {', '.join(sorted(map(str, row))) or 'none'}"
        )
    value = row[name]
    if value is None:
        return ""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {name!r} is a {type(value).__name__}, expected text")
    # tokenizers and Parquet refuse half a surrogate pair
    return value.encode("utf-8", "replace").decode()
