"""Parts of a benchmark, and how its rows become problems."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rlkv.data.problems import text_field
from rlkv.evaluation.sandbox import isolation

Row = tuple[str, dict[str, Any]]  # where it stands (file and line, for errors), its fields


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


class ParsedRow(NamedTuple):
    """A row in the terms of its task: ``texts`` fill the placeholders of the template."""

    texts: dict[str, str]
    answer: str
    meta: dict[str, Any]


@dataclass(frozen=True)
class HubData:
    """A data set of the hub: its id, configuration and split."""

    id: str
    config: str | None = None
    split: str = "test"


@dataclass(frozen=True, kw_only=True)
class EvalTask:
    """A benchmark: everything that the commands need to know about it.

    Attributes:
        kind: what an answer is.
        template: the user's message, with placeholders such as ``{problem}``; the published one if
            known.
        max_new_tokens: the published limit.
        file: the name that a local copy has in a folder of data, without ``.jsonl`` or
            ``.parquet``.
        fields: the names that a row needs, for error messages.
        ids: names that the field with a problem's id may have; without one, problems are numbered.
        hub: where the rows come from without a local file; None if there is no such data set.
        parse: a row, and where it stands, in the terms of the task.
        grade: whether a completion is right.
        select: which rows belong to the task.
        draw: that many held-out problems, for a task without data.
    """

    name: str
    kind: Literal["math", "choice", "code", "instructions"]
    template: str
    max_new_tokens: int
    file: str
    fields: str
    ids: Sequence[str] = ()
    hub: HubData | None
    parse: Callable[[dict[str, Any], str], ParsedRow]
    grade: Callable[[str, EvalProblem], bool]
    select: Callable[[Iterable[Row]], list[Row]] = list
    draw: Callable[[int], Sequence[Mapping[str, Any]]] | None = None

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
            texts, answer, meta = self.parse(row, where)
            key = first_text(row, self.ids, where, default=str(number))
            if key in found:
                raise ValueError(
                    f"{where}: the id {key!r} was that of an earlier row: ids must differ"
                )
            prompt = fill(self.template, texts)
            found[key] = EvalProblem(f"{self.name}/{key}", prompt, answer, meta)
        return list(found.values())


def fill(template: str, texts: Mapping[str, str]) -> str:
    """Fill the placeholders of ``template``; braces in the texts stay as they are."""
    return re.sub(r"\{(\w+)\}", lambda match: texts.get(match[1], match[0]), template)


def first_text(
    row: dict[str, Any], names: Sequence[str], where: str, default: str | None = None
) -> str:
    """Return the first of the fields ``names`` that the row has, as text, else ``default``.

    Raises:
        ValueError: if it has none of them and there is no default, or the field is not text.
    """
    for name in names:
        if name in row:
            return text_field(row, name, where)
    if default is None:
        raise ValueError(
            f"{where} has none of the fields {', '.join(names)}: it has "
            f"{', '.join(sorted(map(str, row)))}"
        )
    return default
