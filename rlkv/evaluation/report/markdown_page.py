"""A page (:mod:`rlkv.evaluation.report.html_page`) as Markdown, for readers of a repository."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlkv.evaluation.report.html_page import Block, Bullets, Cell, Code, Heading, Page, Paragraph, Picture, Table
from rlkv.utils.atomic import atomic_path

MARKS = {"better": " ▲", "worse": " ▼", "same": "", "": ""}
LEGEND = "▲ better, ▼ worse"

# brackets alone are no link, an underscore within a word is none of emphasis: figures stay readable as text
_MARKUP = re.compile(r"[\\`*]|<(?=[a-z/!?])|\](?=[(\[:])|(?<!\w)_|_(?!\w)|&(?=#?\w+;)", re.IGNORECASE)
_FIRST = re.compile(r"^(\d*)([#>]|[-+](?=\s)|(?<=\d)[.)](?=\s))")


def markdown(page: Page, folder: Path) -> str:
    """The page; pictures are links relative to ``folder``, where the text will lie.

    The colours of cells become marks (:data:`LEGEND`); a cell that is not told apart has none.
    """
    blocks = [_render(block, folder) for block in page.blocks]
    return "\n\n".join([f"# {_line(page.title)}", *blocks]) + "\n"


def write_markdown(page: Page, path: Path) -> None:
    """Write the page in one move."""
    with atomic_path(path) as partial:
        partial.write_text(markdown(page, path.parent), encoding="utf-8")


def _render(block: Block, folder: Path) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {_line(block.text)}"
        case Paragraph():
            return f"**{_line(block.text)}**" if block.strong else _line(block.text)
        case Bullets():
            return "\n".join(f"- {_line(item)}" for item in block.items)
        case Code():
            return f"```\n{block.text}\n```"
        case Table():
            return _table(block)
        case Picture():
            place = Path(os.path.relpath(block.path, folder)).as_posix()
            return f"![{_line(block.caption)}](<{place}>)\n\n*{_line(block.caption)}*"


def _table(table: Table) -> str:
    lines = ["| " + " | ".join(_cell(column) for column in table.columns) + " |", "|---" * len(table.columns) + "|"]
    for row in table.rows:
        lines.append("| " + " | ".join(map(_marked, row)) + " |")
    return "\n".join([*([_line(table.caption), ""] if table.caption else []), *lines])


def _marked(cell: Cell) -> str:
    note = "; ".join(cell.note.splitlines())
    return _cell(cell.text) + MARKS[cell.sign] + (f" {_cell(note)}" if note else "")


def _line(text: str) -> str:
    """``text`` on one line; what Markdown or HTML would read as markup stands as it is."""
    text = " ".join(text.split())
    return _FIRST.sub(r"\1\\\2", _MARKUP.sub(r"\\\g<0>", text), count=1)


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")
