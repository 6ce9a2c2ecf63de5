"""The runner on the tiny model: resuming, shares of processes, bytes per row, what is compared."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv import tiny
from rlkv.cache import CacheSettings
from rlkv.evaluation import runner
from rlkv.evaluation.decoders import TransformersDecoder
from rlkv.evaluation.metrics import RepetitionRule
from rlkv.evaluation.runner import (
    Problem,
    RunSettings,
    render_problems,
    run_method,
)
from rlkv.evaluation.tasks.base import EvalProblem
from rlkv.evaluation.tasks.registry import TASKS
from rlkv.eviction import RKV
from rlkv.gates.allocation import HeadAllocation
from rlkv.models.loading import model_facts
from rlkv.rollout.base import SamplingParams
from rlkv.utils.runtime import library_facts
from rlkv.utils.store import settings_path
from tests.helpers.models import make_tiny_model
from tests.helpers.results import stable

GREEDY = RunSettings(CacheSettings(sink=4, window=16), SamplingParams(60), batch_size=3)
HALF = HeadAllocation.random(4, 6, 0.5, seed=1)
N = 7
Row = dict[str, Any]


@pytest.fixture(scope="module")
def tiny_model() -> Any:
    return tiny.load()


@pytest.fixture(scope="module")
def problems(tiny_model: Any) -> list[Problem]:
    drawn = [("", problem) for problem in tiny.problems(N, seed=5, max_definitions=5)]
    return render_problems(TASKS["tiny"], TASKS["tiny"].problems(drawn), tiny_model[1])


Run = Callable[..., tuple[list[Row], list[tuple[int, int]]]]


@pytest.fixture(scope="module")
def run(tiny_model: Any, problems: list[Problem]) -> Run:
    """Runs a method; returns the rows and what ``on_rows`` was told."""

    def call(
        path: Path,
        settings: RunSettings = GREEDY,
        allocation: HeadAllocation = HALF,
        given: list[Problem] = problems,
        model: Any = tiny_model[0],
    ) -> tuple[list[Row], list[tuple[int, int]]]:
        seen: list[tuple[int, int]] = []
        rows = run_method(
            TransformersDecoder(
                model, tiny_model[1], allocation, settings.cache, settings.batch_size
            ),
            given,
            settings,
            path,
            lambda done, total, accuracy: seen.append((done, total)),
        )
        return rows, seen

    return call


@pytest.fixture(scope="module")
def whole(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row]]:
    """File and rows of an uninterrupted run."""
    path = tmp_path_factory.mktemp("whole") / "one.jsonl"
    rows, seen = run(path)
    assert seen == [(done, N) for done in range(N + 1)], "every row is written as it ends"
    return path, rows


def by_key(rows: list[Row]) -> list[Row]:
    return sorted(stable(rows), key=lambda row: row["key"])


@pytest.mark.parametrize("kept", [0, 3])
def test_a_killed_run_ends_with_the_rows_of_an_uninterrupted_one(
    run: Run, whole: tuple[Path, list[Row]], tmp_path: Path, kept: int
) -> None:
    lines = whole[0].read_text().splitlines(keepends=True)
    path = tmp_path / "killed.jsonl"
    path.write_text("".join(lines[:kept]) + lines[kept][:40])  # whole lines, and a torn one
    settings_path(path).write_bytes(settings_path(whole[0]).read_bytes())
    got, seen = run(path)
    assert seen[0] == (kept, N)
    assert by_key(got) == by_key(whole[1])
    assert len(path.read_text().splitlines()) == N


def test_rows_are_written_while_their_batch_is_decoded(
    run: Run, tiny_model: Any, problems: list[Problem], tmp_path: Path
) -> None:
    path = tmp_path / "stopped.jsonl"

    def stop(done: int, total: int, accuracy: float) -> None:
        assert len(path.read_text().splitlines()) == done
        if done == 2:  # in the middle of the first batch
            raise OSError("the disk is full")

    decoder = TransformersDecoder(*tiny_model, HALF, GREEDY.cache, GREEDY.batch_size)
    with pytest.raises(OSError, match="disk"):
        run_method(decoder, problems, GREEDY, path, stop)
    before = path.read_text()
    assert len(before.splitlines()) >= 2, "what had ended stays"
    run(path)
    assert path.read_text().startswith(before)


def test_slow_graders_do_not_hold_decoding(
    run: Run, tiny_model: Any, problems: list[Problem], tmp_path: Path
) -> None:
    decoded = threading.Event()
    # false if decoding waited for the verdict
    slow = [replace(problem, grade=lambda text: decoded.wait(60)) for problem in problems]
    batches = 0

    def watch(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal batches
        batches += kwargs["input_ids"].shape[1] > 1
        if batches == 3:
            decoded.set()

    handle = tiny_model[0].register_forward_pre_hook(watch, with_kwargs=True)
    try:
        rows, _ = run(tmp_path / "rows.jsonl", given=slow)
    finally:
        handle.remove()
    assert all(row["correct"] for row in rows)


def test_repetitive_texts_may_be_ended(run: Run, tmp_path: Path) -> None:
    rule = RepetitionRule(window=8, distinct=7)
    free, _ = run(tmp_path / "free.jsonl", replace(GREEDY, rule=rule))
    stopped, _ = run(tmp_path / "s.jsonl", replace(GREEDY, rule=rule, stop_repetitive=True))
    ended = 0
    for before, after in zip(free, stopped, strict=True):
        assert before["repetitive"] == after["repetitive"]
        assert after["token_ids"] == before["token_ids"][: len(after["token_ids"])]
        if after["finish_reason"] == "repetition":
            ended += 1
            assert after["repetitive"]
            assert len(after["token_ids"]) % rule.window == 0
        else:
            assert stable(after) == stable(before)
    assert 0 < ended < N


def test_what_a_run_depends_on_may_not_change(
    run: Run,
    tiny_model: Any,
    problems: list[Problem],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "rows.jsonl"
    run(path)
    before = path.read_bytes()
    run(path, replace(GREEDY, batch_size=2))  # as after a lack of memory
    other_model = copy.deepcopy(tiny_model[0])
    with torch.no_grad():
        other_model.model.layers[2].mlp.up_proj.weight[0, 0] += 1e-3
    other_cache = replace(GREEDY, cache=CacheSettings(eviction=RKV(budget=40)))
    answer = [replace(problems[0], reference="other"), *problems[1:]]
    prompt = [replace(problems[0], prompt_ids=[1, 2]), *problems[1:]]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"settings": other_cache}, "cache.eviction, cache.sink, cache.window"),
        ({"settings": replace(GREEDY, stop_repetitive=True)}, "stop_repetitive"),
        ({"model": other_model}, "model_state.weights"),
        ({"allocation": HeadAllocation.random(4, 6, 0.5, seed=2)}, "full_heads"),
    ]
    for change, named in changes:
        with pytest.raises(ValueError, match=rf"\({named}"):
            run(path, **change)
    for given in (answer, prompt):
        with pytest.raises(ValueError, match=rf"rows of {problems[0].key} whose prompt, answer"):
            run(path, given=given)
    for library in ("rlkv", "torch"):
        found = library_facts() | {library: "99"}
        with monkeypatch.context() as patch:
            patch.setattr(runner, "library_facts", lambda found=found: found)
            with pytest.raises(ValueError, match=rf"\(libraries.{library}"):
                run(path)
    assert path.read_bytes() == before


def test_a_limit_may_grow_and_shrink(
    run: Run, whole: tuple[Path, list[Row]], problems: list[Problem], tmp_path: Path
) -> None:
    path = tmp_path / "rows-0-of-1.jsonl"
    few, _ = run(path, given=problems[:3])
    rows, seen = run(path)
    assert seen[0] == (3, N)
    assert by_key(rows) == by_key(whole[1])
    kept = path.read_bytes()
    again, seen = run(path, given=problems[:3])
    assert seen == [(3, 3)]
    assert by_key(again) == by_key(few)
    assert path.read_bytes() == kept
    # the row of another problem is not of this process's share, and in the report all the same
    other = [replace(problems[0], reference="other"), *problems[1:]]
    second = tmp_path / "rows-1-of-2.jsonl"
    with pytest.raises(ValueError, match="whose prompt, answer or tests were others"):
        run(second, replace(GREEDY, rank=1, ranks=2), given=other)
    assert not second.exists()


def test_another_number_of_processes_takes_the_rows_over(
    run: Run, whole: tuple[Path, list[Row]], tmp_path: Path
) -> None:
    first = tmp_path / "rows-0-of-2.jsonl"
    share, _ = run(first, replace(GREEDY, ranks=2))
    assert len(share) == 4
    lines = first.read_text().splitlines(keepends=True)
    first.write_text("".join(lines[:2]) + lines[2][:30])  # as a kill leaves it
    kept = first.read_bytes()
    rows, seen = run(tmp_path / "rows-0-of-1.jsonl")
    assert by_key(rows) == by_key(whole[1])
    assert seen[0] == (2, N)
    assert first.read_bytes() == kept
    written = (tmp_path / "rows-0-of-1.jsonl").read_text().splitlines()
    assert len(written) == 5, "only what was missing is written"
    parts = []
    for rank in range(3):
        settings = replace(GREEDY, rank=rank, ranks=3)
        parts += run(tmp_path / f"rows-{rank}-of-3.jsonl", settings)[0]
        assert not (tmp_path / f"rows-{rank}-of-3.jsonl").read_text()
    assert by_key(parts) == by_key(whole[1])
    other = replace(GREEDY, sampling=SamplingParams(61))
    with pytest.raises(ValueError, match=r"rows-0-of-1.jsonl.*\(sampling.max_new_tokens\)"):
        run(tmp_path / "rows-1-of-2.jsonl", other)


def test_samples_differ_and_repeat(run: Run, tmp_path: Path) -> None:
    sampling = SamplingParams(30, temperature=5.0, seed=3)
    settings = RunSettings(CacheSettings(), sampling, num_samples=2, batch_size=4)
    first, _ = run(tmp_path / "a.jsonl", settings)
    again, _ = run(tmp_path / "b.jsonl", settings)
    assert [row["text"] for row in first] == [row["text"] for row in again]
    texts = {(row["key"], row["sample"]): row["text"] for row in first}
    assert len(texts) == 2 * N
    assert any(texts[key, 0] != texts[key, 1] for key, _ in texts)
    with pytest.raises(ValueError, match="greedy"):
        RunSettings(CacheSettings(), SamplingParams(30), num_samples=2)


def test_bytes_of_a_row_are_its_own(
    run: Run, whole: tuple[Path, list[Row]], problems: list[Problem], tmp_path: Path
) -> None:
    full = HeadAllocation(torch.ones(4, 6, dtype=torch.bool))
    reference, _ = run(tmp_path / "full.jsonl", allocation=full)
    prompts = {problem.key: len(problem.prompt_ids) for problem in problems}
    for row in [*whole[1], *reference]:
        tokens = prompts[row["key"]] + len(row["token_ids"]) - 1
        assert row["kv_bytes_full"] == 24 * tokens * 2 * 32 * 4
        kept = 12 * tokens + 12 * min(tokens, 20) if row in whole[1] else 24 * tokens
        assert row["kv_bytes"] == kept * 2 * 32 * 4
    made = json.loads(settings_path(tmp_path / "full.jsonl").read_text())
    assert made["settings"]["libraries"]["rlkv"]
    assert "commit" in made["recorded"]


def test_thoughts_that_a_chat_template_opens_are_not_graded(tiny_model: Any) -> None:
    tokenizer = copy.deepcopy(tiny_model[1])
    problem = EvalProblem("a", "Which?", "B", {"options": ["1", "2", "3", "4"]})
    for ending, cut_in_thoughts in (("", True), ("<think>\n", False)):
        tokenizer.chat_template = "{{ messages[0].content }}" + ending
        (rendered,) = render_problems(TASKS["gpqa_diamond"], [problem], tokenizer)
        assert rendered.grade("The answer is B. Wait,") is cut_in_thoughts
        assert rendered.grade("The answer is A. </think> The answer is B.")


# --- what a resumed run compares


@pytest.mark.parametrize("place", [0, -1])
def test_another_state_of_the_model_is_seen(place: int) -> None:
    model = make_tiny_model("qwen3")
    before = model_facts(model)
    assert model_facts(make_tiny_model("qwen3")) == before
    for name, parameter in list(model.named_parameters())[::5]:
        with torch.no_grad():
            old = parameter.view(-1)[place].item()
            parameter.view(-1)[place] += 1
            after = model_facts(model)
            parameter.view(-1)[place] = old
        assert after["weights"] != before["weights"], name
    model.config._name_or_path = "another/folder"
    assert model_facts(model) == before, "a folder may move"
    model.config.rope_theta = 5e4
    assert model_facts(model)["config"] != before["config"]
    half = model_facts(model.to(torch.bfloat16))
    assert half["dtype"] == "torch.bfloat16"
    assert half["weights"] != before["weights"]
