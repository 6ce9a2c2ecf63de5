"""Published numbers: whole, plausible, and each with its source."""

from __future__ import annotations

import pytest
import yaml

from rlkv.evaluation.report import find_published, published_numbers
from rlkv.cli.app import preset_file

LLAMA = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
MODELS = (LLAMA, "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "Qwen/Qwen3-4B-Thinking-2507")
TABLE_TASKS = yaml.safe_load(preset_file("rlkv").read_text())["tasks"]
ITEMS = {"gsm8k": 1319, "math500": 500, "aime24": 30, "mbpp": 500, "mmlu_pro:computer_science": 410}


def main_table(model: str) -> list:
    return [n for n in find_published(model) if n.source.where in ("table 6", "table 7", "table 8")]


def test_every_number_names_its_source() -> None:
    for number in published_numbers():
        assert all(
            (number.source.paper, number.source.arxiv, number.source.where, number.source.protocol)
        )
        assert number.unit
        assert number.value >= 0


def test_percentages_and_shares_are_in_range() -> None:
    assert all(n.value <= 100 for n in find_published())
    assert all(0 < n.value < 1 for n in find_published(metric="near_lossless_sparsity"))


@pytest.mark.parametrize("model", MODELS)
def test_the_main_tables_are_complete(model: str) -> None:
    cells = {(n.task, n.method, n.sparsity) for n in main_table(model)}
    methods = ("h2o", "rkv", "duo", "kvzip", "rlkv")
    assert cells == {(t, m, s) for t in TABLE_TASKS for m in methods for s in (0.2, 0.4, 0.6, 0.8)}
    assert len(cells) == len(main_table(model))
    assert {
        n.task for n in find_published(model, method="full") if "result.json" in n.source.where
    } == set(TABLE_TASKS)


@pytest.mark.parametrize("model", MODELS)
def test_accuracies_are_counts_over_the_items_of_a_benchmark(model: str) -> None:
    # a digit that was misread would rarely leave a whole number of solved problems
    for number in main_table(model):
        items = ITEMS.get(number.task, 500)
        nearest = round(number.value / 100 * items) / items * 100
        assert abs(nearest - number.value) <= 0.0551, number  # rounded to two decimals, then to one


def test_known_cells() -> None:
    def value(task: str, method: str, sparsity: float) -> float:
        return next(n.value for n in find_published(LLAMA, task, method) if n.sparsity == sparsity)

    assert value("math500", "rlkv", 0.4) == 84.6
    assert value("gsm8k", "h2o", 0.8) == 2.9
    assert value("aime24", "full", 0.0) == 36.67


def test_the_theoretical_limit_is_that_of_its_formula() -> None:
    # 1 / ((1 - s) + s * (16 + 64) / 3000), to the two decimals of the table
    for number in find_published(metric="speedup_limit"):
        assert number.sparsity is not None
        assert number.value == pytest.approx(
            1 / ((1 - number.sparsity) + number.sparsity * 80 / 3000), abs=0.01
        )


def test_nothing_published_is_an_empty_list() -> None:
    assert find_published("nobody/nothing") == []
