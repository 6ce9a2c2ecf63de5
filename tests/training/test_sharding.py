"""Several processes: what a launcher asks for, and the same gates as on one process (gloo)."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate.commands import launch
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from transformers.integrations import deepspeed

from rlkv.cli.app import CONFIGS
from rlkv.gates.head_gates import HeadGates
from rlkv.rollout.base import EngineFacts
from rlkv.rollout.remote import RolloutServer
from rlkv.training.run_folder import last_checkpoint
from rlkv.training.sharding import load_as, not_loading
from rlkv.utils.files import read_log
from tests.helpers import engine_run, random_run, warm
from tests.helpers.child import running
from tests.helpers.paths import ROOT

has_deepspeed = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not has_deepspeed, reason="deepspeed is not installed")
# a large rate: gates leave [0, 1] and are clamped, which DeepSpeed's master copy must follow
COMMON = ["--learning-rate", "0.2"]
UNEVEN = ["--prompts-per-step", "5", "--num-generations", "3"]  # 15 rows: 7 and 8


def test_fsdp_of_the_first_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ValueError, match="fsdp_version: 2"):
        random_run.run(tmp_path / "run")


@needs_deepspeed
def test_zero3_is_told_the_dtype_and_does_not_see_models_that_are_looked_at() -> None:
    config = deepspeed.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    load_as("bfloat16")
    assert (config.config["bf16"], config.config["fp16"]) == ({"enabled": True}, {"enabled": False})
    with not_loading():
        assert not deepspeed.is_deepspeed_zero3_enabled()
    assert deepspeed.is_deepspeed_zero3_enabled()


def run_alone(folder: Path, *options: str) -> HeadGates:
    return random_run.run(folder, [*COMMON, "--per-device-train-batch-size", "16", *options])


@pytest.fixture(scope="module")
def alone_hard(tmp_path_factory: pytest.TempPathFactory) -> HeadGates:
    with random_run.hard_case():
        return run_alone(tmp_path_factory.mktemp("hard") / "run")


@pytest.fixture(scope="module")
def alone_uneven(tmp_path_factory: pytest.TempPathFactory) -> HeadGates:
    batch = ["--per-device-train-batch-size", "15"]
    return run_alone(tmp_path_factory.mktemp("uneven") / "run", *UNEVEN, *batch)


def launched(config: Path) -> dict[str, str]:
    """Return what ``accelerate launch`` adds to the environment of its processes."""
    words = ["--config_file", str(config), "program.py"]
    arguments = launch.launch_command_parser().parse_args(words)
    with (
        patch.object(launch, "multi_gpu_launcher") as multi_gpu,
        patch.object(launch, "deepspeed_launcher") as by_deepspeed,
    ):
        launch.launch_command(arguments)
    if by_deepspeed.called:
        found = prepare_deepspeed_cmd_env(*by_deepspeed.call_args.args)[1]
    else:
        found = prepare_multi_gpu_env(*multi_gpu.call_args.args)
    return {name: value for name, value in found.items() if os.environ.get(name) != value}


def run_two(
    folder: Path, options: Sequence[str], module: str = "random_run", **variables: str
) -> HeadGates:
    command = ["-m", f"tests.helpers.{module}", folder, *COMMON]
    command += ["--per-device-train-batch-size", "8", *options]
    variables["TOKENIZERS_PARALLELISM"] = "false"
    ranks = warm.run_ranks(command, folder.parent / "streams", timeout=840, **variables)
    assert [code for code, _ in ranks] == [0, 0], "".join(text[-3000:] for _, text in ranks)
    assert json.loads((folder / "run_config.json").read_text())["processes"] == 2
    return HeadGates.load(folder / "gates.pt")


def check_equal(found: HeadGates, expected: HeadGates) -> None:
    assert ((expected.alpha == 0) | (expected.alpha == 1)).any()
    assert ((expected.alpha > 0) & (expected.alpha < 1)).any()
    # measured 4e-7; an unclamped master copy or another batch is off by 1e-2 and more
    assert (found.alpha - expected.alpha).abs().max() < 1e-5
    assert (found.mean_alpha - expected.mean_alpha).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "launcher",
    [
        "ddp",
        pytest.param("zero2", marks=needs_deepspeed),
        pytest.param("zero3", marks=needs_deepspeed),
        "fsdp2",
    ],
)
def test_every_launcher_trains_the_same_gates(
    launcher: str, alone_hard: HeadGates, tmp_path: Path
) -> None:
    """One process draws truncated completions only, and has a NaN of its own in step 2."""
    variables = launched(CONFIGS / "accelerate" / f"{launcher}.yaml")
    variables["HARD_CASE"] = "1"
    sharded = launcher in ("zero3", "fsdp2")
    options = ["--per-device-train-batch-size", "4"]
    options += ["--gradient-checkpointing"] if sharded else []
    folder = tmp_path / "run"
    if sharded:  # in two parts, the second from a checkpoint
        run_two(folder, [*options, "--max-steps", "3"], **variables)
        (folder / "gates.pt").unlink()
    check_equal(run_two(folder, options, **variables), alone_hard)
    skipped = [record["train/skipped_steps"] for record in read_log(folder / "log.jsonl")]
    assert skipped == [0, 1, 1, 1, 1]
    for rank in "01":
        said = (tmp_path / "streams" / rank / "out").read_text()
        assert said.partition("held ")[2][:4] == ("0.50" if sharded else "1.00")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ddp_processes_share_the_tokens_of_the_published_recipe(tmp_path: Path) -> None:
    recipe = ["--recipe", "published"]
    # two micro-batches on each of two processes
    parts = [*recipe, "--per-device-train-batch-size", "4"]
    check_equal(run_two(tmp_path / "ddp", parts), run_alone(tmp_path / "alone", *recipe))


@contextmanager
def serving() -> Iterator[str]:
    engine, facts = engine_run.make_engine(), EngineFacts("random", 2, 6, 512, 2, 4, 1000)
    with running(RolloutServer(("127.0.0.1", 0), engine, facts)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ddp_processes_share_two_rollout_servers_unevenly(
    alone_uneven: HeadGates, tmp_path: Path
) -> None:
    with serving() as first, serving() as second:
        servers = ["--rollout", "vllm-server", "--rollout-servers", f"{first}, {second}"]
        check_equal(run_two(tmp_path / "ddp", [*UNEVEN, *servers]), alone_uneven)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ddp_processes_have_an_engine_each(alone_uneven: HeadGates, tmp_path: Path) -> None:
    options = [*UNEVEN, "--rollout", "vllm"]
    check_equal(run_two(tmp_path / "ddp", options, "engine_run"), alone_uneven)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_runs_end_like_uninterrupted_ones(tmp_path: Path) -> None:
    command = ["-m", "tests.helpers.kill_driver", "training", tmp_path, 3]
    done = warm.run(command, ROOT, timeout=840, TOKENIZERS_PARALLELISM="false")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["kills"] == 3
    expected = outcome(tmp_path / "whole")
    assert [record["step"] for record in expected[-1]] == list(range(1, 7))
    for name in summary["folders"]:
        assert outcome(tmp_path / name) == expected


def outcome(folder: Path) -> tuple[Any, ...]:
    """Return what must not depend on kills."""
    gates = HeadGates.load(folder / "gates.pt")
    steps = []
    for record in read_log(folder / "log.jsonl"):
        steps.append({key: value for key, value in record.items() if "time/" not in key})
    logged = read_log(folder / "gates.jsonl")
    return gates.alpha.tolist(), gates.mean_alpha.tolist(), logged, steps


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_of_two_processes_survives_signals(tmp_path: Path) -> None:
    """SIGTERM to one process, then to the launcher, then kill -9 of one; each time it goes on."""
    folder = tmp_path / "run"

    def launch(fault: str) -> tuple[int, str]:
        command = ["-m", "tests.helpers.torchrun", fault, folder, "--save-steps", 4]
        done = warm.run(command, ROOT, timeout=840, TOKENIZERS_PARALLELISM="false")
        left = [
            rank for rank in "01" if Path("/proc", (tmp_path / f"pid_{rank}").read_text()).exists()
        ]
        assert left == [], f"processes stay behind: {left}"
        return done.returncode, done.stdout + done.stderr

    def saved() -> str:
        newest = last_checkpoint(folder)
        return "nothing" if newest is None else newest.name

    code, text = launch("SIGTERM:2:rank")
    assert (code, saved()) == (0, "checkpoint-2"), text
    assert text.count("stopped by SIGTERM after step 2") == 2  # both processes have ended with 0
    code, text = launch("SIGTERM:3:launcher")
    # the launcher says so by a traceback of its own
    assert (code, saved()) == (1, "checkpoint-3"), text
    assert text.count("stopped by SIGTERM after step 3") == 2
    code, text = launch("SIGKILL:5:rank")
    assert (code, saved()) == (1, "checkpoint-4"), text
    code, text = launch("none")
    assert code == 0, text
    alone = random_run.run(tmp_path / "alone", ["--per-device-train-batch-size", "16"])
    assert torch.allclose(HeadGates.load(folder / "gates.pt").alpha, alone.alpha, rtol=0, atol=1e-5)
