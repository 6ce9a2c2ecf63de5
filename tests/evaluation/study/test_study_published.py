"""Published numbers beside measured ones: right, marked, never mixed."""

from __future__ import annotations

import pytest

from rlkv.evaluation.report.html_page import Bullets, Page, Paragraph, Table
from rlkv.evaluation.report.published import find_published
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
    assert "holds no published accuracies by share" in text
    assert "Nothing was published" not in text
    (table,) = (block for block in page.blocks if isinstance(block, Table))
    assert all("published" in row[0].text for row in table.rows)
    assert all(cell.sign == "" for row in table.rows for cell in row)


def test_numbers_in_another_layout_are_listed() -> None:
    found = published_rows("Qwen/QwQ-32B", "aime24")  # RPC's table has no sparsity
    assert found is not None
    assert not found["own"]
    assert len(found["others"]) == len(find_published("Qwen/QwQ-32B", "aime24")) == 5
    page = Page("t")
    write_published(found, page)
    last = page.blocks[-1]
    assert isinstance(last, Bullets)
    assert any("rpc@P=4096" in item for item in last.items)
    own = published_rows(LLAMA, "math500")
    assert own is not None
    assert own["own"]
    assert sum("rlkv@sink=" in item for item in own["others"]) == 12  # table 4: three settings at four sparsities
