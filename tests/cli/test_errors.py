"""Help texts of programs keep the lines of their commands."""

from __future__ import annotations

from rlkv.cli.errors import help_text


def test_indented_paragraphs_keep_their_lines() -> None:
    text = help_text("What it does,\nin two lines.\n\n    a command \\\n        --option\n    another\n\nMore.\n")
    assert text == "What it does,\nin two lines.\n\n\b\n    a command \\\n        --option\n    another\n\nMore.\n"
    assert help_text(None) == ""
