"""The report: the paper's layout, what n problems prove, published numbers apart, one HTML file
from the Markdown.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rlkv.evaluation.evaluate import parse_method
from rlkv.evaluation.report import (
    Heading,
    Page,
    Paragraph,
    Table,
    evaluation_page,
    html_page,
    published_name,
    summarize,
)
from rlkv.utils.runtime import provenance

METHODS = ["full", "rlkv@0.2", "rlkv@0.4", "duo@0.4", "rlkv@0.4+rkv@256", "rkv@ratio=0.5"]
CONFIG = {
    **{
        "model": "tiny",
        "max_new_tokens": {"aime24": 16384},
        "sink": 16,
        "window": 64,
        "prefill": "full",
        "seed": 0,
    },
    **{
        "num_samples": {"aime24": 1},
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "batch_size": 8,
        "dtype": "torch.bfloat16",
    },
    **{
        "repetition": (400, 40),
        "stop_repetitive": False,
        "processes": 1,
        "template": None,
        "protect_prompt": False,
    },
    "baseline": None,
}


def rows(right: int, n: int) -> list[dict[str, Any]]:
    fields = {
        "finish_reason": "stop",
        "repetitive": False,
        "kv_bytes": 61,
        "kv_bytes_full": 100,
        "seconds": 1.0,
    }
    return [
        {
            "key": f"{i:03}",
            "sample": 0,
            "correct": i < right,
            **fields,
            "text": "t.",
            "token_ids": [1],
        }
        for i in range(n)
    ]


def page(
    model: str = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", n: int = 30, task: str = "aime24"
) -> Page:
    full = rows(n // 2, n)
    right = {"full": n // 2, "rlkv@0.2": n // 2 - 8, "rlkv@0.4": n // 2 + 9}
    summaries = [
        summarize(task, name, full if name == "full" else rows(right.get(name, n // 2), n), full)
        for name in METHODS
    ]
    parsed = [parse_method(name, ["rlkv", "duo"]) for name in METHODS]
    return evaluation_page(parsed, summaries, provenance(), {**CONFIG, "model": model})


def test_methods_against_another_one() -> None:
    full, base, better = rows(30, 40), rows(20, 40), rows(29, 40)
    names, texts = ["full", "rlkv@0.2", "rlkv@0.4"], [full, base, better]
    summaries = [
        summarize("aime24", name, own, full, None if own is base else base)
        for name, own in zip(names, texts, strict=True)
    ]
    parsed = [parse_method(name, ["rlkv"]) for name in names]
    found = evaluation_page(parsed, summaries, provenance(), {**CONFIG, "baseline": "rlkv@0.2"})
    (table,) = [
        table for table in tables(found) if (table.caption or "").startswith("Against rlkv@0.2")
    ]
    assert [[cell.text for cell in line[:3]] for line in table.rows] == [
        ["full", "+25.0 [+12.5, +40.0]", "10, 0 of 40"],
        ["rlkv@0.4", "+22.5 [+10.0, +35.0]", "9, 0 of 40"],
    ]


def tables(found: Page) -> list[Table]:
    return [block for block in found.blocks if isinstance(block, Table)]


def test_rankings_down_sparsities_across() -> None:
    heads, others, *_ = tables(page())
    assert heads.columns == ("heads", "s = 0", "s = 0.2", "s = 0.4")
    assert [line[0].text for line in heads.rows] == ["full cache", "rlkv", "duo", "rlkv+rkv@256"]
    full, rlkv, duo, both = heads.rows
    assert re.fullmatch(r"50\.0 \[\d+\.\d, \d+\.\d\]", full[1].text)
    assert rlkv[1].text == duo[2].text == both[2].text == ""
    assert re.fullmatch(r"23\.3 \(-26\.7\* \[-\d+\.\d, -\d+\.\d\]\) KV 61%", rlkv[2].text)
    assert (rlkv[2].sign, rlkv[3].sign, duo[3].sign) == ("worse", "better", "same")
    assert re.fullmatch(r"80\.0 \(\+30\.0\* .*", rlkv[3].text)
    assert [line[0].text for line in others.rows] == ["full cache", "rkv@ratio=0.5"]


def test_few_problems_are_said_to_prove_little() -> None:
    said = [
        block
        for block in page().blocks
        if isinstance(block, Paragraph) and "problems:" in block.text
    ]
    assert len(said) == 1
    assert said[0].strong
    assert "30 problems: at least 6 must change, all in one direction" in said[0].text
    assert "which is a difference of 20.0 points" in said[0].text
    assert said[0].text.endswith("this task proves little.")
    many = next(b for b in page(n=500).blocks if isinstance(b, Paragraph) and "problems:" in b.text)
    assert not many.strong
    assert "a difference of 1.2 points" in many.text
    few = next(b for b in page(n=5).blocks if isinstance(b, Paragraph) and "5 problems" in b.text)
    assert "prove nothing" in few.text


def test_published_numbers_stand_apart_with_their_sources() -> None:
    found = page("/models/DeepSeek-R1-Distill-Llama-8B/")
    place = next(
        i
        for i, b in enumerate(found.blocks)
        if isinstance(b, Heading) and "not measured here" in b.text
    )
    table, sources = found.blocks[place + 1], found.blocks[place + 2]
    assert isinstance(table, Table)
    own = {
        line[0].text: [cell.text for cell in line[1:]]
        for line in table.rows
        if line[-1].text == "[1]"
    }
    assert table.columns == (
        "method",
        "s = 0",
        "s = 0.2",
        "s = 0.4",
        "s = 0.6",
        "s = 0.8",
        "without s",
        "source",
    )
    assert set(own) == {"h2o", "rkv", "duo", "kvzip", "rlkv"}
    assert "36.7" in next(
        cell.text
        for line in table.rows
        if line[0].text == "full cache"
        for cell in line
        if cell.text[:1].isdigit()
    )
    assert any("2510.08525v3), table 6" in item for item in sources.items)  # type: ignore[union-attr]
    for measured in tables(found)[:2]:
        assert not {"h2o", "kvzip"} & {line[0].text for line in measured.rows}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-4B-Thinking-2507"),
        ("./qwen3-4b-thinking-2507", "Qwen/Qwen3-4B-Thinking-2507"),
        ("tiny", None),
    ],
)
def test_models_are_found_by_the_last_part_of_their_name(model: str, name: str | None) -> None:
    assert published_name(model) == name


def test_nothing_published_is_left_out() -> None:
    assert not any(
        isinstance(b, Heading) and "Published" in b.text for b in page("tiny", task="tiny").blocks
    )


class Links(HTMLParser):
    """What a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [
            str(v)
            for k, v in attrs
            if k in ("src", "href", "data") and not str(v).startswith(("#", "data:"))
        ]


