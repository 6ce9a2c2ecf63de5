"""The report of an evaluation: figures from rows written by hand, tables, published numbers."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from rlkv.evaluation import eval_report
from rlkv.evaluation.eval_report import evaluation_page, pass_at, plot_accuracy, summarize
from rlkv.evaluation.evaluate import EvalConfig, parse_method
from rlkv.evaluation.metrics import wilson_interval
from rlkv.evaluation.published import published_tables
from rlkv.utils.runtime import provenance

METHODS = ["full", "rlkv@0.2", "rlkv@0.4", "duo@0.4", "rlkv@0.4+rkv@256", "rkv@ratio=0.5"]
CONFIG = {
    **asdict(EvalConfig(output_dir=Path("out"))),
    "max_new_tokens": {"aime24": 16384},
    "num_samples": {"aime24": 1},
    "sink": 16,
    "window": 64,
    "protect_prompt": False,
    "dtype": "bfloat16",
    "processes": 1,
}


def row(key: str, correct: bool, sample: int = 0, **more: Any) -> dict[str, Any]:
    fields = {"finish_reason": "stop", "repetitive": False, "kv_bytes": 61, "kv_bytes_full": 100}
    texts = {"seconds": 2.0, "text": "a b.", "token_ids": [1, 2, 3]}
    return {"key": key, "sample": sample, "correct": correct, **fields, **texts, **more}


def rows(right: int, n: int, samples: int = 1) -> list[dict[str, Any]]:
    """Return rows of ``n`` problems, the first ``right`` of which are solved."""
    return [row(f"{i:03}", i < right, sample) for i in range(n) for sample in range(samples)]


def report(
    texts: dict[str, list[dict[str, Any]]], baseline: str | None = None, **config: Any
) -> str:
    """Return the page of methods on AIME24."""
    summaries = []
    for name, own in texts.items():
        other = None if baseline in (None, name) else texts[baseline]
        summaries.append(summarize("aime24", name, own, texts.get("full"), other))
    methods = [parse_method(name, ["rlkv", "duo"]) for name in texts]
    options = {**CONFIG, "baseline": baseline, **config}
    with patch.object(eval_report, "plot_curves", lambda path, panel: path):
        page = evaluation_page(Path(), methods, summaries, provenance(), options)
    return page.markdown()


@pytest.fixture(scope="module")
def page() -> str:
    right = {"rlkv@0.2": 7, "rlkv@0.4": 24}
    texts = {name: rows(right.get(name, 15), 30) for name in METHODS}
    return report(texts, model="/models/DeepSeek-R1-Distill-Llama-8B/")


# --- summaries


def test_one_sample_of_each_problem() -> None:
    full = [row("a", True), row("b", True), row("c", False), row("d", True, token_ids=[1] * 9)]
    own = [
        row("d", True, token_ids=[1] * 5),
        row("c", True),
        row("b", False, finish_reason="length"),
        row("a", False, finish_reason="repetition", repetitive=True, token_ids=[7, 7, 7, 7]),
    ]
    found = summarize("math500", "rlkv@0.5", own, full)
    low, high = wilson_interval(2, 4)
    expected = {
        **{"n": 4, "samples": 1, "accuracy": 0.5, "ci_low": low, "ci_high": high},
        **{"difference": 0.5 - 0.75, "p_value": 1.0, "sign_p_value": 1.0},  # two down, one up
        **{"problems_better": 1, "problems_worse": 2, "smallest_provable_difference": None},
        **{"kv_bytes": 244, "kv_bytes_full": 400, "seconds": 8.0, "seconds_per_text": 2.0},
        **{"mean_output_tokens": 15 / 4, "tokens_per_second": 15 / 8, "tokens_times_full": 15 / 18},
        **{"solved_in_full": 3, "repetitive": 1, "overlength": 1, "incorrect": 0},
        **{"stopped_for_repetition": 1, "share_repetitive": 0.25},
        **{"tokens_both_right": 5, "full_tokens_both_right": 9, "n_both_right": 1},
        **{"repeated_1_grams": (4 / 5 + 3 / 4) / 4, "entropy_1_gram": 2 * 1.5849625 / 4},
        **{"share_terminated": 0.5},
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["strict"]["mean"] == found["pass_at_k"]["1"]["mean"] == 0.5
    assert found["right_of_terminated"]["mean"] == 1.0  # d and c


def test_without_a_full_cache_there_is_no_difference() -> None:
    own = [row("a", True), row("b", False, finish_reason="length")]
    for method, full in (("full", own), ("rlkv@0.5", None)):
        assert not {"difference", "repetitive"} & summarize("tiny", method, own, full).keys()
    none = summarize("tiny", "full", own[1:], None)
    assert (none["share_terminated"], none["right_of_terminated"]) == (0, None)


def test_samples_give_pass_at_k() -> None:
    right = {"a": 1, "b": 0, "c": 4}
    own = [row(key, i < right[key], i) for key in right for i in range(4)]
    found = summarize("tiny", "rlkv@0.5", own[::-1], None)
    assert (found["n"], found["samples"]) == (3, 4)
    many = [row(str(key), i < key % 3, i) for key in range(30) for i in range(2)]
    assert summarize("tiny", "full", many, None)["smallest_provable_difference"] is None
    assert "proves little" not in report({"full": many})
    means = {k: estimate["mean"] for k, estimate in found["pass_at_k"].items()}
    # 1 - C(3, k) / C(4, k) for a, 0 for b, 1 for c
    assert means == pytest.approx({"1": 1.25 / 3, "2": 1.5 / 3, "4": 2 / 3})
    assert found["strict"]["mean"] == pytest.approx(1 / 3)  # c alone
    assert list(pass_at([[True] * 6, [False] * 6])) == ["1", "2", "4"]


# --- the page


def test_rankings_down_sparsities_across(page: str) -> None:
    assert "| heads | s = 0 | s = 0.2 | s = 0.4 |" in page
    assert re.search(r"\| full cache \| 50\.0 \[\d+\.\d, \d+\.\d\] \|  \|  \|", page)
    worse = r"23\.3 \(-26\.7\\\* \[-\d+\.\d, -\d+\.\d\]\) KV 61% ▼"
    assert re.search(rf"\| rlkv \|  \| {worse} \| 80\.0 \(\+30\.0\\\* .*▲ \|", page)
    assert re.search(r"\| duo \|  \|  \| 50\.0 \(\+0\.0 [^▲▼]*\|", page)
    assert re.search(r"\| rlkv\+rkv@256 \|  \|  \| 50\.0", page)
    assert re.search(r"\| method \| accuracy \|\n.*\n\| full cache .*\n\| rkv@ratio=0\.5 \|", page)


@pytest.mark.parametrize(
    ("n", "said"),
    [
        (30, r"\*\*30 problems: at least 6 must change, all in one direction, .* 20.0 points: "),
        (500, r"\n500 problems: .* a difference of 1.2 points.\n"),
        (5, r"\*\*5 problems are too few"),
    ],
)
def test_few_problems_are_said_to_prove_little(n: int, said: str) -> None:
    assert re.search(said, report({"full": rows(n // 2, n)}))


def test_tables_of_every_method(page: str) -> None:
    assert re.search(r"\| rlkv@0\.2 \| -26\.7 \[.*\] \| 0, 8 of 30 \| 0\.008 \| 0\.008 \|", page)
    assert "| full | 3 |  | 2.00 | 60 | 1.5 |" in page
    assert "| rlkv@0.2 | 3 | 1.00 | 2.00 | 60 | 1.5 |" in page
    assert "| rlkv@0.2 | 15 | 0 | 0 | 8 | 0 | 3, full 3 (n = 7) |" in page
    assert "| method | pass@1 | terminated texts | right of these |" in page
    assert "Sample i" not in page
    assert "Greedy decoding; new tokens at most: aime24 16,384" in page
    assert provenance()["versions"]["torch"] in page


def test_samples_get_columns_of_their_own() -> None:
    sampled = rows(3, 8, samples=4)
    sampled[0] |= {"correct": False, "finish_reason": "length"}
    text = report({"full": sampled}, temperature=0.6)
    own = "all 4 right | terminated texts | right of these |"
    assert f"| method | pass@1 | pass@2 | pass@4 | {own}" in text
    shown = re.search(r"\n\| full \| 34\.4 .*", text)
    assert shown is not None
    cells = [cell.split()[0] for cell in shown[0].strip("\n| ").split(" | ")]
    assert cells == ["full", "34.4", "37.5", "37.5", "25.0", "96.9", "35.5"]
    assert "Sample i of a problem is paired" in text
    assert "points" not in text.partition("8 problems:")[2].partition("\n")[0]


def test_methods_against_another_one() -> None:
    texts = {"full": rows(30, 40), "rlkv@0.2": rows(20, 40), "rlkv@0.4": rows(29, 40)}
    text = report(texts, baseline="rlkv@0.2").partition("Against rlkv@0.2")[2]
    assert "| full | +25.0 [+12.5, +40.0] | 10, 0 of 40 |" in text
    assert "| rlkv@0.4 | +22.5 [+10.0, +35.0] | 9, 0 of 40 |" in text


def test_what_ran_is_stated() -> None:
    own = {"random-heads@0.4": rows(15, 30)}
    text = report(own)
    assert "random-heads is one draw of heads (seed 0)" in text
    assert "compressible heads keep 16 + 64 entries." in text
    assert "50.0 [33.2, 66.8] KV 61%" in text  # also without the full cache next to it
    text = report(own, protect_prompt=True, template="boxed", sandbox="bubblewrap")
    assert "compressible heads keep the prompt (at least 16) + 64 entries." in text
    assert "template of maths tasks: boxed." in text
    assert "Programs were shut in by bubblewrap." in text


# --- published numbers


def test_published_numbers_stand_apart_with_their_sources(page: str) -> None:
    measured, _, published = page.partition("Published numbers, not measured here")
    assert "s = 0.6 | s = 0.8 | without s | source |" in published
    assert re.search(r"\| rlkv \|  \| 36\.7 \| 40\.0 \| 20\.0 \| 0\.0 \|  \| \[1\] \|", published)
    assert re.search(r"\| full cache \| 36\.7 ", published)
    assert "2510.08525v3), table 6" in published
    assert "kvzip" not in measured
    assert "Published numbers" not in report({"full": rows(1, 8)})


def test_every_published_number_is_plausible_and_names_its_source() -> None:
    content = published_tables()
    for table in content["tables"]:
        assert all(content["sources"][table["source"]].values())
        assert table["unit"]
        for methods in table["rows"].values():
            for values in methods.values():
                assert len(values) == len(table["sparsities"])
                assert all(0 <= value <= 100 for value in values)


def test_plot_has_a_curve_through_the_sparsities_of_a_ranking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eval_report, "plot_curves", lambda path, panel: panel)
    held = {"full": 100, "duo@0.4": 70, "duo@0.2": 90, "duo@0.4+rkv@256": 80, "rkv@256": 50}
    summaries = []
    for name, kv_bytes in held.items():
        texts = [{**each, "kv_bytes": kv_bytes} for each in rows(kv_bytes // 10, 10)]
        summaries.append(summarize("aime24", name, texts, None))
    methods = [parse_method(name, ["duo"]) for name in held]
    panel: Any = plot_accuracy(Path("plot.png"), "aime24", methods, summaries)
    points = {name: [point[:2] for point in curve] for name, curve in panel.curves.items()}
    assert points == {
        "duo": [(0.7, 0.7), (0.9, 0.9)],
        "duo+rkv@256": [(0.8, 0.8)],
        "rkv@256": [(0.5, 0.5)],
    }
    low, high = panel.curves["duo"][0][2:]
    assert low < 0.7 < high
    assert panel.reference == 1.0
