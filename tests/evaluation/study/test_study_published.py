"""Published numbers beside measured ones: right, marked, never mixed."""

from __future__ import annotations

import pytest

from rlkv.evaluation.html_page import Page, Paragraph, Table
from rlkv.evaluation.study.sweep import ORIENTATION, published_rows, write_published

LLAMA = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"


def test_the_papers_rows_with_their_differences() -> None:
    found = published_rows(LLAMA, "gsm8k")
    assert found is not None
    assert found["own"]
    assert found["sparsities"] == [0.2, 0.4, 0.6, 0.8]
    (rlkv,) = (row for row in found["rows"] if row["method"] == "RLKV")
    assert rlkv["full"] == pytest.approx(0.8916)
    assert [value["accuracy"] for value in rlkv["values"]] == pytest.approx([0.892, 0.868, 0.795, 0.474])
    assert rlkv["values"][1]["difference"] == pytest.approx(0.868 - 0.8916)


def test_tables_of_one_paper_are_not_merged() -> None:
    found = published_rows(LLAMA, "math500")
    assert found is not None
    rlkv = {row["where"]: row for row in found["rows"] if row["method"] == "RLKV"}
    assert rlkv["table 6"]["full"] != rlkv["table 3"]["full"]
    assert rlkv["table 6"]["values"][2] is None  # 0.5 stands in table 3 only
    assert rlkv["table 3"]["values"][2]["accuracy"] == pytest.approx(0.776)


def test_orientation_is_labelled() -> None:
    found = published_rows(None, "tiny")
    assert found is not None
    assert not found["own"]
    assert (found["model"], found["task"]) == ORIENTATION
    page = Page("t")
    write_published(found, page)
    (text,) = (block.text for block in page.blocks if isinstance(block, Paragraph))
    assert "another model and another task" in text
    (table,) = (block for block in page.blocks if isinstance(block, Table))
    assert all("published" in row[0].text for row in table.rows)
    assert all(cell.sign == "" for row in table.rows for cell in row)
