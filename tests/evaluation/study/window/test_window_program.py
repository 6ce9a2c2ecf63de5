"""rlkv-study window on the tiny model, whole: settings, bytes, equal bytes, files, resuming, gates,
bad input.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv import tiny
from rlkv.cache import CacheSettings
from rlkv.cli.app import parse
from rlkv.cli.jobs import study_main as main
from rlkv.evaluation.window_config import WindowConfig
from rlkv.evaluation.window_published import published_sweeps
from rlkv.evaluation.window_run import run_window_study
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.prompts import render_prompt
from tests.helpers.plain_decoding import decode

TOKENS, NUM_PROBLEMS = 45, 4
SIZES = ["4 + 8", "4 + 16", "prompt + 8", "prompt + 16"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    problems = tiny.problems(NUM_PROBLEMS, seed=3, min_definitions=3, max_definitions=5)
    (folder / "problems.jsonl").write_text(
        "".join(json.dumps(problem) + "\n" for problem in problems)
    )
    return folder


def options(inputs: Path, output: Path, *more: str) -> list[str]:
    words = (
        "--gates tiny --sinks 4 --windows 8 --sparsities 0.5 0.75 --batch-size 4 "
        f"--max-new-tokens {TOKENS}"
    )
    return [
        *words.split(),
        "--data",
        str(inputs / "problems.jsonl"),
        "--output-dir",
        str(output),
        *more,
    ]


@pytest.fixture(scope="module")
def done(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("window")
    file = str(folder / "gates.safetensors")
    run_window_study(
        parse(
            WindowConfig, arguments=options(inputs, folder, "--margin", "1", "--write-gates", file)
        )
    )
    return folder


@pytest.fixture(scope="module")
def results(done: Path) -> dict[str, Any]:
    return json.loads((done / "results.json").read_text())


def test_every_setting_is_measured_once(done: Path, results: dict[str, Any]) -> None:
    found = results["tasks"]["tiny"]
    assert list(found["cells"]) == SIZES
    assert [len(cells) for cells in found["cells"].values()] == [2] * 4
    names = [condition["rows"] for condition in results["conditions"]]
    assert len(names) == len(set(names)) == len(list((done / "rows").glob("*.jsonl")))
    # the full cache, 4 sizes at 2 sparsities, and at each a longer window and fewer compressible
    # heads
    assert len(names) == 1 + 8 + 4


def test_accuracies_are_those_of_a_plain_decoding(inputs: Path, results: dict[str, Any]) -> None:
    model, tokenizer = tiny.load()
    problems = [json.loads(line) for line in (inputs / "problems.jsonl").read_text().splitlines()]
    for name, cache in (
        ("4 + 8", CacheSettings(4, 8)),
        ("prompt + 8", CacheSettings(4, 8, protect_prompt=True)),
    ):
        allocation = HeadAllocation.from_gates(HeadGates.load("tiny"), 0.75)
        _, correct = decode(model, tokenizer, problems, allocation, cache, TOKENS)
        assert results["tasks"]["tiny"]["cells"][name][1]["mean"] == sum(correct) / NUM_PROBLEMS


def test_shares_are_bytes_counted_by_hand_on_the_texts_of_the_full_cache(
    inputs: Path, done: Path, results: dict[str, Any]
) -> None:
    _, tokenizer = tiny.load()
    full_file = next(c["rows"] for c in results["conditions"] if c["sizes"] is None)
    rows = [json.loads(line) for line in (done / "rows" / full_file).read_text().splitlines()]
    texts = {row["key"]: len(row["token_ids"]) - 1 for row in rows if "key" in row}
    problems = [json.loads(line) for line in (inputs / "problems.jsonl").read_text().splitlines()]
    prompts = [
        len(tokenizer(render_prompt(tokenizer, p["problem"]), add_special_tokens=False).input_ids)
        for p in problems
    ]
    lengths = [
        prompt + texts[key]
        for prompt, key in zip(
            prompts, sorted(texts, key=lambda key: int(key.rpartition("/")[2])), strict=True
        )
    ]
    for name, kept in (
        ("4 + 8", [min(12, n) for n in lengths]),
        ("prompt + 8", [min(prompt + 8, n) for prompt, n in zip(prompts, lengths, strict=True)]),
    ):
        share = (12 * sum(lengths) + 12 * sum(kept)) / (24 * sum(lengths))
        assert results["tasks"]["tiny"]["cells"][name][0]["share"] == pytest.approx(share)


def test_the_three_ways_hold_the_same_bytes(results: dict[str, Any]) -> None:
    found = results["tasks"]["tiny"]
    for place, step in enumerate(found["steps"]):
        ways = step["ways"]
        assert step["sparsity"] == (0.5, 0.75)[place]
        budget = found["cells"]["prompt + 16"][place]["share"]
        assert ways["prompt"]["share"] == budget
        # a token of up to 18 heads is 0.02 of these texts, a head 0.04
        for name, most in (("bigger window", 0.02), ("fewer compressible heads", 0.04)):
            assert budget - most < ways[name]["share"] <= budget
        assert (
            ways["fewer compressible heads"]["sparsity"]
            < step["sparsity"]
            == ways["bigger window"]["sparsity"]
        )
        for way in ways.values():
            added = 100 * (way["share"] - step["base"]["share"])
            gained = way["accuracy"]["mean"] - step["base"]["accuracy"]["mean"]
            assert way["per_percent"]["mean"] == pytest.approx(100 * gained / added)


def test_pooled_gains_are_means_over_the_sparsities(results: dict[str, Any]) -> None:
    found = results["tasks"]["tiny"]
    for name, of in found["pooled"]["ways"].items():
        gains = [step["ways"][name]["gain"]["difference"] for step in found["steps"]]
        assert of["gain"]["difference"] == pytest.approx(sum(gains) / 2)
    pairs = [(of["first"], of["second"]) for of in found["pooled"]["pairs"]]
    assert pairs == [(of["first"], of["second"]) for of in found["steps"][0]["pairs"]]
    assert len(pairs) == 3


def test_gates_are_written_as_recommended(done: Path, results: dict[str, Any]) -> None:
    found, gates = results["recommendation"], HeadGates.load(done / "gates.safetensors")
    assert torch.equal(gates.alpha, HeadGates.load("tiny").alpha)
    assert (gates.deploy_window, gates.deploy_protect_prompt) == (
        found["sizes"]["window"],
        found["sizes"]["protect_prompt"],
    )
    assert gates.deploy_sink == 4
    assert gates.training["window_study"]["sparsity"] == found["sparsity"]


def test_a_second_run_decodes_nothing(
    inputs: Path, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file.name: file.read_bytes() for file in (done / "rows").iterdir()}
    lines = run_window_study(
        parse(WindowConfig, arguments=options(inputs, done, "--byte-budget", "0.7"))
    )
    assert before == {file.name: file.read_bytes() for file in (done / "rows").iterdir()}
    assert "within 70% of the bytes" in lines[0]


def test_without_compressible_heads_there_are_no_bytes_to_spend(inputs: Path, done: Path) -> None:
    arguments = options(inputs, done)
    at = arguments.index("--sparsities")
    arguments[at + 1 : at + 3] = ["0.01"]  # of 24 heads: none
    lines = run_window_study(parse(WindowConfig, arguments=arguments))
    assert lines[1].startswith("tiny: at no sparsity")


def test_the_page_has_the_published_sweeps(done: Path) -> None:
    for file in ("report.md", "report.html"):
        text = (done / file).read_text()
        assert "32 + 128: 80.8" in text
        assert "this study: tiny" in text
    assert (done / "window-tiny.png").stat().st_size > 0


def test_published_sweeps_at_sparsity_06() -> None:
    values = {
        (where.startswith("github"), model.rpartition("/")[2], task): {
            name: of.value for name, of in numbers.items()
        }
        for (where, model, task), numbers in published_sweeps().items()
    }
    assert values[True, "Qwen3-4B-Thinking-2507", "mbpp"] == {
        "16 + 64": 53.0,
        "32 + 128": 60.6,
        "64 + 256": 74.0,
        "full": 83.6,
    }
    assert values[False, "DeepSeek-R1-Distill-Llama-8B", "math500"]["16 + 64"] == 75.0
    assert len(values) == 5


def test_without_a_recommendation_no_gates_are_written(
    inputs: Path, done: Path, tmp_path: Path
) -> None:
    arguments = options(
        inputs, done, "--byte-budget", "0.01", "--write-gates", str(tmp_path / "gates.pt")
    )
    with pytest.raises(ValueError, match=r"gates\.pt.*--margin"):
        run_window_study(parse(WindowConfig, arguments=arguments))
    assert not (tmp_path / "gates.pt").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--protect-prompt"], "--protect-prompt"),
        (["--sinks", "-1"], "--sinks -1"),
        (["--windows", "0"], "--windows 0"),
        (["--sparsities", "0"], "--sparsities"),
        (["--margin", "2"], "--margin is 2"),
        (["--byte-budget", "1.5"], "--byte-budget is 1.5"),
        (["--write-gates", "gates.tsv"], r"--write-gates gates\.tsv"),
    ],
)
def test_bad_options_are_named(more: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(WindowConfig, arguments=["--gates", "tiny", "--output-dir", "out", *more])


def test_the_command_is_a_part_of_rlkv_study(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["rlkv-study", "window", "--help"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 0
    out = capsys.readouterr().out
    assert "rlkv-study window" in out
    assert "--write-gates" in out
