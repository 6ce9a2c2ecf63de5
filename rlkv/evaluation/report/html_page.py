"""A report as one HTML file: text, tables and pictures, all inside the file; nothing is loaded from anywhere.

    page = Page("Evaluation of tiny")
    page.heading("Accuracy")
    page.table(["method", "math500"], [["full", "0.91"], ["rlkv@0.5", Cell("0.90 (-0.01)", "same")]], "pass@1, n = 500")
    page.picture(Path("accuracy.png"), "Accuracy against sparsity")
    page.write(Path("report.html"))

Every text is escaped.  :mod:`rlkv.evaluation.report.markdown_page` writes the same page as Markdown.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlkv.utils.atomic import atomic_path

Sign = Literal["better", "worse", "same", ""]
SIGNS: tuple[Sign, ...] = ("better", "worse", "same", "")
LEVEL = 0.05  # p value of a paired test from which on two runs are not told apart
PNG = b"\x89PNG\r\n\x1a\n"


def sign_of(difference: float, p_value: float, level: float = LEVEL) -> Sign:
    """Which sign a difference to a reference has: ``same`` where the paired test does not tell the two apart."""
    if p_value >= level or difference == 0:
        return "same"
    return "better" if difference > 0 else "worse"


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    ``sign`` is its colour (``better``, ``worse``, ``same`` = not told apart, empty: none); the lines of ``note`` stand
    below the text in small print.

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
    """``level`` 2 (a section, listed under the title) or 3."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """Plain text; ``strong`` for what a hurried reader should see."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Bullets:
    """A list of plain texts."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Code:
    """A command or a file, as it is."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of as many cells as there are columns; the first one names the row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""


@dataclass(frozen=True)
class Picture:
    """A PNG file, inlined when the page is written."""

    path: Path
    caption: str


Block = Heading | Paragraph | Bullets | Code | Table | Picture


@dataclass
class Page:
    """A title and blocks, in the order in which they were added."""

    title: str
    blocks: list[Block] = field(default_factory=list)

    def heading(self, text: str, level: int = 2) -> None:
        """Begin a section (level 2) or a part of one (level 3)."""
        if level not in (2, 3):
            raise ValueError(f"heading {text!r} has level {level}: 2 is a section, 3 a part of one")
        self.blocks.append(Heading(text, level))

    def paragraph(self, text: str, strong: bool = False) -> None:
        self.blocks.append(Paragraph(text, strong))

    def bullets(self, items: Sequence[str]) -> None:
        self.blocks.append(Bullets(tuple(items)))

    def code(self, text: str) -> None:
        self.blocks.append(Code(text))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Cell | str]], caption: str = "") -> None:
        """Add a table; a ``str`` is a cell without a sign.

        Raises:
            ValueError: if a row has not as many cells as there are columns.
        """
        cells = tuple(tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row) for row in rows)
        for row in cells:
            if len(row) != len(columns):
                raise ValueError(f"table {caption!r}: a row has {len(row)} cells for {len(columns)} columns")
        self.blocks.append(Table(tuple(columns), cells, caption))

    def picture(self, path: Path, caption: str) -> None:
        """Add a PNG file, which must exist when the page is written."""
        self.blocks.append(Picture(path, caption))

    def html(self) -> str:
        """The whole document.

        Raises:
            ValueError: if a picture is no PNG file.
        """
        ids = _anchors([block for block in self.blocks if isinstance(block, Heading)])
        sections = [block for block in self.blocks if isinstance(block, Heading) and block.level == 2]
        links = "".join(f'<li><a href="#{ids[id(block)]}">{_text(block.text)}</a></li>' for block in sections)
        body = "\n".join(_render(block, ids) for block in self.blocks)
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            # the browser itself refuses whatever is not in this file
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
            'img-src data:">\n'
            f"<title>{_text(self.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
            f"<h1>{_text(self.title)}</h1>\n"
            + (f"<nav><ul>{links}</ul></nav>\n" if len(sections) > 1 else "")
            + f"{body}\n</main>\n</body>\n</html>\n"
        )

    def write(self, path: Path) -> None:
        """Write the document in one move."""
        content = self.html()
        with atomic_path(path) as partial:
            partial.write_text(content, encoding="utf-8")