def test_html_and_markdown_say_the_same(tmp_path: Path) -> None:
    found = page()
    text = found.markdown(tmp_path)
    document = html_page(text, tmp_path)
    for block in tables(found):
        for line in block.rows:
            for cell in line:
                assert cell.text.replace("*", "\\*") in text
                assert cell.text in document
    links = Links()
    links.feed(document)
    assert links.found == [], "the page needs nothing else"
    assert provenance()["versions"]["torch"] in document
    for content in (text, document):
        assert "Greedy decoding; new tokens at most: aime24 16,384" in content


def test_samples_get_pass_at_k_and_strict_accuracy() -> None:
    sampled = [{**row, "sample": sample} for row in rows(3, 8) for sample in range(4)]
    sampled[0] |= {"correct": False, "finish_reason": "length"}
    methods = [parse_method("full", [])]
    found = evaluation_page(
        methods, [summarize("tiny", "full", sampled, None)], provenance(), CONFIG
    )
    (said,) = (b.text for b in found.blocks if isinstance(b, Paragraph) and "8 problems:" in b.text)
    assert "at least 6 must change" in said
    assert "points" not in said  # with samples, a problem may change by less than one
    assert any("Sample i of a problem is paired" in t.caption for t in tables(found))
    table = next(t for t in tables(found) if "pass@1" in t.columns)
    own = ("all 4 right", "terminated texts", "right of these")
    assert table.columns == ("method", "pass@1", "pass@2", "pass@4", *own)
    shown = [cell.text.partition(" ")[0] for cell in table.rows[0]]
    assert shown == ["full", "34.4", "37.5", "37.5", "25.0", "96.9", "35.5"]
    assert not any("p, sign test" in t.columns for t in tables(found))


def test_one_sample_has_no_column_of_its_own_for_all_right() -> None:
    table = next(t for t in tables(page()) if "pass@1" in t.columns)
    assert table.columns == ("method", "pass@1", "terminated texts", "right of these")


def test_paired_tests_and_cost_of_every_method() -> None:
    paired = next(t for t in tables(page()) if "p, sign test" in t.columns)
    shown = {line[0].text: [cell.text for cell in line[1:]] for line in paired.rows}
    assert set(shown) == set(METHODS) - {"full"}
    assert shown["rlkv@0.2"][1:] == ["0, 8 of 30", "0.00781", "0.00781"]
    assert shown["rlkv@0.4"][0].startswith("+30.0 [")
    cost = next(t for t in tables(page()) if "tokens/s" in t.columns)
    costs = {line[0].text: [cell.text for cell in line[1:]] for line in cost.rows}
    assert costs["full"] == ["1", "", "1.00", "30", "", "1.0"]
    assert costs["rlkv@0.2"] == ["1", "1.00", "1.00", "30", "1.00", "1.0"]


def test_error_modes_have_their_denominator() -> None:
    table = next(t for t in tables(page()) if t.columns[1] == "solved by full")
    shown = {line[0].text: [cell.text for cell in line[1:5]] for line in table.rows}
    assert shown["full"] == ["", "", "", ""]
    assert shown["rlkv@0.2"] == ["15", "0", "0", "8"]
    assert "Sample i" not in table.caption


def test_random_heads_are_said_to_be_one_draw() -> None:
    methods = [parse_method(name, []) for name in ("full", "random-heads@0.4")]
    full = rows(4, 8)
    summaries = [summarize("tiny", m.name, full, full) for m in methods]
    found = evaluation_page(methods, summaries, provenance(), CONFIG)
    said = "random-heads is one draw of heads (seed 0)"
    assert any(isinstance(b, Paragraph) and b.text.startswith(said) for b in found.blocks)
    assert not any(isinstance(b, Paragraph) and "one draw" in b.text for b in page().blocks)


def test_what_compressible_heads_keep_and_the_template_are_stated() -> None:
    def stated(**changed: Any) -> str:
        names = ["random-heads@0.4"]
        summaries = [summarize("aime24", name, rows(15, 30), None) for name in names]
        parsed = [parse_method(name, []) for name in names]
        return evaluation_page(parsed, summaries, provenance(), {**CONFIG, **changed}).markdown(
            Path()
        )

    assert "compressible heads keep 16 + 64 entries." in stated()
    text = stated(protect_prompt=True, template="boxed")
    assert "compressible heads keep the prompt (at least 16) + 64 entries." in text
    assert "template of maths tasks: boxed." in text
    assert "50.0 [33.2, 66.8] KV 61%" in text  # also without the full cache next to it
