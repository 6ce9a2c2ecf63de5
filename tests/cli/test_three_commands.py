"""The README's three commands: what each lacks on a bare machine, and that they run through."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import warm
from tests.helpers.paths import ROOT

FILTER = [sys.executable, str(ROOT / "data_prep/filter_deepscaler.py")]
TRAIN = [str(ROOT / "train/grpo_gates.py"), "--config", str(ROOT / "configs/llama8b.yaml")]
INFER = [sys.executable, "-m", "rlkv.cli.infer", "--gates", "gates.pt", "--sparsity", "0.5"]
# in the place of an 8B model
TINY = """--model tiny --curriculum results/curriculum_tiny/curriculum.parquet --dtype float32
    --max-steps 1 --prompts-per-step 2 --max-completion-length 100 --wandb disabled
    --per-device-train-batch-size 8 --rollout hf"""


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run in ``folder``, without a GPU and with a hub that does not answer."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    variables |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=variables, input="", capture_output=True, text=True, timeout=250
    )


@pytest.mark.parametrize(
    ("command", "missing", "advice"),
    [
        (FILTER, "DeepScaleR-Preview-Dataset", "--input FILE.jsonl .*--model FOLDER.*--model tiny"),
        ([sys.executable, *TRAIN], "results/curriculum_llama8b", "rlkv-filter --model deepseek-ai"),
        (INFER, "gates.pt", "rlkv-train"),
    ],
    ids=["filter", "train", "infer"],
)
def test_on_a_bare_machine_one_sentence_names_what_is_missing(
    command: list[str], missing: str, advice: str, tmp_path: Path
) -> None:
    done = run(command, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert missing in line
    assert re.search(advice, line)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_they_run_through_on_the_built_in_model(tmp_path: Path) -> None:
    filtered = warm.run([*FILTER[1:], "--model", "tiny", "--num-problems", "20"], tmp_path)
    assert filtered.returncode == 0, filtered.stderr
    assert "20 problems through transformers, 16 at once" in filtered.stdout
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu"]
    trained = run([*launcher, *TRAIN, *TINY.split()], tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "rollouts through transformers, 64 rows at once" in trained.stdout
    foreign = ("WARNING", "it/s", "Loading weights")
    assert not any(text in trained.stdout for text in foreign), trained.stdout
    assert (tmp_path / "gates.pt").samefile(tmp_path / "outputs/llama8b/gates.pt")
    asked = warm.run(INFER[1:], tmp_path, "a=7 . b=2 . c = b + a . find c ?\n")
    assert asked.returncode == 0, asked.stderr
    assert r"\boxed{ 9 }" in asked.stdout
