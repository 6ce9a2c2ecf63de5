"""Pages: Markdown with everything escaped, and HTML made from it with nothing outside the file."""

from __future__ import annotations

import base64
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlkv.evaluation.report import Cell, Page, html_page, sign_of
from rlkv.utils.files import curve_figure, save_figure

HOSTILE = """<script src="https://example.org/x.js">'&"</script> | *a*"""


class Parsed(HTMLParser):
    """Tags with their attributes, the text of the body, and whether every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "body" in self.open:
            self.words.append(data)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    figure, _ = curve_figure("t", "x", "y")
    save_figure(figure, tmp_path / "a picture.png")
    return tmp_path / "a picture.png"


def page(picture: Path) -> Page:
    made = Page(f"title {HOSTILE}")
    made.heading(f"first {HOSTILE}")
    made.paragraph(f"text {HOSTILE}", strong=True)
    made.bullets([f"item {HOSTILE}"])
    made.code(f"code {HOSTILE}")
    made.heading("second")
    made.heading("second", level=3)
    made.table(
        ["method", HOSTILE],
        [[HOSTILE, Cell(HOSTILE, "better")], ["b", Cell("c", "same", f"note\n{HOSTILE}")]],
        f"caption {HOSTILE}",
    )
    made.picture(picture, f"picture {HOSTILE}")
    return made


def html(made: Page, folder: Path) -> str:
    return html_page(made.markdown(folder), folder)


def test_every_text_is_escaped_and_every_tag_closed(picture: Path, tmp_path: Path) -> None:
    parsed = Parsed(html(page(picture), tmp_path))
    assert parsed.open == []
    assert "script" not in {tag for tag, _ in parsed.tags}
    text = " ".join(parsed.words)
    for part in ("title", "first", "text", "item", "code", "caption", "picture"):
        assert f"{part} {HOSTILE}" in text
    assert text.count(HOSTILE) == 12  # the first heading is in the list of sections too


def test_nothing_is_loaded_from_outside(picture: Path, tmp_path: Path) -> None:
    text = html(page(picture), tmp_path)
    parsed = Parsed(text)
    links = [(name, value) for _, attrs in parsed.tags for name, value in attrs.items()]
    assert not {tag for tag, _ in parsed.tags} & {"link", "script", "iframe", "object", "embed"}
    sources = [value for name, value in links if name in ("src", "srcset", "data")]
    assert sources == ["data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()]
    assert [value for name, value in links if name == "id"] == ["section-1", "section-2"]
    assert [value for name, value in links if name == "href"] == ["#section-1", "#section-2"]
    assert "url(" not in text
    assert "@import" not in text
    policy = [
        attrs["content"]
        for tag, attrs in parsed.tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_signs_are_marks() -> None:
    assert sign_of(0.1, 0.01) == "better"
    assert sign_of(-0.1, 0.01) == "worse"
    assert sign_of(-0.1, 0.2) == "same"
    assert sign_of(0.0, 0.0) == "same"
    made = Page("t")
    made.table(
        ["a"] * 4, [["x", Cell("1", "better"), Cell("2", "worse", "note"), Cell("3", "same")]]
    )
    assert made.markdown(Path()).splitlines()[-1] == "| x | 1 ▲ | 2 ▼ note | 3 |"


def test_a_report_is_markdown_and_the_same_as_one_html_file(picture: Path, tmp_path: Path) -> None:
    made = page(picture)
    made.write_report(tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "report.html",
        "report.md",
    ]
    assert (tmp_path / "out" / "report.md").read_text(encoding="utf-8") == made.markdown(
        tmp_path / "out"
    )
    assert (tmp_path / "out" / "report.html").read_text(encoding="utf-8") == html(made, tmp_path)


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="3 cells"):
        Page("t").table(["a", "b"], [["1", "2", "3"]])


def test_markdown_has_the_same_content(picture: Path, tmp_path: Path) -> None:
    text = page(picture).markdown(tmp_path / "reports")
    assert "| b | c note; " in text
    assert r"\| \*a\* ▲ |" in text
    assert r"# title \<script" in text.splitlines()[0]
    assert "(<../a picture.png>)" in text
    short = Page("t")
    short.table(["a", "b"], [["x_y", "1"]], "caption")
    short.write(tmp_path / "r.md")
    assert (
        tmp_path / "r.md"
    ).read_text() == "# t\n\ncaption\n\n| a | b |\n|---|---|\n| x_y | 1 |\n"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (
            "0.64 [0.57, 0.70], p < 0.05, max_new_tokens",
            "0.64 [0.57, 0.70], p < 0.05, max_new_tokens",
        ),
        ("<b> </b> <!-- a", r"\<b> \</b> \<!-- a"),
        ("[a](b) [a][b] [a]: b", r"[a\](b) [a\][b] [a\]: b"),
        ("*a* _b_ `c` d\\", r"\*a\* \_b\_ \`c\` d\\"),
        ("&amp; &#35; a & b;", r"\&amp; \&#35; a & b;"),
        ("# a", r"\# a"),
        ("> a", r"\> a"),
        ("- a", r"\- a"),
        ("12. a", r"12\. a"),
        ("12.", r"12\."),
        ("~~~", r"\~~~"),
        ("---", r"\---"),
        ("-0.5 1.5", "-0.5 1.5"),
    ],
)
def test_markdown_escapes_what_would_be_markup_and_nothing_else(text: str, want: str) -> None:
    made = Page("t")
    made.paragraph(text)
    written = made.markdown(Path())
    assert written == f"# t\n\n{want}\n"
    assert f"<p>{escape(text)}</p>" in html_page(written, Path())


def test_a_code_block_ends_where_its_text_ends(tmp_path: Path) -> None:
    made = Page("t")
    made.code("```\n# no heading\n```")
    made.paragraph("after")
    assert "<code>```\n# no heading\n```\n</code></pre>\n<p>after</p>" in html(made, tmp_path)
