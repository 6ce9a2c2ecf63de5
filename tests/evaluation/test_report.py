"""Pages in Markdown with everything escaped, the HTML made from them, number formats, plots."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from html import escape, unescape
from pathlib import Path

import pytest

from rlkv.evaluation.measurements import accuracy_of, compare
from rlkv.evaluation.report import (
    Page,
    Panel,
    accuracy_cell,
    difference_cell,
    html_page,
    mark,
    p_number,
    plot_curves,
    seeds_text,
)
from tests.helpers.study_fakes import outcome

HOSTILE = """<script src="https://example.org/x.js">'&"</script> | *a*"""
FULL = outcome("1" * 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a report whose every text is hostile, with a plot."""
    folder = tmp_path_factory.mktemp("report")
    panel = Panel("t", "x", {"a": [(1, 0.5, 0.4, 0.6)], "b": [(1, 0.2, 0.2, 0.2)]}, reference=0.9)
    picture = plot_curves(folder / "a plot.png", panel)
    made = Page(f"title {HOSTILE}")
    made.heading(f"first {HOSTILE}")
    made.paragraph(f"text {HOSTILE}", strong=True)
    made.bullets([f"item {HOSTILE}"])
    made.code(f"code {HOSTILE}")
    made.heading("second")
    made.heading("third", level=3)
    made.table(["method", HOSTILE], [[HOSTILE, HOSTILE], ["b", "c"]], f"caption {HOSTILE}")
    made.picture(picture, f"picture {HOSTILE}")
    made.write_report(folder)
    return folder


def test_every_text_is_escaped_and_the_page_loads_nothing(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    text = unescape(re.sub("<[^>]*>", "", page.partition("<body>")[2]))
    for part in ("title", "first", "text", "item", "code", "caption", "picture"):
        assert f"{part} {HOSTILE}" in text
    assert text.count(HOSTILE) == 11  # the first heading is in the list of sections too
    assert not re.findall("<(script|link|iframe|object|embed)", page)
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in page
    picture = base64.b64encode((folder / "a plot.png").read_bytes()).decode()
    assert re.findall('<[^>]* src="([^"]*)"', page) == [f"data:image/png;base64,{picture}"]
    assert re.findall('<[^>]* id="([^"]*)"', page) == ["section-1", "section-2"]
    assert re.findall('<[^>]* href="([^"]*)"', page) == ["#section-1", "#section-2"]
    assert "url(" not in page


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("0.64 [0.57, 0.70], p < 0.05, max_new_tokens", None),
        ("-0.5 1.5", None),
        ("<b> </b> <!-- a", r"\<b> \</b> \<!-- a"),
        ("[a](b) [a][b] [a]: b", r"[a\](b) [a\][b] [a\]: b"),
        ("*a* _b_ `c` d\\", r"\*a\* \_b\_ \`c\` d\\"),
        ("&amp; &#35; a & b;", r"\&amp; \&#35; a & b;"),
        ("# a", r"\# a"),
        ("> a", r"\> a"),
        ("- a", r"\- a"),
        ("12. a", r"12\. a"),
        ("~~~", r"\~~~"),
        ("---", r"\---"),
    ],
)
def test_markdown_escapes_what_would_be_markup_and_nothing_else(
    text: str, want: str | None
) -> None:
    made = Page("t")
    made.paragraph(text)
    assert made.markdown() == f"# t\n\n{want or text}\n"
    assert f"<p>{escape(text)}</p>" in html_page(made.markdown(), Path())


def test_tables_and_code(tmp_path: Path) -> None:
    made = Page("t")
    made.records([{"a": 1.25}, {}], {"name": "x_y", "a": "{a:.1f}"}, "caption")
    made.code("```\n# no heading\n```")
    made.paragraph("after")
    text = made.markdown()
    assert "caption\n\n| name | a |\n|---|---|\n| x_y | 1.2 |\n| x_y |  |\n" in text
    document = html_page(text, tmp_path)
    assert "<code>```\n# no heading\n```\n</code></pre>\n<p>after</p>" in document
    with pytest.raises(ValueError, match="3 cells"):
        made.table(["a", "b"], [["1", "2", "3"]])


def test_marks_need_a_significant_test() -> None:
    found = [mark(0.1, 0.01), mark(-0.1, 0.01), mark(-0.1, 0.2), mark(0.0, 0.0)]
    assert found == [" ▲", " ▼", "", ""]
    assert [p_number(p) for p in (0.0009, 0.0497, 0.05)] == ["< 0.001", "< 0.05", "0.050"]


def test_a_cell_has_accuracy_difference_interval_and_seeds() -> None:
    low = accuracy_cell(accuracy_of([outcome("1000000000"), outcome("1100000000")], FULL))
    assert low.startswith("0.150 (-0.850) ▼ [0.")
    assert low.endswith("]; 2 seeds: 0.10 to 0.20")
    alike = accuracy_cell(accuracy_of([outcome("1111111110")], FULL))
    assert alike == "0.900 (-0.100) [0.60, 0.98]"
    test = compare([outcome("1000000000")], [FULL])["difference"]
    assert difference_cell(test) == "-0.900 ▼ [-1.00, -0.70]"
    assert difference_cell(test, sign=-1) == "-0.900 ▲ [-1.00, -0.70]"


def test_seeds_with_the_same_heads_are_said_to_be_one_measurement() -> None:
    a, b = outcome("1100000000"), outcome("1010000000")
    assert seeds_text(accuracy_of([a])) == ""
    assert seeds_text(accuracy_of([a, a, a])) == "3 seeds, 1 set of heads"
    assert seeds_text(accuracy_of([a, b, a])) == "3 seeds, 2 sets of heads: all 0.20"
    assert seeds_text(accuracy_of([replace(a, draws=3)])) == "3 draws, which share the problems"
