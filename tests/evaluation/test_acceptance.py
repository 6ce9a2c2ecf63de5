"""The acceptance of drafts: counted on the tiny model, and in a study of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv import tiny
from rlkv.attention import LocalSizes
from rlkv.evaluation import acceptance as module
from rlkv.evaluation.acceptance import SHAPE, computed_speedup, count_accepted
from rlkv.evaluation.study import load_study
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.utils.store import recorded_of
from tests.helpers.families import make_family
from tests.helpers.study_program import NUM_PROBLEMS, analysis, config_of, results, run

WORDS = ["--analyses", "acceptance", "--sparsities", "0.5", "0.2", "--sizes", "4+8", "prompt+8"]
SIZES = {"4+8": (4, 8), "prompt+8": (0, 8)}


@pytest.fixture(scope="module")
def study(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("study")
    run(inputs, output, *WORDS)
    return output


@pytest.fixture(scope="module")
def texts(inputs: Path, study: Path) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each prompt, and those that the full cache wrote."""
    (condition,) = results(study)["conditions"]
    rows = (study / "rows" / condition["rows"]).read_text().splitlines()
    written = {row["key"]: row["token_ids"] for row in map(json.loads, rows)}
    problems = load_study(config_of(inputs, study)).problems["tiny"]
    return [(problem.prompt_ids, written[problem.key]) for problem in problems]


def count(text: tuple[list[int], list[int]], allocation: HeadAllocation, size: str) -> int:
    model, _ = tiny.load()
    sink, window = SIZES[size]
    sink = len(text[0]) if size.startswith("prompt") else sink
    (found,) = count_accepted(model, *text, [(allocation.full, LocalSizes(sink, window))])
    return found


def test_all_heads_full_accept_every_token(texts: list[Any], monkeypatch) -> None:
    model, _ = tiny.load()
    full = torch.ones(4, 6, dtype=torch.bool)
    drafts = [(full, LocalSizes(0, 1)), (~full, LocalSizes(999, 1)), (~full, LocalSizes(4, 8))]
    prompt, answer = texts[0]
    found = count_accepted(model, prompt, answer, drafts)
    assert found[:2] == [len(answer) - 1] * 2
    assert 0 < found[2] < len(answer) - 1
    monkeypatch.setattr(module, "CHUNK", 7)
    assert count_accepted(model, prompt, answer, drafts) == found
    assert count_accepted(model, prompt, answer[:1], drafts) == [0, 0, 0]


def test_a_study_counts_each_ranking(inputs: Path, study: Path, texts: list[Any]) -> None:
    found = analysis(study, "acceptance")
    assert found["positions"] == sum(len(answer) - 1 for _, answer in texts)
    rankings = ("mine", "other <b>", "oracle (measured)", "random heads")
    assert list(found["methods"]) == [f"{name}, {size}" for size in SIZES for name in rankings]
    gates = HeadGates.load(inputs / "a" / "gates.pt")
    random = load_study(config_of(inputs, study)).rankings[-1]
    for size in SIZES:
        # both seeds have the same heads
        for place, sparsity in enumerate((0.2, 0.5, 1.0)):
            allocation = HeadAllocation.from_gates(gates, sparsity)
            share = sum(count(text, allocation, size) for text in texts) / found["positions"]
            assert found["methods"][f"mine, {size}"][place]["mean"] == pytest.approx(share)
        draws = random.allocations(0.5)
        accepted = sum(count(text, draws[i % 2], size) for i, text in enumerate(texts))
        of = found["methods"][f"random heads, {size}"][1]
        assert of["mean"] == pytest.approx(accepted / found["positions"])
        assert (of["n"], of["low"] <= of["mean"] <= of["high"]) == (NUM_PROBLEMS, True)
        local = {json.dumps(found["methods"][f"{name}, {size}"][2]) for name in rankings}
        assert len(local) == 1


def test_the_report_says_what_is_computed(study: Path, texts: list[Any]) -> None:
    text = (study / "report.md").read_text()
    first = analysis(study, "acceptance")["methods"]["mine, 4+8"][0]
    assert f"| mine, 4+8 | {first['mean']:.3f} [" in text
    speedup, drafted = computed_speedup(first["mean"], 0.2, 12)
    assert f"| mine, 4+8 | {speedup:.2f}x, k = {drafted} |" in text
    assert f"not measured: speed-up of lossless drafts over the full model for {SHAPE}" in text
    mean = sum(len(prompt) + len(answer) - 1 for prompt, answer in texts) / NUM_PROBLEMS
    assert f"of texts of {mean:.0f} tokens on average" in text
    assert "(<acceptance-tiny.png>)" in text
    assert (study / "acceptance-tiny.png").exists()


def test_rows_say_where_they_were_made(study: Path) -> None:
    (recorded,) = recorded_of(module.acceptance_file(study, "tiny"))
    assert set(recorded) == {"commit", "hardware"}


def test_what_is_measured_is_not_measured_again(
    inputs: Path, study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = results(study)["analyses"]
    counted: list[int] = []

    def note(model: Any, prompt: Any, answer: Any, drafts: list[Any]) -> list[int]:
        counted.append(len(drafts))
        return count_accepted(model, prompt, answer, drafts)

    monkeypatch.setattr(module, "count_accepted", note)
    run(inputs, study, *WORDS)
    assert counted == [1]  # the check of the model
    assert results(study)["analyses"] == before
    counted.clear()
    run(inputs, study, "--random-draws", "0", *WORDS, "--sparsities", "0.5", "0.7")
    # at 0.7 two seeds with the same heads, another method and the oracle, with two sizes
    assert counted == [1] + [6] * NUM_PROBLEMS
    found = analysis(study, "acceptance")["methods"]["mine, 4+8"]
    assert found[0] == before["acceptance"]["tasks"]["tiny"]["methods"]["mine, 4+8"][1]


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("qwen3_5_text", "linear attention in layers 0-2; .*: it takes models in which every"),
        ("falcon_h1", "a linear layer in layers 0-1: it takes"),
        ("gemma4_shared", "shared with other layers in layers"),
        ("deepseek_v3", "multi-head latent attention"),
        ("diffllama", "compute with the keys and values"),
    ],
)
def test_models_without_keys_of_every_layer_are_refused(family: str, message: str) -> None:
    model = make_family(family)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        module.check_drafts(model)
    assert model.config._attn_implementation == before


# worked out by hand from the formula, for 16 sinks and a window of 64
@pytest.mark.parametrize(
    ("sparsity", "acceptance", "speedup", "drafted"),
    [
        (0.5, 0.8, 1.06, 1),
        (0.5, 0.95, 1.21, 3),
        (0.8, 0.8, 1.24, 2),
        (0.8, 0.9, 1.41, 3),
        (0.8, 0.98, 1.71, 6),
        (1.0, 0.9, 1.75, 5),
        (1.0, 0.95, 1.99, 6),
    ],
)
def test_the_computed_speedup(
    sparsity: float, acceptance: float, speedup: float, drafted: int
) -> None:
    found = computed_speedup(acceptance, sparsity, 80)
    assert (round(found[0], 2), found[1]) == (speedup, drafted)


def test_drafts_that_read_everything_do_not_pay() -> None:
    assert computed_speedup(1.0, 0.8, 10_000)[0] == computed_speedup(1.0, 0.0, 80)[0] < 1
