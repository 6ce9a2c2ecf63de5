"""The runner on the tiny model: fixed batches, resuming, several processes, bytes per row."""

from __future__ import annotations

import copy
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv import tiny
from rlkv.cache import CacheSettings
from rlkv.evaluation import runner
from rlkv.evaluation.metrics import RepetitionRule
from rlkv.evaluation.runner import Problem, RunSettings, render_problems, run_method
from rlkv.evaluation.tasks.base import EvalProblem
from rlkv.evaluation.tasks.registry import TASKS
from rlkv.eviction import RKV
from rlkv.gates.allocation import HeadAllocation
from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import SamplingParams
from rlkv.utils.store import settings_path
from rlkv.verifier import is_correct

GREEDY = RunSettings(CacheSettings(sink=4, window=16), SamplingParams(60), batch_size=3)
HALF = HeadAllocation.random(4, 6, 0.5, seed=1)


@pytest.fixture(scope="module")
def model_and_tokenizer():
    return tiny.load()


def problems(tokenizer, n: int = 7) -> list[Problem]:
    drawn = tiny.problems(n, seed=5, max_definitions=5)
    return [
        Problem(
            f"p{i}",
            render_prompt(tokenizer, p["problem"]),
            lambda text, a=p["answer"]: is_correct(text, a),
        )
        for i, p in enumerate(drawn)
    ]


def run(
    model_and_tokenizer,
    path: Path,
    settings: RunSettings = GREEDY,
    allocation: HeadAllocation = HALF,
    **facts,
):
    model, tokenizer = model_and_tokenizer
    seen: list[tuple[int, int]] = []
    rows = run_method(
        model,
        tokenizer,
        problems(tokenizer),
        allocation,
        settings,
        path,
        facts,
        lambda done, total, accuracy: seen.append((done, total)),
    )
    return rows, seen


