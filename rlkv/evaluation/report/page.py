"""A report of text, tables and plots, written as Markdown, and as one HTML file made from it that loads nothing."""

from __future__ import annotations

import base64
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from rlkv.utils.atomic import write_text

Sign = Literal["better", "worse", "same", ""]
LEVEL = 0.05  # a paired test with a p value below it shows a significant difference
MARKS = {"better": " ▲", "worse": " ▼", "same": "", "": ""}
MARKS_LEGEND = "▲ better, ▼ worse"

# brackets alone are not a link, and an underscore within a word is not emphasis: numbers stay readable as text
_MARKUP = re.compile(r"[\\`*]|<(?=[a-z/!?])|\](?=[(\[:])|(?<!\w)_|_(?!\w)|&(?=#?\w+;)", re.IGNORECASE)
_FIRST = re.compile(r"^(\d*)([#>~]|[-+](?=[\s-]|$)|(?<=\d)[.)](?=\s|$))")

# the texts of a report were written by models: nothing in them is loaded or run
_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ max-width: 78rem; margin: 2rem auto; padding: 0 1.5rem; font: 15px/1.5 system-ui, sans-serif; }}
p, li {{ max-width: 60rem; }}
nav ul {{ list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .25rem 1rem; }}
table {{ display: block; overflow-x: auto; border-collapse: collapse; font-size: .875rem; }}
th, td {{ padding: .35rem .7rem; border: 1px solid #8886; text-align: left; vertical-align: top; }}
pre {{ padding: .75rem; border: 1px solid #8886; white-space: pre-wrap; overflow-wrap: anywhere; }}
img {{ max-width: 100%; background: #fff; }}
</style>
</head>
<body>
"""


def sign_of(difference: float, p_value: float) -> Sign:
    """The sign of a difference to a reference: ``same`` where the paired test finds no significant difference."""
    if p_value >= LEVEL or difference == 0:
        return "same"
    return "better" if difference > 0 else "worse"


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, the mark of its ``sign``, then the lines of ``note``."""

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


Block = Heading | Paragraph | Bullets | Code | Table | Picture


@dataclass
class Page:
    """A title and blocks, in the order in which they were added."""

    title: str
    blocks: list[Block] = field(default_factory=list)

    def heading(self, text: str, level: int = 2) -> None:
        """Begin a section (level 2, listed at the top of the HTML page) or a part of one (level 3)."""
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
        """Add a PNG file, which must exist when an HTML page is made."""
        self.blocks.append(Picture(path, caption))

    def markdown(self, folder: Path) -> str:
        """The page with links to its pictures from ``folder``."""
        parts = [f"# {_line(self.title)}", *(_markdown(block, folder) for block in self.blocks)]
        return "\n\n".join(parts) + "\n"

    def write(self, path: Path) -> None:
        """Write the Markdown atomically."""
        write_text(path, self.markdown(path.parent))

    def write_report(self, folder: Path) -> None:
        """Write ``report.md``, and ``report.html`` made from it."""
        self.write(folder / "report.md")
        write_text(folder / "report.html", html_page(self.markdown(folder), folder))


def html_page(text: str, folder: Path) -> str:
    """Return Markdown as one HTML file, with its pictures (PNG files, linked from ``folder``) embedded.

    HTML in the Markdown is shown as text.  Sections are listed under the title.
    """
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    title = ""
    sections = []
    for token, content in itertools.pairwise(tokens):
        if token.type != "heading_open":
            continue
        words = escape("".join(child.content for child in content.children or ()))
        if token.tag == "h1":
            title = words
        elif token.tag == "h2":
            sections.append(words)
            token.attrSet("id", f"section-{len(sections)}")
    for token in tokens:
        for child in token.children or ():
            if child.type == "image":
                picture = (folder / unquote(str(child.attrs["src"]))).read_bytes()
                child.attrSet("src", f"data:image/png;base64,{base64.b64encode(picture).decode()}")
    body = parser.renderer.render(tokens, parser.options, {})
    links = (f'<li><a href="#section-{i}">{words}</a></li>' for i, words in enumerate(sections, start=1))
    before, end, after = body.partition("</h1>\n")
    return f"{_HEAD.format(title=title)}{before}{end}<nav><ul>{''.join(links)}</ul></nav>\n{after}</body>\n</html>\n"


def _markdown(block: Block, folder: Path) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {_line(text)}"
        case Paragraph(text, strong):
            return f"**{_line(text)}**" if strong else _line(text)
        case Bullets(items):
            return "\n".join(f"- {_line(item)}" for item in items)
        case Code(text):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            return f"{fence}\n{text}\n{fence}"
        case Picture(path, caption):
            return f"![{_line(caption)}](<{os.path.relpath(path, folder)}>)\n\n*{_line(caption)}*"
        case Table(columns, rows, caption):
            lines = ["| " + " | ".join(map(_cell, columns)) + " |", "|" + "---|" * len(columns)]
            lines += ["| " + " | ".join(map(_marked, row)) + " |" for row in rows]
            return "\n".join([f"{_line(caption)}\n", *lines] if caption else lines)


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
