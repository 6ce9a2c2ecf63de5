"""A report of text, tables and plots: one HTML file that loads nothing, and the same as Markdown (``templates/``)."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from rlkv.utils.atomic import write_text

Sign = Literal["better", "worse", "same", ""]
LEVEL = 0.05  # a paired test with a p value below it shows a significant difference
MARKS = {"better": " ▲", "worse": " ▼", "same": "", "": ""}
MARKS_LEGEND = "▲ better, ▼ worse"

# brackets alone are not a link, and an underscore within a word is not emphasis: numbers stay readable as text
_MARKUP = re.compile(r"[\\`*]|<(?=[a-z/!?])|\](?=[(\[:])|(?<!\w)_|_(?!\w)|&(?=#?\w+;)", re.IGNORECASE)
_FIRST = re.compile(r"^(\d*)([#>]|[-+](?=\s)|(?<=\d)[.)](?=\s))")


def sign_of(difference: float, p_value: float) -> Sign:
    """The sign of a difference to a reference: ``same`` where the paired test finds no significant difference."""
    if p_value >= LEVEL or difference == 0:
        return "same"
    return "better" if difference > 0 else "worse"


@dataclass(frozen=True)
class Cell:
    """A cell of a table; ``sign`` is its colour, the lines of ``note`` stand below the text in small print."""

    text: str
    sign: Sign = ""
    note: str = ""


class Heading(NamedTuple):
    text: str
    level: int


class Paragraph(NamedTuple):
    text: str
    strong: bool


class Bullets(NamedTuple):
    items: tuple[str, ...]


class Code(NamedTuple):
    text: str


class Table(NamedTuple):
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str


class Picture(NamedTuple):
    path: Path
    caption: str


class Drawing(NamedTuple):
    markup: str
    caption: str


@dataclass
class Page:
    """A title and blocks, in the order in which they were added; ``script`` runs in the HTML page."""

    title: str
    blocks: list[Heading | Paragraph | Bullets | Code | Table | Picture | Drawing] = field(default_factory=list)
    script: str = ""

    def heading(self, text: str, level: int = 2) -> None:
        """Begin a section (level 2, listed under the title) or a part of one (level 3)."""
        self.blocks.append(Heading(text, level))

    def paragraph(self, text: str, strong: bool = False) -> None:
        self.blocks.append(Paragraph(text, strong))

    def bullets(self, items: Sequence[str]) -> None:
        self.blocks.append(Bullets(tuple(items)))

    def code(self, text: str) -> None:
        """Add a command or a file, as it is."""
        self.blocks.append(Code(text))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Cell | str]], caption: str = "") -> None:
        """Add a table; the first cell of a row names it, a ``str`` is a cell without a sign."""
        for row in rows:
            if len(row) != len(columns):
                raise ValueError(f"table {caption!r}: a row has {len(row)} cells for {len(columns)} columns")
        cells = tuple(tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row) for row in rows)
        self.blocks.append(Table(tuple(columns), cells, caption))

    def records(self, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], caption: str = "") -> None:
        """Add a table of ``rows``; ``columns``: the format of a cell by its title, empty where a row lacks a value."""

        def cell(form: str, row: Mapping[str, Any]) -> str:
            try:
                return form.format(**row)
            except (KeyError, TypeError):
                return ""

        self.table(list(columns), [[cell(form, row) for form in columns.values()] for row in rows], caption)

    def picture(self, path: Path, caption: str) -> None:
        """Add a PNG file, which must exist when the page is written."""
        self.blocks.append(Picture(path, caption))

    def drawing(self, markup: str, caption: str = "") -> None:
        """Add HTML or SVG as it is; Markdown has the caption alone."""
        self.blocks.append(Drawing(markup, caption))

    def html(self) -> str:
        """The whole document."""
        return self._render("page.html", slug=_slug, png=lambda path: base64.b64encode(path.read_bytes()).decode())

    def markdown(self, folder: Path) -> str:
        """The page with links to its pictures from ``folder``, and with marks (:data:`MARKS`) instead of colours."""
        relative = partial(os.path.relpath, start=folder)
        return self._render("page.md", line=_line, cell=_cell, marked=_marked, relative=relative)

    def write(self, path: Path) -> None:
        """Write the page atomically: as Markdown if ``path`` ends with ``.md``, else as HTML."""
        write_text(path, self.markdown(path.parent) if path.suffix == ".md" else self.html())

    def _render(self, template: str, **filters: Callable[..., str]) -> str:
        environment = Environment(
            loader=PackageLoader("rlkv.evaluation.report"),
            autoescape=select_autoescape(),  # of .html only
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters.update(filters)
        blocks = [(type(block).__name__, block) for block in self.blocks]
        return environment.get_template(template).render(title=self.title, blocks=blocks, script=self.script)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _marked(cell: Cell) -> str:
    note = "; ".join(cell.note.splitlines())
    return _cell(cell.text) + MARKS[cell.sign] + (f" {_cell(note)}" if note else "")


def _line(text: str) -> str:
    """``text`` on one line; what Markdown or HTML would read as markup is escaped."""
    text = " ".join(text.split())
    return _FIRST.sub(r"\1\\\2", _MARKUP.sub(r"\\\g<0>", text), count=1)


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")


def provenance_facts(origin: dict[str, Any]) -> list[str]:
    """A sentence each on hardware, versions and time, from :func:`rlkv.utils.provenance.provenance`."""
    machine = origin["hardware"]
    return [
        f"Hardware: {machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} torch threads, "
        f"GPU {', '.join(machine['gpus']) or 'none'}.",
        f"Versions: {', '.join(f'{name} {version}' for name, version in origin['versions'].items())}.",
        f"Finished {origin['finished']}.",
    ]
