"""rlkv-study on the tiny model, whole: conditions, files, numbers, resuming."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv import tiny
from rlkv.cache import CacheSettings
from rlkv.cache.accounting import EntrySize
from rlkv.evaluation.analyses import ANALYSES, Sensitivity, Sweep, load_study
from rlkv.evaluation.study import kv_share
from rlkv.eviction import make_policy
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.prompts import render_prompt
from tests.helpers.plain_decoding import decode
from tests.helpers.study_program import NUM_PROBLEMS, TOKENS, config_of, results, run, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def study(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("study")
    assert run(inputs, output)
    return output


def methods_at_bytes(study: Path) -> dict[str, Any]:
    methods = results(study)["analyses"]["budget"]["tasks"]["tiny"]["methods"]
    return {name: row["savings"][0] for name, row in methods.items()}


def test_every_allocation_is_measured_once(study: Path) -> None:
    found = results(study)
    conditions = found["conditions"]
    names = {tuple(condition["requested_as"]) for condition in conditions}
    assert ("mine @ 0.5",) in names  # both seeds and three analyses request it
    assert ("other <b> @ 0.5", "variant @ 0.5") in names
    matched = {name for names in names for name in names if name.endswith("30% saved")}
    assert len(matched) == sum(of is not None for of in methods_at_bytes(study).values())
    only_matched = [
        of for of in conditions if all(name.endswith("30% saved") for name in of["requested_as"])
    ]
    # full, mine, other = variant, oracle, two draws; as many without the top heads; methods at
    # matched bytes
    assert len(conditions) == 6 + 5 + len(only_matched)
    assert len(list((study / "rows").glob("*.jsonl"))) == len(conditions)
    parts = {None: NUM_PROBLEMS, (0, 2): 3, (1, 2): 2}
    assert all(
        condition["n"] == parts[condition["part"] and tuple(condition["part"])]
        for condition in conditions
    )
    drawn = [
        of["part"]
        for of in conditions
        if any(name.startswith("random heads") for name in of["requested_as"])
    ]
    assert drawn == [[0, 2], [1, 2]] * 3  # at 0.5, without the top heads, at matched bytes
    assert list(found["analyses"]) == list(ANALYSES)
    assert found["config"]["policies"] == ["rkv"]


def test_methods_at_matched_bytes(study: Path, inputs: Path) -> None:
    """Each policy alone and under the first ranking, with either treatment of the prompt, and every
    ranking.
    """
    found = methods_at_bytes(study)
    policies = ["rkv", "rkv (prompt kept)"]
    assert set(found) == {
        *policies,
        *(f"mine + {policy}" for policy in policies),
        "rkv, fixed budget",
        *(
            f"{name} + sinks + window"
            for name in ("mine", "other <b>", "oracle (measured)", "random heads")
        ),
    }
    assert found["rkv"]["budget"]["ratio"] > 0
    assert (found["rkv"]["fixed"], found["rkv, fixed budget"]["fixed"]) == (False, True)
    assert found["rkv"]["full_heads"] == 0 < found["mine + rkv"]["full_heads"] < 24
    model, tokenizer = tiny.load()
    problems = [json.loads(line) for line in (inputs / "problems.jsonl").read_text().splitlines()]
    conditions = {name: of for of in results(study)["conditions"] for name in of["requested_as"]}

    def lengths(name: str) -> list[tuple[int, int]]:
        rows = [
            json.loads(line)
            for line in (study / "rows" / conditions[name]["rows"]).read_text().splitlines()
        ]
        tokens = {row["key"]: len(row["token_ids"]) for row in rows if "key" in row}
        texts = [render_prompt(tokenizer, p["problem"]) for p in problems]
        prompts = [len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
        return [(n, n + tokens[f"tiny/{i + 1}"] - 1) for i, n in enumerate(prompts)]

    size = EntrySize.of(model)
    for name in ("rkv", "mine + rkv", "rkv (prompt kept)", "mine + sinks + window"):
        condition = conditions[f"{name}, 30% saved"]
        heads = torch.tensor(condition["full_heads"], dtype=torch.bool)
        fields = dict(condition["policy"] or {})
        policy = make_policy(fields.pop("name"), **fields) if fields else None
        cache = CacheSettings(4, 16, "full", policy)
        # on the texts of the full cache: at most what was asked for, and not much less
        assert 0.6 < kv_share(cache, heads, size, lengths("full cache")) <= 0.7
        _, correct = decode(model, tokenizer, problems, HeadAllocation(heads), cache, TOKENS)
        assert found[name]["accuracy"]["mean"] == sum(correct) / NUM_PROBLEMS
        own = kv_share(cache, heads, size, lengths(f"{name}, 30% saved"))
        assert found[name]["accuracy"]["kv_share"] == pytest.approx(own)
    fixed, texts = conditions["rkv, fixed budget, 30% saved"], lengths("full cache")
    assert fixed["planned"] == [tokens for _, tokens in texts]
    none_full, policy, right = (
        torch.zeros(4, 6, dtype=torch.bool),
        make_policy(**fixed["policy"]),
        [],
    )
    assert 0.6 < kv_share(CacheSettings(eviction=policy), none_full, size, texts, fixed=True) <= 0.7
    for problem, tokens in zip(problems, fixed["planned"], strict=True):
        own = replace(policy, ratio=None, budget=int(policy.ratio * tokens) + policy.extra)
        right += decode(
            model,
            tokenizer,
            [problem],
            HeadAllocation(none_full),
            CacheSettings(eviction=own),
            TOKENS,
        )[1]
    assert found["rkv, fixed budget"]["accuracy"]["mean"] == sum(right) / NUM_PROBLEMS


def test_no_method_fits_a_saving_that_is_too_large(inputs: Path, tmp_path: Path) -> None:
    findings = run(
        inputs, tmp_path, "--analyses", "budget", "--savings", "0.97", "--no-fixed-budgets"
    )
    assert findings
    assert "97% of the bytes saved: no method fits" in findings[0]
    text = (tmp_path / "report.md").read_text()
    assert "| rkv | n/a |" in text
    assert "fixed budget" not in text


def test_metrics_are_those_of_the_plain_measurement(study: Path, inputs: Path) -> None:
    model, tokenizer = tiny.load()
    problems = [json.loads(line) for line in (inputs / "problems.jsonl").read_text().splitlines()]
    allocation = HeadAllocation.from_gates(HeadGates.load(inputs / "a" / "gates.pt"), 0.5)
    completions, correct = decode(
        model, tokenizer, problems, allocation, CacheSettings(4, 16), TOKENS, batch_size=6
    )
    sweep = results(study)["analyses"]["sweep"]["tasks"]["tiny"]["methods"]["mine"][0]
    assert sweep["mean"] == sum(correct) / NUM_PROBLEMS
    assert sweep["seeds"] == [sweep["mean"]] * 2
    assert sweep["distinct"] == 1
    lengths = results(study)["analyses"]["lengths"]["tasks"]["tiny"]["methods"]["mine"][0]
    assert lengths["all"]["mean"] == pytest.approx(
        sum(len(c.token_ids) for c in completions) / NUM_PROBLEMS
    )


def test_draws_share_the_problems(study: Path, inputs: Path) -> None:
    """Each problem is decoded under its draw; the outcome of all draws has every problem once, in
    the task's order.
    """
    loaded = load_study(config_of(inputs, study))  # rows are there already
    random = loaded.rankings[-1]
    loaded.measurements.measure(
        "again", [*loaded.conditions([random], [0.5]), *Sensitivity().conditions(loaded)]
    )
    model, tokenizer = tiny.load()
    problems = [json.loads(line) for line in (inputs / "problems.jsonl").read_text().splitlines()]
    for allocations in (random.allocations(0.5), random.without_top(2)):
        (joined,) = loaded.measurements.outcomes(loaded.seeds("tiny", random, allocations))
        assert (joined.draws, len(allocations)) == (2, 2)
        for i, problem in enumerate(problems):
            (text,), correct = decode(
                model, tokenizer, [problem], allocations[i % 2], CacheSettings(4, 16), TOKENS
            )
            assert (joined.tokens[i].tolist(), [joined.correct[i]]) == (
                list(text.token_ids),
                correct,
            )
    sweep = results(study)["analyses"]["sweep"]["tasks"]["tiny"]["methods"]["random heads"][0]
    shared = loaded.runs("tiny", random, 0.5)[0]
    assert (sweep["n"], sweep["seeds"], sweep["draws"]) == (
        NUM_PROBLEMS,
        [shared.correct.mean()],
        2,
    )
    assert "2 draws, which share the problems" in (study / "table.md").read_text()


def test_parts_of_draws_and_the_order_of_measuring(inputs: Path, tmp_path: Path) -> None:
    loaded = load_study(
        config_of(inputs, tmp_path, "--random-draws", "7", "--sparsities", "0.5", "0.2")
    )
    random = loaded.rankings[-1]

    def parts(sparsity: float) -> list[tuple[int, int] | None]:
        return [
            condition.part
            for condition in loaded.seeds("tiny", random, random.allocations(sparsity))
        ]

    assert parts(0.5) == [
        (i, NUM_PROBLEMS) for i in range(NUM_PROBLEMS)
    ]  # not more draws than problems
    assert parts(1.0) == [None]  # all draws have the same heads
    names = dict.fromkeys(name for name, _ in Sweep().conditions(loaded))
    assert [name.split(" @ ")[1] for name in names] == ["0.5"] * 4 + ["0.2"] * 4
    assert loaded.sparsities == (0.2, 0.5)


def test_analyses_agree_with_each_other(study: Path) -> None:
    found = results(study)["analyses"]
    full = results(study)["full_cache"]["tiny"]
    methods = found["sweep"]["tasks"]["tiny"]["methods"]
    for row in found["comparison"]["tasks"]["tiny"]["rows"]:
        assert row["first"]["mean"] == methods["mine"][0]["mean"]
        assert row["second"]["mean"] == methods[row["other"]][0]["mean"]
        assert row["difference"]["difference"] == pytest.approx(
            row["first"]["mean"] - row["second"]["mean"]
        )
    variant = found["ablations"]["tasks"]["tiny"]["variant"][0]
    assert variant["first"]["mean"] == methods["other <b>"][0]["mean"]
    for name, (shares,) in found["modes"]["tasks"]["tiny"]["methods"].items():
        solved = found["modes"]["tasks"]["tiny"]["solved"]
        assert solved == round(full["accuracy"] * NUM_PROBLEMS)
        assert 0 <= sum(of["mean"] for of in shares.values()) <= 1, name
    for mode, example in found["modes"]["tasks"]["tiny"]["examples"].items():
        assert found["modes"]["tasks"]["tiny"]["methods"]["mine"][0][mode]["mean"] > 0
        assert example["text"] in (study / "report.md").read_text()
    for shares in found["lengths"]["tasks"]["tiny"]["histogram"]["shares"].values():
        assert sum(shares) == pytest.approx(1)
    assert found["comparison"]["costs"]["mine"]["steps"] == [
        {"step": "training", "unit": "CPU", "mean": 7.0, "low": 7.0, "high": 7.0, "n": 1}
    ]


def test_the_report_is_whole_and_loads_nothing(study: Path) -> None:
    page = (study / "report.html").read_text()
    assert "other &lt;b&gt;" in page
    assert "<b>" not in page
    assert set(re.findall(r"(?:src|href)=\"([^\"]{0,22})", page)) <= {
        "data:image/png;base64,",
        *_anchors(page),
    }
    assert len(re.findall("<img ", page)) == len(list(study.glob("*.png"))) == 8
    text = (study / "report.md").read_text()
    for line in results(study)["findings"]["comparison"]:
        assert line.replace("<", "&lt;").replace(">", "&gt;") in page
    for picture in study.glob("*.png"):
        assert f"(<{picture.name}>)" in text
    for word in ("torch", "cores", "2 seeds, 1 set of heads", "its file does not say"):
        assert word in text
        assert word in page
    accuracy = results(study)["analyses"]["sweep"]["tasks"]["tiny"]["methods"]["mine"][0]["mean"]
    table = (study / "table.md").read_text()
    assert re.search(
        rf"\| mine \| .* \| {accuracy:.3f} \(.*; 2 seeds, 1 set of heads \| 7 s CPU \|", table
    )
    assert "| KV held, of full | 100% |" in table


def _anchors(page: str) -> set[str]:
    return {f"#{name}"[:22] for name in re.findall(r'id="([^"]+)"', page)}


def test_a_second_process_only_measures(inputs: Path, study: Path, tmp_path: Path) -> None:
    shutil.copytree(study / "rows", tmp_path / "rows")
    missing = sorted((tmp_path / "rows").glob("*.jsonl"))[-1]
    missing.unlink()
    assert run(inputs, tmp_path, "--measure-only") is None
    assert sorted(file.name for file in tmp_path.iterdir()) == ["measured.json", "rows"]
    assert missing.exists()
    found, wanted = (
        json.loads((tmp_path / "measured.json").read_text())["conditions"],
        results(study)["conditions"],
    )
    assert [(of["rows"], of["accuracy"]) for of in found] == [
        (of["rows"], of["accuracy"]) for of in wanted
    ]


def test_the_same_command_goes_on_and_refuses_other_settings(
    inputs: Path, study: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "again"
    shutil.copytree(study, folder)
    before = results(folder)["analyses"]["comparison"]
    compared = {
        of["rows"] for of in results(folder)["conditions"] if "mine @ 0.5" in of["requested_as"]
    }
    rows = sorted((folder / "rows").glob("*.jsonl"), key=lambda file: file.name not in compared)
    rows[1].unlink()
    torn = rows[0].read_bytes()
    rows[0].write_bytes(torn[: len(torn) // 2])
    files = {file.name: file.read_bytes() for file in rows[2:]}
    run(inputs, folder, "--analyses", "comparison")
    assert results(folder)["analyses"]["comparison"] == before
    assert {file.name: file.read_bytes() for file in rows[2:]} == files
    with pytest.raises(ValueError, match=r"\(cache\.window\).* 16\b.* 12\b"):
        run(inputs, folder, "--window", "12")


def test_one_analysis_measures_only_its_own(inputs: Path, tmp_path: Path) -> None:
    run(inputs, tmp_path, "--analyses", "gates")
    assert len(results(tmp_path)["conditions"]) == 1
    assert list(results(tmp_path)["analyses"]) == ["gates"]
    assert not (tmp_path / "table.md").exists()
