"""Pages: everything escaped, nothing outside the file, the same content as Markdown."""

from __future__ import annotations

import base64
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlkv.evaluation.report.page import Cell, Page, sign_of
from rlkv.utils.figures import curve_figure, save_figure

HOSTILE = """<script src="https://example.org/x.js">'&"</script> | *a*"""
VOID = {"meta", "img"}


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
        if tag not in VOID:
            self.open.append(tag)

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


def test_every_text_is_escaped_and_every_tag_closed(picture: Path) -> None:
    parsed = Parsed(page(picture).html())
    assert parsed.open == []
    assert "script" not in {tag for tag, _ in parsed.tags}
    text = " ".join(parsed.words)
    for part in ("title", "first", "text", "item", "code", "caption", "picture"):
        assert f"{part} {HOSTILE}" in text
    assert text.count(HOSTILE) == 12  # the first heading is in the list of sections too


def test_nothing_is_loaded_from_outside(picture: Path) -> None:
    made = page(picture)
    parsed = Parsed(made.html())
    links = [(tag, name, value) for tag, attrs in parsed.tags for name, value in attrs.items()]
    assert not {tag for tag, _ in parsed.tags} & {"link", "script", "iframe", "object", "embed"}
    sources = [value for _, name, value in links if name in ("src", "srcset", "data")]
    assert sources == ["data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()]
    ids = [value for _, name, value in links if name == "id"]
    assert len(set(ids)) == 3
    assert [value for _, name, value in links if name == "href"] == [f"#{ids[0]}", f"#{ids[1]}"]
    assert "url(" not in made.html()
    assert "@import" not in made.html()
    policy = [attrs["content"] for tag, attrs in parsed.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_cells_have_the_class_of_their_sign(picture: Path) -> None:
    classes = [attrs.get("class") for tag, attrs in Parsed(page(picture).html()).tags if tag == "td"]
    assert classes == ["better", "same"]
    assert sign_of(0.1, 0.01) == "better"
    assert sign_of(-0.1, 0.01) == "worse"
    assert sign_of(-0.1, 0.2) == "same"
    assert sign_of(0.0, 0.0) == "same"


def test_write_is_one_file(picture: Path, tmp_path: Path) -> None:
    made = page(picture)
    made.write(tmp_path / "out" / "report.html")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["report.html"]
    assert (tmp_path / "out" / "report.html").read_text(encoding="utf-8") == made.html()


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
    assert (tmp_path / "r.md").read_text() == "# t\n\ncaption\n\n| a | b |\n|---|---|\n| x_y | 1 |\n"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("0.64 [0.57, 0.70], p < 0.05, max_new_tokens", "0.64 [0.57, 0.70], p < 0.05, max_new_tokens"),
        ("<b> </b> <!-- a", r"\<b> \</b> \<!-- a"),
        ("[a](b) [a][b] [a]: b", r"[a\](b) [a\][b] [a\]: b"),
        ("*a* _b_ `c` d\\", r"\*a\* \_b\_ \`c\` d\\"),
        ("&amp; &#35; a & b;", r"\&amp; \&#35; a & b;"),
        ("# a", r"\# a"),
        ("> a", r"\> a"),
        ("- a", r"\- a"),
        ("12. a", r"12\. a"),
        ("-0.5 1.5", "-0.5 1.5"),
    ],
)
def test_markdown_escapes_what_would_be_markup_and_nothing_else(text: str, want: str) -> None:
    made = Page("t")
    made.paragraph(text)
    assert made.markdown(Path()) == f"# t\n\n{want}\n"
