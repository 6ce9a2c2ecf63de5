"""A page (:mod:`rlkv.evaluation.report.html_page`) as Markdown, for readers of a repository."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlkv.evaluation.report.html_page import Cell, Page
from rlkv.utils.atomic import atomic_path

MARKS = {"better": " ▲", "worse": " ▼", "same": "", "": ""}
LEGEND = "▲ better, ▼ worse"

# brackets alone are not a link, and an underscore within a word is not emphasis: numbers stay readable as text
_MARKUP = re.compile(r"[\\`*]|<(?=[a-z/!?])|\](?=[(\[:])|(?<!\w)_|_(?!\w)|&(?=#?\w+;)", re.IGNORECASE)
_FIRST = re.compile(r"^(\d*)([#>]|[-+](?=\s)|(?<=\d)[.)](?=\s))")


def markdown(page: Page, folder: Path) -> str:
    """The page; pictures are links relative to ``folder``, where the text will be.

    The colours of cells become marks (:data:`LEGEND`); a cell without a significant difference has none.
    """

    def relative(picture: Path) -> str:
        return Path(os.path.relpath(picture, folder)).as_posix()

    return page.render("page.md", line=_line, cell=_cell, marked=_marked, relative=relative)


def write_markdown(page: Page, path: Path) -> None:
    """Write the page atomically."""
    with atomic_path(path) as partial:
        partial.write_text(markdown(page, path.parent), encoding="utf-8")


def _marked(cell: Cell) -> str:
    note = "; ".join(cell.note.splitlines())
    return _cell(cell.text) + MARKS[cell.sign] + (f" {_cell(note)}" if note else "")


def _line(text: str) -> str:
    """``text`` on one line; what Markdown or HTML would read as markup is escaped."""
    text = " ".join(text.split())
    return _FIRST.sub(r"\1\\\2", _MARKUP.sub(r"\\\g<0>", text), count=1)


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")
