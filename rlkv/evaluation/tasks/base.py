"""What a benchmark is made of, and how its rows become problems."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlkv.data.problems import text_field
from rlkv.evaluation.sandbox import isolation

Kind = Literal["math", "choice", "code", "instructions"]
Row = tuple[str, dict[str, Any]]  # where it stands (file and line, for errors), its fields

_PLACEHOLDER = re.compile(r"\{(problem|options|letters|tests|form)\}")


@dataclass(frozen=True)
class EvalProblem:
    """One problem of a task.

    Attributes:
        id: unique and stable: what result files name it by.
        prompt: the user's message, template included.
        answer: the reference answer: an expression, a letter, or a program; empty where a row has
            none.
        meta: what else the row holds: ``solution`` (maths), ``options`` (choice), tests (code),
            instructions.
    """

    id: str
    prompt: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ParsedRow:
    """A row in the terms of its task: ``texts`` fill the placeholders of the template."""

    key: str
    texts: dict[str, str]
    answer: str
    meta: dict[str, Any]


@dataclass(frozen=True)
class HubData:
    """A data set of the hub: its id, configuration and split."""

    id: str
    config: str | None = None
    split: str = "test"


@dataclass(frozen=True)
class EvalTask:
    """A benchmark.

    Attributes:
        kind: what an answer is, and with it how a completion is judged.
        template: the user's message, with placeholders such as ``{problem}``; the published one if
            known.
        max_new_tokens: the published limit.
        file: the name that a local copy has in a folder of data, without ``.jsonl`` or
            ``.parquet``.
        fields: the names that a row needs, for error messages.
        hub: where the rows come from without a local file; None if there is no such data set.
        parse: a row (fields, where it stands, its number) in the terms of the task.
        grade: whether a completion is right.
        select: which rows belong to the task.
        draw: that many held-out rows, for a task without data.
    """

    name: str
    kind: Kind
    template: str
    max_new_tokens: int
    file: str
    fields: str
    hub: HubData | None
    parse: Callable[[dict[str, Any], str, int], ParsedRow]
    grade: Callable[[str, EvalProblem], bool]
    select: Callable[[Iterable[Row]], list[Row]] = list
    draw: Callable[[int], list[Row]] | None = None

    def problems(self, rows: Iterable[Row]) -> list[EvalProblem]:
        """Return the problems of ``rows``.

        Raises:
            ValueError: if a row is broken, two rows have one id, or answers are programs and this
                machine cannot run them safely: all before any text is generated.
        """
        if self.kind == "code":
            isolation()
        found: dict[str, EvalProblem] = {}
        for number, (where, row) in enumerate(self.select(rows), start=1):
            parsed = self.parse(row, where, number)
            if parsed.key in found:
                raise ValueError(
                    f"{where}: the id {parsed.key!r} was that of an earlier row: ids must differ"
                )
            prompt = fill(self.template, parsed.texts)
            found[parsed.key] = EvalProblem(
                f"{self.name}/{parsed.key}", prompt, parsed.answer, parsed.meta
            )
        return list(found.values())


def fill(template: str, texts: Mapping[str, str]) -> str:
    """Fill the placeholders of ``template``; braces in the texts stay as they are."""
    return _PLACEHOLDER.sub(lambda match: texts[match.group(1)], template)


def first_field(row: Mapping[str, Any], names: tuple[str, ...], where: str) -> str:
    """Return the first of ``names`` that the row has; ``ValueError`` if it has none of them."""
    for name in names:
        if name in row:
            return name
    raise ValueError(
        f"{where} has none of the fields {', '.join(names)}: it has "
        f"{', '.join(sorted(map(str, row)))}"
    )


def text_or(row: dict[str, Any], names: tuple[str, ...], where: str, default: str) -> str:
    """Return the first of ``names`` that the row has as text, or ``default``."""
    for name in names:
        if name in row:
            return text_field(row, name, where)
    return default
