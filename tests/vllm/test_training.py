"""Training runs that sample with vLLM in their own processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from rlkv.attention import LocalSizes
from rlkv.gates.head_gates import HeadGates
from rlkv.rollout.base import SamplingParams
from rlkv.training import grpo as run
from rlkv.utils.files import read_log
from rlkv.vllm.engine import VLLMEngine
from tests.helpers import random_run, warm
from tests.helpers import vllm_models as models

SAME = ("reward/mean", "response/length_mean", "rollout/logprob_diff_max", "penalty/value")


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Options of a run whose model lies in a folder for the engine."""
    model, tokenizer = random_run.make_policy()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    found = ["--model", str(tmp_path / "model"), "--learning-rate", "0.3", "--rollout", "vllm"]
    return [*found, "--rollout-eager", "--rollout-kv-gib", "0.02"]


@pytest.mark.usefixtures("alone")
def test_a_run_repeats_itself_and_its_engine_has_its_gates(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates, open_engine = [], run.open_engine

    @contextmanager
    def noting_its_gates(*args: Any) -> Iterator[Any]:
        with open_engine(*args) as engine:
            yield engine
            gates.append(engine.gates())

    monkeypatch.setattr(run, "open_engine", noting_its_gates)
    options += ["--temperature", "0.8", "--top-p", "0.9"]
    found = random_run.run(tmp_path / "first", options)
    # after the last of five steps the engine has the gates of the fourth
    history = [record["alpha"] for record in read_log(tmp_path / "first" / "gates.jsonl")]
    assert (gates[0] - torch.tensor(history[3])).abs().max() < 1e-6
    assert len(history) == 5
    assert history[3] != history[2]
    assert (found.alpha != 1).any()
    log = read_log(tmp_path / "first" / "log.jsonl")
    for record in log:
        # at most what top-p leaves out, next to rounding
        assert 0 < record["rollout/logprob_diff_max"] < 0.11
        assert record["rollout/truncated_share"] == 0
    again = random_run.run(tmp_path / "again", options)
    assert torch.equal(again.alpha, found.alpha)
    for own, other in zip(log, read_log(tmp_path / "again" / "log.jsonl"), strict=True):
        assert [own[name] for name in SAME] == [other[name] for name in SAME]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_have_an_engine_each(options: list[str], tmp_path: Path) -> None:
    options += ["--prompts-per-step", "5", "--max-steps", "3"]
    options += ["--num-generations", "3", "--per-device-train-batch-size", "8"]  # 7 and 8 rows
    expected = random_run.run(tmp_path / "one", options)
    command = ["-m", "tests.helpers.random_run", tmp_path / "two", *options]
    ranks = warm.run_ranks(
        command, tmp_path / "streams", timeout=840, TOKENIZERS_PARALLELISM="false"
    )
    assert [code for code, _ in ranks] == [0, 0], "".join(text[-3000:] for _, text in ranks)
    found = HeadGates.load(tmp_path / "two" / "gates.pt")
    # the draws belong to the rows, whichever process decodes them
    assert (found.alpha - expected.alpha).abs().max() < 1e-4
    logs = [read_log(tmp_path / name / "log.jsonl") for name in ("one", "two")]
    for ours, theirs in zip(*logs, strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"]
        assert ours["response/length_mean"] == pytest.approx(theirs["response/length_mean"])


@pytest.mark.usefixtures("alone")
def test_an_engine_with_another_model_is_noticed(options: list[str], tmp_path: Path) -> None:
    other = VLLMEngine(options[1], LocalSizes(2, 6), "float32", kv_gib=0.02, enforce_eager=True)
    with closing(other), pytest.MonkeyPatch.context() as patch:
        worker = other.llm.llm_engine.model_executor.driver_worker
        for parameter in worker.model_runner.model.parameters():
            parameter.data.mul_(1.5)
        patch.setattr(run, "open_engine", lambda *args: nullcontext(other))
        with pytest.raises(ValueError, match="sink and window"):
            random_run.run(tmp_path / "run", options)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_gates_reach_an_engine_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    folder = models.make_folder("llama", tmp_path / "model")
    model = models.load_reference(folder)
    with closing(
        VLLMEngine(str(folder), LocalSizes(models.SINK, models.WINDOW), **models.OPTIONS)
    ) as engine:
        assert not hasattr(engine.llm.llm_engine.engine_core, "engine_core")  # it is elsewhere
        for update in range(2):
            alpha, rows = models.random_gates(update), models.make_rows(rollout=update)
            engine.set_gates(alpha)
            samples = dict(engine.sample(rows, SamplingParams(20, temperature=1.0)))
            assert (
                models.worst_difference(models.put_gates(model, alpha), rows, samples)
                < models.TOLERANCE
            )