def _text(text: str) -> str:
    return html.escape(text, quote=True)


def _anchors(headings: list[Heading]) -> dict[int, str]:
    found: dict[int, str] = {}
    for heading in headings:
        name = re.sub(r"[^a-z0-9]+", "-", heading.text.lower()).strip("-") or "section"
        taken = set(found.values())
        found[id(heading)] = name if name not in taken else f"{name}-{len(found)}"
    return found


def _render(block: Block, ids: dict[int, str]) -> str:
    match block:
        case Heading():
            return f'<h{block.level} id="{ids[id(block)]}">{_text(block.text)}</h{block.level}>'
        case Paragraph():
            kind = ' class="strong"' if block.strong else ""
            return f"<p{kind}>{_text(block.text)}</p>"
        case Bullets():
            return "<ul>" + "".join(f"<li>{_text(item)}</li>" for item in block.items) + "</ul>"
        case Code():
            return f"<pre><code>{_text(block.text)}</code></pre>"
        case Table():
            return _table(block)
        case Picture():
            return _picture(block)


def _table(table: Table) -> str:
    caption = f"<figcaption>{_text(table.caption)}</figcaption>" if table.caption else ""
    head = "".join(f'<th scope="col">{_text(column)}</th>' for column in table.columns)
    lines = []
    for first, *others in table.rows:
        cells = [f'<th scope="row"{_sign(first)}>{_content(first)}</th>']
        cells += [f"<td{_sign(cell)}>{_content(cell)}</td>" for cell in others]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    return (
        f'<figure>{caption}<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n'
        "</table></div></figure>"
    )


def _content(cell: Cell) -> str:
    if not cell.note:
        return _text(cell.text)
    return f'<span class="main">{_text(cell.text)}</span><small>{_text(cell.note)}</small>'


def _sign(cell: Cell) -> str:
    return f' class="{cell.sign}"' if cell.sign else ""


def _picture(picture: Picture) -> str:
    content = picture.path.read_bytes()
    if not content.startswith(PNG):
        raise ValueError(f"{picture.path} is no PNG file: only PNG pictures are put into a page")
    encoded = base64.b64encode(content).decode()
    caption = _text(picture.caption)
    return (
        f'<figure><img src="data:image/png;base64,{encoded}" alt="{caption}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5c6670; --paper: #ffffff; --line: #d9dee3;
  --head: #f3f5f7; --link: #0b5cad; --better: #d8f0dd; --worse: #fbdcd8; --same: #eceff2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #a3adb6; --paper: #16191d; --line: #363d45;
  --head: #22272d; --link: #7cb7f5; --better: #1d4429; --worse: #5a2622; --same: #2b3138; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 78rem; margin: 0 auto; padding: 1.5rem 1.5rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: .5rem 0 1rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.75rem 0 .5rem; }
p, li { max-width: 60rem; }
p { margin: .6rem 0; }
p.strong { font-weight: 600; }
a { color: var(--link); }
nav ul { list-style: none; padding: 0; margin: 0 0 1rem; display: flex; flex-wrap: wrap; gap: .25rem 1rem; }
figure { margin: 1rem 0 1.5rem; }
figcaption { color: var(--soft); font-size: .875rem; max-width: 60rem; margin: .35rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; border: 1px solid var(--line); text-align: left; vertical-align: top; }
thead th { background: var(--head); font-weight: 600; }
tbody th { font-weight: 500; white-space: nowrap; }
td .main { white-space: nowrap; }
small { display: block; white-space: pre; font-size: .75rem; line-height: 1.4; color: var(--soft); }
.better { background: var(--better); }
.worse { background: var(--worse); }
.same { background: var(--same); }
pre { background: var(--head); border: 1px solid var(--line); border-radius: 4px; padding: .75rem; overflow-x: auto;
  font: .8125rem/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; white-space: pre-wrap; }
img { max-width: 100%; height: auto; background: #ffffff; border: 1px solid var(--line); border-radius: 4px; }
@media print { body { font-size: 10pt; } main { max-width: none; padding: 0; } nav { display: none; }
  figure, tr { break-inside: avoid; } h2, h3 { break-after: avoid; } .wide { overflow: visible; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
