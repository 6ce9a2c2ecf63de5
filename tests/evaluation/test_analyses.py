"""The analyses: summed up by hand, and rlkv-study on the tiny model, whole."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlkv import tiny
from rlkv.cache import CacheSettings
from rlkv.cache.accounting import KVSizes
from rlkv.evaluation.analyses import cost_metrics, cost_text
from rlkv.evaluation.measurements import Answer, Outcome, Texts
from rlkv.evaluation.study import ANALYSES, BY_NAME, load_study
from rlkv.evaluation.text_analyses import both_right, failed_texts, mode_shares
from rlkv.eviction import make_policy
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.prompts import render_prompt
from rlkv.utils.files import read_json, write_json
from rlkv.utils.store import settings_path
from tests.helpers.models import build_tokenizer
from tests.helpers.plain_decoding import decode
from tests.helpers.study_fakes import outcome, ranking
from tests.helpers.study_program import NUM_PROBLEMS, TOKENS, analysis, config_of, results, run

ALPHA = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
CACHE = CacheSettings(4, 16)
TITLES = [title for name, title in ANALYSES.items() if name not in BY_NAME]

# --- by hand


def test_modes_count_only_what_full_solves() -> None:
    full = outcome("1110")
    runs = [outcome("1000", modes="overlength"), outcome("1100", modes="incorrect")]
    shares = mode_shares(runs, full)
    assert shares is not None
    means = {mode: of["mean"] for mode, of in shares.items()}
    assert means == pytest.approx({"repetitive": 0, "overlength": 1 / 3, "incorrect": 1 / 6})
    assert {of["n"] for of in shares.values()} == {3}
    assert mode_shares(runs, outcome("0000")) is None


def test_lengths_where_both_are_right() -> None:
    full = outcome("1110", [10, 20, 30, 40])
    first, second = outcome("1011", [12, 99, 30, 1], "a"), outcome("1000", [14, 99, 99, 99], "b")
    both = both_right([first, second], full)
    assert both is not None
    # the first problem is solved twice, with 12 and 14 tokens
    assert (both["own"]["mean"], both["full"]["mean"]) == ((13 + 30) / 2, (10 + 30) / 2)
    assert (both["difference"]["mean"], both["own"]["n"]) == ((3 + 0) / 2, 2)
    assert both_right([outcome("0001")], full) is None


def test_a_text_that_failed_is_shown_as_it_was_judged() -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["</think>"], special_tokens=True)
    ids = tokenizer("a=1 </think> a=2 . <eos>", add_special_tokens=False).input_ids
    wrong = Answer(0.0, "incorrect", np.array(ids), kv_bytes=60, kv_bytes_full=100)
    study: Any = SimpleNamespace(
        tokenizer=tokenizer,
        first=None,
        sparsities=[0.5],
        problems={"tiny": [SimpleNamespace(key="tiny/1")]},
        full=lambda task: outcome("1"),
        runs=lambda *_: [Outcome("", (wrong,), seconds=1.0)],
    )
    text = failed_texts(study, "tiny")["incorrect"]["text"]
    assert text.replace(" ", "") == "a=1</think>a=2."


def test_costs_never_mix_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {
        "a": [{"time/step_s": 3.0, "time/step_cpu_s": 2.0}, {"time/step_cpu_s": 2.5}],
        "b": [{"time/step_s": 3.0}, {"time/step_s": 5.0, "time/step_cpu_s": 2.5}],
    }
    for name, records in steps.items():
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / name / "log.jsonl").write_text(lines)
    files = tuple(str(tmp_path / name / "gates.pt") for name in ("a", "b", "absent"))
    found = replace(ranking("RLKV", ALPHA, ALPHA, ALPHA), files=files)
    assert cost_text(cost_metrics(found)) == "4 s CPU + 8 s wall"
    folders = tuple(str(tmp_path / name) for name in ("a", "b", "absent"))  # these are gates too
    assert cost_metrics(replace(found, files=folders)) == cost_metrics(found)
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = tuple(f"~/{name}" for name in ("a", "b", "absent"))
    assert cost_metrics(replace(found, files=at_home)) == cost_metrics(found)
    for seed, seconds in enumerate((50, 70)):
        found.gates[seed].training = {"reranked": {"cpu_seconds": seconds}}
    again = cost_text(cost_metrics(found))
    assert again == "4 s CPU + 60 s CPU re-ranking (50 to 70, 2 seeds) + 8 s wall"
    assert cost_text(cost_metrics(ranking("x", ALPHA))) == ""
    monkeypatch.chdir(tmp_path / "a")
    packaged = replace(ranking("Tiny", ALPHA), files=("tiny",))  # without a log of its own
    assert cost_text(cost_metrics(packaged)) == ""


# --- on the tiny model


@pytest.fixture(scope="module")
def study(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("study")
    run(inputs, output, "--sizes", "4+8", "prompt+8", "4+16")
    return output


@pytest.fixture(scope="module")
def problems(inputs: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (inputs / "problems.jsonl").read_text().splitlines()]


def test_every_allocation_is_measured_once(study: Path) -> None:
    found = results(study)["conditions"]
    names = [condition["requested_as"] for condition in found]
    # both seeds and three analyses request it
    assert ["mine @ 0.5", "mine, 4+16 @ 0.5"] in names
    assert ["other <b> @ 0.5", "variant @ 0.5"] in names
    only_matched = [of for of in names if all(name.endswith("30% saved") for name in of)]
    # full, mine, other = variant, oracle, two draws; as many without the top heads; two sizes;
    # methods at matched bytes
    assert len(found) == 6 + 5 + 2 + len(only_matched)
    assert len(list((study / "rows").glob("*.jsonl"))) == len(found)
    drawn = [of["part"] for of in found if of["requested_as"][0].startswith("random heads")]
    assert drawn == [[0, 2], [1, 2]] * 3  # at 0.5, without the top heads, at matched bytes
    assert list(results(study)["analyses"]) == [of for of in ANALYSES if of not in BY_NAME]


def test_methods_at_matched_bytes(study: Path, problems: list[dict[str, Any]]) -> None:
    found = {name: row["savings"][0] for name, row in analysis(study, "budget")["methods"].items()}
    policies = ["rkv", "rkv (prompt kept)"]
    rankings = ("mine", "other <b>", "oracle (measured)", "random heads")
    expected = {*policies, "rkv, fixed budget", *(f"mine + {policy}" for policy in policies)}
    assert set(found) == expected | {f"{name} + sinks + window" for name in rankings}
    assert found["rkv"]["full_heads"] == 0 < found["mine + rkv"]["full_heads"] < 24
    model, tokenizer = tiny.load()
    measured = {name: of for of in results(study)["conditions"] for name in of["requested_as"]}
    prompts = [render_prompt(tokenizer, problem["problem"]) for problem in problems]
    prompt_tokens = list(map(len, tokenizer(prompts, add_special_tokens=False).input_ids))

    def texts(name: str) -> Texts:
        lines = (study / "rows" / measured[name]["rows"]).read_text().splitlines()
        tokens = {row["key"]: len(row["token_ids"]) for row in map(json.loads, lines)}
        lengths = [(n, n + tokens[f"tiny/{i}"] - 1) for i, n in enumerate(prompt_tokens, start=1)]
        return Texts(lengths, KVSizes.of(model), CACHE)

    for name in ("mine + rkv", "rkv (prompt kept)", "mine + sinks + window"):
        condition = measured[f"{name}, 30% saved"]
        heads = torch.tensor(condition["full_heads"], dtype=torch.bool)
        policy = make_policy(**condition["policy"]) if condition["policy"] else None
        # on the texts of the full cache: at most what was asked for, and not much less
        assert 0.6 < texts("full cache").held(policy, heads) <= 0.7
        cache = CACHE.with_policy(policy)
        _, correct = decode(model, tokenizer, problems, HeadAllocation(heads), cache, TOKENS)
        assert found[name]["accuracy"]["mean"] == sum(correct) / NUM_PROBLEMS
        own = texts(f"{name}, 30% saved").held(policy, heads)
        assert found[name]["accuracy"]["kv_share"] == pytest.approx(own)
    fixed = measured["rkv, fixed budget, 30% saved"]
    assert fixed["planned"] == [tokens for _, tokens in texts("full cache").lengths]
    none_full = HeadAllocation(torch.zeros(4, 6, dtype=torch.bool))
    policy = make_policy(**fixed["policy"])
    right = []
    for problem, tokens in zip(problems, fixed["planned"], strict=True):
        own = replace(policy, ratio=None, budget=int(policy.ratio * tokens) + policy.extra)
        cache = CacheSettings(eviction=own)
        right += decode(model, tokenizer, [problem], none_full, cache, TOKENS)[1]
    assert found["rkv, fixed budget"]["accuracy"]["mean"] == sum(right) / NUM_PROBLEMS


def test_a_sweep_is_what_plain_decoding_gives(
    study: Path, inputs: Path, problems: list[dict[str, Any]]
) -> None:
    model, tokenizer = tiny.load()
    allocation = HeadAllocation.from_gates(HeadGates.load(inputs / "a" / "gates.pt"), 0.5)
    protected = CacheSettings(0, 8, protect_prompt=True)
    sizes = {"4+16": CACHE, "4+8": CacheSettings(4, 8), "prompt+8": protected}
    sweep = analysis(study, "sweep")
    found = {name: sweep["sizes"][f"mine, {name}"][0] for name in sizes}
    assert found["4+16"]["mean"] == sweep["methods"]["mine"][0]["mean"]
    for name, cache in sizes.items():
        _, correct = decode(model, tokenizer, problems, allocation, cache, TOKENS)
        assert found[name]["mean"] == sum(correct) / NUM_PROBLEMS
        assert (found[name]["seeds"], found[name]["distinct"]) == ([found[name]["mean"]] * 2, 1)
    assert 0.5 < found["4+8"]["share"] < found["4+16"]["share"] < found["prompt+8"]["share"] < 1
    table = (study / "table.md").read_text()
    assert re.search(
        r"\| mine, prompt\+8 \| .*% of the bytes at the full cache.s lengths \|  \|", table
    )


def test_draws_share_the_problems(
    study: Path, inputs: Path, problems: list[dict[str, Any]]
) -> None:
    loaded = load_study(config_of(inputs, study))  # rows are there already
    random = loaded.rankings[-1]
    loaded.measure("again", loaded.requests(["sweep"]))
    model, tokenizer = tiny.load()
    allocations = random.allocations(0.5)
    (joined,) = loaded.runs("tiny", random, 0.5)
    for i, problem in enumerate(problems):
        (text,), correct = decode(model, tokenizer, [problem], allocations[i % 2], CACHE, TOKENS)
        assert joined.answers[i].tokens.tolist() == list(text.token_ids)
        assert joined.correct[i] == correct[0]
    sweep = analysis(study, "sweep")["methods"]["random heads"][0]
    assert (sweep["n"], sweep["draws"]) == (NUM_PROBLEMS, 2)
    assert sweep["seeds"] == [joined.correct.mean()]
    assert "2 draws, which share the problems" in (study / "table.md").read_text()


def test_parts_of_draws_and_the_order_of_measuring(inputs: Path, tmp_path: Path) -> None:
    more = ("--random-draws", "7", "--sparsities", "0.5", "0.2")
    loaded = load_study(config_of(inputs, tmp_path, *more))
    random = loaded.rankings[-1]
    parts = [of.part for of in loaded.seeds("tiny", random, random.allocations(0.5))]
    assert parts == [(i, NUM_PROBLEMS) for i in range(NUM_PROBLEMS)]  # not more than problems
    (same,) = loaded.seeds("tiny", random, random.allocations(1.0))  # all have the same heads
    assert same.part is None
    names = dict.fromkeys(name for name, _ in loaded.requests(["sweep"]))
    assert [name.split(" @ ")[1] for name in names] == ["0.5"] * 4 + ["0.2"] * 4


def test_analyses_agree_with_each_other(study: Path) -> None:
    full = results(study)["full_cache"]["tiny"]
    methods = analysis(study, "sweep")["methods"]
    for row in analysis(study, "comparison")["rows"]:
        means = (row["first"]["mean"], row["second"]["mean"])
        assert means == (methods["mine"][0]["mean"], methods[row["other"]][0]["mean"])
        assert row["difference"]["difference"] == pytest.approx(means[0] - means[1])
    variant = analysis(study, "ablations")["variant"][0]
    assert variant["first"]["mean"] == methods["other <b>"][0]["mean"]
    assert analysis(study, "modes")["solved"] == round(full["accuracy"] * NUM_PROBLEMS)
    costs = results(study)["costs"]["mine"]["steps"]
    assert [(of["unit"], of["mean"]) for of in costs] == [("CPU", 7.0)]


def test_the_report_shows_a_text_that_failed(inputs: Path, study: Path, tmp_path: Path) -> None:
    shutil.copytree(study / "rows", tmp_path / "rows")
    run(inputs, tmp_path, "--analyses", "modes", "--gates", f"other={inputs}/c/gates.pt")
    modes = analysis(tmp_path, "modes")
    assert modes["methods"]["other <b>"][0]["incorrect"]["mean"] > 0
    assert modes["examples"].keys() == {"incorrect"}
    assert modes["examples"]["incorrect"]["text"] in (tmp_path / "report.md").read_text()


def test_the_report_is_whole(study: Path) -> None:
    page = (study / "report.html").read_text()
    text = (study / "report.md").read_text()
    assert "other &lt;b&gt;" in page
    assert "<b>" not in page
    assert len(re.findall("<img ", page)) == len(list(study.glob("*.png"))) == 8
    for picture in study.glob("*.png"):
        assert f"(<{picture.name}>)" in text
    for word in ("torch", "cores", "2 seeds, 1 set of heads", *TITLES):
        assert word in text
        assert word in page
    accuracy = analysis(study, "sweep")["methods"]["mine"][0]["mean"]
    row = rf"\| mine \| .* \| {accuracy:.3f} \(.*; 2 seeds, 1 set of heads \| 7 s CPU \|"
    assert re.search(row, (study / "table.md").read_text())
    assert "| KV held, of full | 100% |" in (study / "table.md").read_text()


def test_no_method_fits_a_saving_that_is_too_large(inputs: Path, tmp_path: Path) -> None:
    run(inputs, tmp_path, "--analyses", "budget", "--savings", "0.97", "--no-fixed-budgets")
    text = (tmp_path / "report.md").read_text()
    assert "| rkv | n/a |" in text
    assert "rkv, fixed budget" not in text
    assert not (tmp_path / "table.md").exists()


def test_a_second_process_only_measures(inputs: Path, study: Path, tmp_path: Path) -> None:
    shutil.copytree(study / "rows", tmp_path / "rows")
    missing = sorted((tmp_path / "rows").glob("*.jsonl"))[-1]
    missing.unlink()
    run(inputs, tmp_path, "--sizes", "4+8", "prompt+8", "4+16", "--measure-only")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["measured.json", "rows"]
    found = json.loads((tmp_path / "measured.json").read_text())["conditions"]
    pairs = [(of["rows"], of["accuracy"]) for of in found]
    assert pairs == [(of["rows"], of["accuracy"]) for of in results(study)["conditions"]]


def test_the_same_command_goes_on_and_refuses_other_settings(
    inputs: Path, study: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "again"
    shutil.copytree(study, folder)
    before = results(folder)["analyses"]["comparison"]
    found = results(folder)["conditions"]
    (compared,) = [of["rows"] for of in found if "mine @ 0.5" in of["requested_as"]]
    rows = sorted((folder / "rows").glob("*.jsonl"), key=lambda file: file.name != compared)
    torn = rows[0].read_bytes()
    rows[0].write_bytes(torn[: len(torn) // 2])
    files = {file: file.read_bytes() for file in rows[1:]}
    (folder / "table.md").write_text("of another sweep")
    run(inputs, folder, "--analyses", "comparison")
    assert not (folder / "table.md").exists()
    assert results(folder)["analyses"]["comparison"] == before
    assert {file: file.read_bytes() for file in rows[1:]} == files
    assert "made alike" not in (folder / "report.md").read_text()
    noted = read_json(settings_path(rows[1]))
    noted["recorded"]["batch_size"] = 3
    write_json(settings_path(rows[1]), noted)
    run(inputs, folder, "--analyses", "comparison")
    assert "made alike" in (folder / "report.md").read_text()
    with pytest.raises(ValueError, match=r"\(cache\.window\).* 16\b.* 12\b"):
        run(inputs, folder, "--window", "12")
