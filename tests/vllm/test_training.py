"""Training runs that sample with vLLM in their own processes, next to one that samples with its own
model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from rlkv.gates.head_gates import HeadGates
from rlkv.training import grpo as run
from rlkv.utils.files import read_log
from tests.helpers import random_run, warm


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """What ``random_run`` trains, as a folder for the engine."""
    model, tokenizer = random_run.make_policy()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_training_with_vllm_equals_training_with_transformers(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates, open_engine = [], run.open_engine

    @contextmanager
    def noting_its_gates(*args: Any) -> Iterator[Any]:
        with open_engine(*args) as engine:
            yield engine
            gates.append(None if engine is None else engine.gates())

    monkeypatch.setattr(run, "open_engine", noting_its_gates)
    options = ["--model", str(model_folder), "--learning_rate", "0.3", "--rollout_kv_gib", "0.02"]
    expected = random_run.run(tmp_path / "hf", options)
    found = random_run.run(
        tmp_path / "vllm", [*options, "--rollout", "vllm", "--rollout_eager", "true"]
    )
    # after the last of five steps the engine has the gates of the fourth
    history = [record["alpha"] for record in read_log(tmp_path / "vllm" / "gates.jsonl")]
    assert gates[0] is None
    assert (gates[1] - torch.tensor(history[3])).abs().max() < 1e-6
    assert len(history) == 5
    assert history[3] != history[2]
    # the same rows get the same tokens, so the runs differ by rounding in the weights of the tokens
    # only
    assert (found.alpha - expected.alpha).abs().max() < 1e-4
    assert (found.alpha != 1).any()
    for ours, theirs in zip(
        *(read_log(tmp_path / name / "log.jsonl") for name in ("vllm", "hf")), strict=True
    ):
        assert ours["reward/mean"] == theirs["reward/mean"]
        assert ours["response/length_mean"] == theirs["response/length_mean"]
        assert 0 < ours["rollout/logprob_diff_max"] < 1e-4
        assert ours["rollout/truncated_share"] == 0


@pytest.mark.timeout(900)
def test_two_processes_have_an_engine_each(model_folder: Path, tmp_path: Path) -> None:
    options = [
        "--model",
        str(model_folder),
        "--learning_rate",
        "0.3",
        "--prompts_per_step",
        "5",
        "--max_steps",
        "3",
    ]
    options += ["--num_generations", "3", "--per_device_train_batch_size", "8"]  # 7 and 8 rows
    expected = random_run.run(tmp_path / "hf", options)
    options += ["--rollout", "vllm", "--rollout_eager", "true", "--rollout_kv_gib", "0.02"]
    command = ["-m", "tests.helpers.random_run", tmp_path / "vllm", *options]
    ranks = warm.run_ranks(
        command, tmp_path / "streams", timeout=840, TOKENIZERS_PARALLELISM="false"
    )
    assert [code for code, _ in ranks] == [0, 0], "".join(text[-3000:] for _, text in ranks)
    assert (
        HeadGates.load(tmp_path / "vllm" / "gates.pt").alpha - expected.alpha
    ).abs().max() < 1e-4
    for ours, theirs in zip(
        *(read_log(tmp_path / name / "log.jsonl") for name in ("vllm", "hf")), strict=True
    ):
        assert ours["reward/mean"] == theirs["reward/mean"]
        assert ours["response/length_mean"] == pytest.approx(theirs["response/length_mean"])


def test_an_engine_with_another_model_is_noticed(model_folder: Path, tmp_path: Path) -> None:
    from rlkv.attention import LocalSizes
    from rlkv.vllm.engine import VLLMEngine

    other = VLLMEngine(
        str(model_folder), LocalSizes(2, 6), "float32", kv_gib=0.02, enforce_eager=True
    )
    with closing(other), pytest.MonkeyPatch.context() as patch:
        for (
            parameter
        ) in other.llm.llm_engine.model_executor.driver_worker.model_runner.model.parameters():
            parameter.data.mul_(1.5)
        patch.setattr(run, "open_engine", lambda *args: nullcontext(other))
        with pytest.raises(ValueError, match="sink and window"):
            random_run.run(tmp_path / "run", ["--model", str(model_folder), "--rollout", "vllm"])