def without_seconds(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def test_a_killed_run_ends_with_the_rows_of_an_uninterrupted_one(
    model_and_tokenizer, tmp_path: Path
) -> None:
    want, seen = run(model_and_tokenizer, tmp_path / "whole.jsonl")
    assert seen == [(done, 7) for done in range(8)], "every row is written as it ends"
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    for kept in (0, 1, 3, 5):  # whole lines, and a torn one
        path = tmp_path / f"killed{kept}.jsonl"
        path.write_text("".join(lines[:kept]) + lines[kept][:40])
        settings_path(path).write_bytes(settings_path(tmp_path / "whole.jsonl").read_bytes())
        got, seen = run(model_and_tokenizer, path)
        assert seen[0] == (kept, 7)
        assert without_seconds(got) == without_seconds(want)
        assert len(path.read_text().splitlines()) == 7


def test_rows_are_written_while_their_batch_is_decoded(model_and_tokenizer, tmp_path: Path) -> None:
    want, _ = run(model_and_tokenizer, tmp_path / "whole.jsonl")
    path = tmp_path / "stopped.jsonl"

    def stop(done: int, total: int, accuracy: float) -> None:
        assert len(path.read_text().splitlines()) == done
        if done == 2:  # in the middle of the first batch
            raise OSError("the disk is full")

    model, tokenizer = model_and_tokenizer
    with pytest.raises(OSError, match="disk"):
        run_method(model, tokenizer, problems(tokenizer), HALF, GREEDY, path, {}, stop)
    before = path.read_text()
    assert len(before.splitlines()) >= 2, "what had ended stays"
    got, _ = run(model_and_tokenizer, path)
    assert path.read_text().startswith(before)
    assert without_seconds(got) == without_seconds(want)


def test_slow_graders_do_not_hold_decoding(model_and_tokenizer, tmp_path: Path) -> None:
    model, tokenizer = model_and_tokenizer
    decoded = threading.Event()

    def grade(text: str) -> bool:
        return decoded.wait(60)  # false if decoding waited for this verdict

    slow = [replace(problem, grade=grade) for problem in problems(tokenizer)]
    batches = 0

    def watch(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal batches
        batches += kwargs["input_ids"].shape[1] > 1
        if batches == 3:
            decoded.set()

    handle = model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        rows = run_method(
            model, tokenizer, slow, HALF, GREEDY, tmp_path / "rows.jsonl", {}, lambda *_: None
        )
    finally:
        handle.remove()
    assert all(row["correct"] for row in rows)


def test_repetitive_texts_may_be_ended(model_and_tokenizer, tmp_path: Path) -> None:
    rule = RepetitionRule(window=8, distinct=7)
    free, _ = run(model_and_tokenizer, tmp_path / "free.jsonl", replace(GREEDY, rule=rule))
    stopped, _ = run(
        model_and_tokenizer, tmp_path / "s.jsonl", replace(GREEDY, rule=rule, stop_repetitive=True)
    )
    ended = 0
    for before, after in zip(free, stopped, strict=True):
        assert before["repetitive"] == after["repetitive"]
        assert after["token_ids"] == before["token_ids"][: len(after["token_ids"])]
        if after["finish_reason"] == "repetition":
            ended += 1
            assert after["repetitive"]
            assert len(after["token_ids"]) % rule.window == 0
        else:
            assert without_seconds([after]) == without_seconds([before])
    assert 0 < ended < 7
    with pytest.raises(ValueError, match=r"\(stop_repetitive\)"):
        run(model_and_tokenizer, tmp_path / "s.jsonl", replace(GREEDY, rule=rule))


def test_other_settings_are_refused_by_name(model_and_tokenizer, tmp_path: Path) -> None:
    run(model_and_tokenizer, tmp_path / "rows.jsonl", data="a")
    before = (tmp_path / "rows.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"\(data\)"):
        run(model_and_tokenizer, tmp_path / "rows.jsonl", data="b")
    # as after a lack of memory
    run(
        model_and_tokenizer, tmp_path / "rows.jsonl", replace(GREEDY, batch_size=2), data="a"
    )  # as after a lack of memory
    other = replace(GREEDY, cache=CacheSettings(eviction=RKV(budget=40)))
    with pytest.raises(ValueError, match=r"\(cache.eviction, cache.sink, cache.window\)"):
        run(model_and_tokenizer, tmp_path / "rows.jsonl", other, data="a")
    assert (tmp_path / "rows.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "name", ["weights", "answer", "prompt", "version", "library", "full heads"]
)
def test_what_a_run_depends_on_may_not_change(
    model_and_tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model, tokenizer = model_and_tokenizer
    path, allocation, given = tmp_path / "rows.jsonl", HALF, problems(tokenizer)

    def again() -> None:
        run_method(model, tokenizer, given, allocation, GREEDY, path, {}, lambda *_: None)

    again()
    before = path.read_bytes()
    if name == "weights":
        model = copy.deepcopy(model)
        with torch.no_grad():
            model.model.layers[2].mlp.up_proj.weight[0, 0] += 1e-3
        expected = "model_state.weights"
    elif name == "answer":
        given = [replace(given[0], reference="other"), *given[1:]]
        expected = "problems"
    elif name == "prompt":
        given = [replace(given[0], prompt=given[0].prompt + " ?"), *given[1:]]
        expected = "problems, prompt_tokens"
    elif name == "version":
        changed = runner.library_facts() | {"rlkv": "99"}
        monkeypatch.setattr(runner, "library_facts", lambda: changed)
        expected = "libraries.rlkv"
    elif name == "library":
        changed = runner.library_facts() | {"torch": "1.0"}
        monkeypatch.setattr(runner, "library_facts", lambda: changed)
        expected = r"libraries.torch\).*\"1.0\""
    else:
        allocation = HeadAllocation.random(4, 6, 0.5, seed=2)
        expected = "full_heads"
    with pytest.raises(ValueError, match=rf"\({expected}"):
        again()
    assert path.read_bytes() == before


def test_shares_of_two_processes_make_the_whole(model_and_tokenizer, tmp_path: Path) -> None:
    want, _ = run(model_and_tokenizer, tmp_path / "one.jsonl")
    parts = [
        run(model_and_tokenizer, tmp_path / f"{rank}.jsonl", replace(GREEDY, rank=rank, ranks=2))[0]
        for rank in (0, 1)
    ]
    assert [len(part) for part in parts] == [4, 3]
    check_same_rows([*parts[0], *parts[1]], want)


def check_same_rows(found: list[dict], want: list[dict]) -> None:
    order = sorted(without_seconds(found), key=lambda row: row["key"])
    assert order == sorted(without_seconds(want), key=lambda row: row["key"])


def test_another_number_of_processes_takes_the_rows_over(
    model_and_tokenizer, tmp_path: Path
) -> None:
    model, tokenizer = model_and_tokenizer
    want, _ = run(model_and_tokenizer, tmp_path / "one.jsonl")
    first = tmp_path / "rows-0-of-2.jsonl"
    run(
        model_and_tokenizer, first, replace(GREEDY, ranks=2)
    )  # the share of one of two processes; then both are killed
    lines = first.read_text().splitlines(keepends=True)
    first.write_text("".join(lines[:2]) + lines[2][:30])
    kept = first.read_bytes()
    seen = []
    rows = run_method(
        *(model, tokenizer, problems(tokenizer), HALF, GREEDY, tmp_path / "rows-0-of-1.jsonl", {}),
        lambda done, total, accuracy: seen.append((done, total)),
    )
    check_same_rows(rows, want)
    assert seen[0] == (2, 7)
    assert first.read_bytes() == kept
    assert len((tmp_path / "rows-0-of-1.jsonl").read_text().splitlines()) == 5, (
        "only what was missing is written"
    )

    parts = [
        run_method(
            *(model, tokenizer, problems(tokenizer), HALF, replace(GREEDY, rank=rank, ranks=3)),
            *(tmp_path / f"rows-{rank}-of-3.jsonl", {}, lambda *_: None),
        )
        for rank in range(3)
    ]
    check_same_rows([row for part in parts for row in part], want)
    assert not any((tmp_path / f"rows-{rank}-of-3.jsonl").read_text() for rank in range(3))
    other = replace(GREEDY, sampling=SamplingParams(61))
    with pytest.raises(ValueError, match=r"rows-0-of-2.jsonl.*\(sampling.max_new_tokens\)"):
        run_method(
            model,
            tokenizer,
            problems(tokenizer),
            HALF,
            other,
            tmp_path / "new.jsonl",
            {},
            lambda *_: None,
        )


def test_samples_differ_and_repeat(model_and_tokenizer, tmp_path: Path) -> None:
    settings = RunSettings(
        CacheSettings(), SamplingParams(30, temperature=5.0, seed=3), num_samples=2, batch_size=4
    )
    first, _ = run(model_and_tokenizer, tmp_path / "a.jsonl", settings)
    again, _ = run(model_and_tokenizer, tmp_path / "b.jsonl", settings)
    assert without_seconds(first) == without_seconds(again)
    texts = {(row["key"], row["sample"]): row["text"] for row in first}
    assert len(texts) == 14
    assert any(texts[f"p{i}", 0] != texts[f"p{i}", 1] for i in range(7))
    with pytest.raises(ValueError, match="greedy"):
        RunSettings(CacheSettings(), SamplingParams(30), num_samples=2)


def test_planned_lengths_do_not_go_with_a_growing_budget() -> None:
    policy = RKV(ratio=0.3, extra=64, variant="rlkv_tables")
    with pytest.raises(ValueError, match="rlkv_tables"):
        replace(GREEDY, cache=CacheSettings(eviction=policy), planned=(3000,))


def test_bytes_of_a_row_are_its_own(model_and_tokenizer, tmp_path: Path) -> None:
    _, tokenizer = model_and_tokenizer
    rows, _ = run(model_and_tokenizer, tmp_path / "rows.jsonl")
    full = HeadAllocation(torch.ones(4, 6, dtype=torch.bool))
    reference, _ = run(model_and_tokenizer, tmp_path / "full.jsonl", allocation=full)
    prompts = {
        p.key: len(tokenizer(p.prompt, add_special_tokens=False).input_ids)
        for p in problems(tokenizer)
    }
    for row in [*rows, *reference]:
        tokens = prompts[row["key"]] + len(row["token_ids"]) - 1
        assert row["kv_bytes_full"] == 24 * tokens * 2 * 32 * 4
    for row in rows:
        tokens = prompts[row["key"]] + len(row["token_ids"]) - 1
        assert row["kv_bytes"] == (12 * tokens + 12 * min(tokens, 20)) * 2 * 32 * 4
    assert all(row["kv_bytes"] == row["kv_bytes_full"] for row in reference)
    made = json.loads(settings_path(tmp_path / "full.jsonl").read_text())
    assert made["settings"]["libraries"]["rlkv"]
    assert "commit" in made["recorded"]


def test_thoughts_that_a_chat_template_opens_are_not_graded(model_and_tokenizer) -> None:
    tokenizer = copy.deepcopy(model_and_tokenizer[1])
    problem = EvalProblem("a", "Which?", "B", {"options": ["1", "2", "3", "4"]})
    for ending, cut_in_thoughts in (("", True), ("<think>\n", False)):
        tokenizer.chat_template = "{{ messages[0].content }}" + ending
        (rendered,) = render_problems(TASKS["gpqa_diamond"], [problem], tokenizer)
        assert rendered.grade("The answer is B. Wait,") is cut_in_thoughts
        assert rendered.grade("The answer is A. </think> The answer is B.")
