"""Presets: what each sets, what overrides them, and samples and limits of single tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlkv.cli.app import parse
from rlkv.evaluation.evaluate import EvalConfig, number_for
from rlkv.evaluation.tasks.registry import find_tasks


def config(*arguments: str) -> EvalConfig:
    return parse(EvalConfig, arguments=["--output-dir", "out", *arguments])


@pytest.mark.parametrize(
    ("preset", "samples", "limits", "sampling"),
    [
        (
            "rlkv",
            {"gsm8k": 1, "aime24": 1},
            {"gsm8k": 8192, "aime24": 16384, "mmlu_pro:law": 8192},
            (0.0, 1.0),
        ),
        ("rkv", {"math500": 64, "aime24": 64}, {"math500": 16384, "aime24": 32768}, (0.6, 0.95)),
        (
            "rpc",
            {"aime24": 8, "livecodebench": 4, "ifeval": 1},
            {"aime24": 32768, "ifeval": 32768},
            (0.6, 0.95),
        ),
        (
            "modern",
            {
                "math500": 2,
                "gpqa_diamond": 4,
                "livecodebench:medium": 4,
                "aime25": 16,
                "aime26": 16,
                "hmmt25": 16,
            },
            {"math500": 32768, "hmmt25": 32768},
            (0.6, 0.95),
        ),
    ],
)
def test_protocols(
    preset: str, samples: dict[str, int], limits: dict[str, int], sampling: tuple[float, float]
) -> None:
    found = config("--preset", preset)
    tasks = {task.name: task for task in find_tasks(found.tasks, None)}
    assert samples.keys() <= tasks.keys()
    assert preset == "rlkv" or tasks.keys() == samples.keys()
    assert {name: found.samples_of(tasks[name]) for name in samples} == samples
    assert {name: found.token_limit(tasks[name]) for name in limits} == limits
    assert (found.temperature, found.top_p) == sampling
    assert (found.prefill, found.stop_repetitive) == (
        ("published", True) if preset == "rlkv" else ("full", False)
    )
    assert found.preset == preset


def test_built_in_models_fit_every_preset() -> None:
    for preset in ("rlkv", "rkv", "rpc", "modern"):
        found = config("--preset", preset, "--tasks", "tiny", "smol")
        assert [found.token_limit(task) for task in find_tasks(found.tasks, None)] == [440, 448]
    assert (
        config("--preset=modern", "--tasks", "tiny").samples_of(find_tasks(["tiny"], None)[0]) == 4
    )


def test_the_command_line_comes_before_the_config_and_the_config_before_the_preset(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("preset: rkv\ntemperature: 1.0\nnum_samples: 8\n")
    found = config("--config", str(file))
    assert (found.tasks, found.temperature, found.num_samples) == (
        ("math500", "aime24"),
        1.0,
        ("8",),
    )
    found = config("--config", str(file), "--preset", "modern", "--num-samples", "2")
    assert (found.tasks[1], found.temperature, found.num_samples) == ("gpqa_diamond", 1.0, ("2",))
    found = config("--config", "eval_llama8b", "--preset", "modern")
    assert (found.temperature, found.stop_repetitive, found.methods[1]) == (0.6, False, "rlkv@0.2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "rlvk"], "'rlvk'.*modern, rkv, rlkv, rpc"),
        (["--num-samples", "0"], "--num-samples 0"),
        (["--num-samples", "four"], "--num-samples four"),
        (["--num-samples", "4", "2"], "--num-samples 4 2"),
        (["--num-samples", "4", "tiny=2", "tiny=3"], "'tiny=3'"),
        (["--num-samples", "tinny=2"], "'tinny'"),
        (["--max-new-tokens", "tiny=-1"], "'tiny=-1'"),
    ],
)
def test_wrong_values_are_refused(arguments: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(*arguments)


def test_a_task_takes_its_own_number_before_that_of_all() -> None:
    values = ("livecodebench:medium=3", "4")
    assert number_for("livecodebench:medium", values, "--n") == 3
    assert number_for("livecodebench", values, "--n") == 4
    assert number_for("tiny", ("aime24=3",), "--n") is None
