"""A report as one HTML file with its text, tables and plots; it loads nothing.

    page = Page("Evaluation of tiny")
    page.heading("Accuracy")
    page.table(["method", "math500"], [["full", "0.91"], ["rlkv@0.5", Cell("0.90 (-0.01)", "same")]], "pass@1, n = 500")
    page.picture(Path("accuracy.png"), "Accuracy against sparsity")
    page.write(Path("report.html"))

The layout is in ``templates/``.  :mod:`rlkv.evaluation.report.markdown_page` writes the same page as Markdown.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from rlkv.utils.atomic import atomic_path

Sign = Literal["better", "worse", "same", ""]
SIGNS: tuple[Sign, ...] = ("better", "worse", "same", "")
LEVEL = 0.05  # a paired test with a p value below it shows a significant difference
PNG = b"\x89PNG\r\n\x1a\n"


def sign_of(difference: float, p_value: float, level: float = LEVEL) -> Sign:
    """The sign of a difference to a reference: ``same`` where the paired test finds no significant difference."""
    if p_value >= level or difference == 0:
        return "same"
    return "better" if difference > 0 else "worse"


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    ``sign`` is its colour (``better``, ``worse``, ``same``: no significant difference, empty: none); the lines of
    ``note`` stand below the text in small print.

    Raises:
        ValueError: for another sign.
    """

    text: str
    sign: Sign = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.sign not in SIGNS:
            raise ValueError(f"a cell cannot have the sign {self.sign!r}: choose better, worse, same or an empty one")


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    text: str
    strong: bool = False


@dataclass(frozen=True)
class Bullets:
    items: tuple[str, ...]


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Table:
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""


@dataclass(frozen=True)
class Picture:
    path: Path
    caption: str


Block = Heading | Paragraph | Bullets | Code | Table | Picture


@dataclass
class Page:
    """A title and blocks, in the order in which they were added."""

    title: str
    blocks: list[Block] = field(default_factory=list)

    def heading(self, text: str, level: int = 2) -> None:
        """Begin a section (level 2, listed under the title) or a part of one (level 3)."""
        if level not in (2, 3):
            raise ValueError(f"heading {text!r} has level {level}: 2 is a section, 3 a part of one")
        self.blocks.append(Heading(text, level))

    def paragraph(self, text: str, strong: bool = False) -> None:
        self.blocks.append(Paragraph(text, strong))

    def bullets(self, items: Sequence[str]) -> None:
        self.blocks.append(Bullets(tuple(items)))

    def code(self, text: str) -> None:
        """Add a command or a file, as it is."""
        self.blocks.append(Code(text))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Cell | str]], caption: str = "") -> None:
        """Add a table; the first cell of a row names it, a ``str`` is a cell without a sign.

        Raises:
            ValueError: unless every row has as many cells as there are columns.
        """
        for row in rows:
            if len(row) != len(columns):
                raise ValueError(f"table {caption!r}: a row has {len(row)} cells for {len(columns)} columns")
        cells = tuple(tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row) for row in rows)
        self.blocks.append(Table(tuple(columns), cells, caption))

    def picture(self, path: Path, caption: str) -> None:
        """Add a PNG file, which must exist when the page is written."""
        self.blocks.append(Picture(path, caption))

    def html(self) -> str:
        """The whole document; a ``ValueError`` if a picture is not a PNG file."""
        return self.render("page.html", slug=_slug, png=_base64)

    def write(self, path: Path) -> None:
        """Write the document atomically."""
        content = self.html()
        with atomic_path(path) as partial:
            partial.write_text(content, encoding="utf-8")

    def render(self, template: str, **filters: Callable[..., str]) -> str:
        """The page by a template of this package; only ``.html`` ones escape texts themselves."""
        environment = Environment(
            loader=PackageLoader("rlkv.evaluation.report"),
            autoescape=select_autoescape(),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters.update(filters)
        blocks = [(type(block).__name__, block) for block in self.blocks]
        return environment.get_template(template).render(title=self.title, blocks=blocks)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _base64(picture: Path) -> str:
    content = picture.read_bytes()
    if not content.startswith(PNG):
        raise ValueError(f"{picture} is not a PNG file: only PNG pictures are put into a page")
    return base64.b64encode(content).decode()
