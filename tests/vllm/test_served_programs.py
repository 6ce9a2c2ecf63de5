"""``rlkv-infer --backend vllm`` and vLLM's server with the plugin, as programs, on the built-in
model.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv import tiny
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.session import InferConfig, InferSession
from rlkv.models.prompts import render_prompt
from rlkv.models.shape import ModelShape
from tests.helpers.engines import need_vllm
from tests.helpers.served import post, served_model

need_vllm()

N, TOKENS = 6, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    model, _ = tiny.load()
    alpha = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    shape = ModelShape.from_config(model.config, "tiny")
    HeadGates(alpha, model=shape, deploy_sink=4, deploy_window=16).save(
        folder / "gates.safetensors"
    )
    drawn = tiny.problems(N, seed=11, min_definitions=3, max_definitions=8)
    (folder / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in drawn))
    return folder


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[dict[str, Any]]:
    """What transformers decode with the same masks."""
    return infer(folder, "hf")


def infer(folder: Path, backend: str, *options: str) -> list[dict[str, Any]]:
    options = options or ("--prefill", "local")
    output = folder / f"{backend}{len(options)}{options[1]}.jsonl"
    command = [
        sys.executable,
        "-c",
        "from rlkv.cli.infer import main; main()",
        "--backend",
        backend,
    ]
    command += ["--gates", str(folder / "gates.safetensors"), "--sparsity", "0.5", *options]
    command += [
        "--input",
        str(folder / "problems.jsonl"),
        "--output",
        str(output),
        "--max-new-tokens",
        str(TOKENS),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_both_backends_of_rlkv_infer_write_the_same(
    folder: Path, expected: list[dict[str, Any]]
) -> None:
    found = infer(folder, "vllm")
    assert [row["output"] for row in found] == [row["output"] for row in expected]
    assert [row["correct"] for row in found] == [row["correct"] for row in expected]
    assert len(found) == N


@pytest.mark.parametrize(
    "options", [("--prefill", "full"), ("--protect-prompt", "--prefill", "local")], ids=str
)
def test_both_backends_write_the_same_with_prompts_read_in_full(
    folder: Path, options: tuple[str, ...]
) -> None:
    """A step is as long as the longest text of the file can get.

    With protected prompts it need not be.
    """
    reference, found = infer(folder, "hf", *options), infer(folder, "vllm", *options)
    assert [row["output"] for row in found] == [row["output"] for row in reference]
    assert len(found) == N


def test_both_backends_write_the_same_with_eviction(folder: Path) -> None:
    """The prompts are longer than the buffer, so heads evict while they are read."""
    options = (
        "--eviction",
        "rkv",
        "--budget",
        "20",
        "--eviction-option",
        "buffer=12",
        "--prefill",
        "local",
    )
    reference, found = infer(folder, "hf", *options), infer(folder, "vllm", *options)
    assert [row["output"] for row in found] == [row["output"] for row in reference]
    assert len(found) == N


def test_gates_are_read_once_and_the_allocation_travels_on(
    folder: Path, expected: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    load = HeadGates.load
    monkeypatch.setattr(HeadGates, "load", lambda path: read.append(path) or load(path))
    gates, problem = str(folder / "gates.safetensors"), expected[0]["problem"]
    config = InferConfig(
        backend="vllm", gates=gates, prompt=problem, max_new_tokens=TOKENS, batch_size=2
    )
    session = InferSession.open(config)
    (completion,), _ = session.engine.batch([session.render(problem)], session.sampling)
    session.engine.close()
    assert completion.text == expected[0]["output"]
    assert read == [gates]


@pytest.fixture
def server(folder: Path) -> Iterator[str]:
    """The address of an OpenAI-compatible server with head reallocation."""
    with served_model(
        folder, {"gates": str(folder / "gates.safetensors"), "sparsity": 0.5}
    ) as served:
        yield served.address


def test_the_server_answers_with_head_reallocation(
    folder: Path, server: str, expected: list[dict[str, Any]]
) -> None:
    _, tokenizer = tiny.load()
    problems = [json.loads(line) for line in (folder / "problems.jsonl").read_text().splitlines()]
    for problem, row in zip(problems, expected, strict=True):
        prompt = render_prompt(tokenizer, problem["problem"], "rlkv")
        body = {
            "model": "tiny",
            "prompt": tokenizer(prompt, add_special_tokens=False).input_ids,
            "max_tokens": TOKENS,
            "temperature": 0,
        }
        with post(server, body) as reply:
            text = json.loads(reply.read())["choices"][0]["text"]
        # the server keeps the space that joins an answer to its prompt
        assert text.removeprefix(" ") == row["output"]
    log = (folder / "server.log").read_text()
    assert re.search(r"rlkv: .* times the tokens in the same pool", log)
    assert re.search(
        r"rlkv: the pool of [\d,]+ blocks .* holds [\d,]+ tokens .* full cache would hold [\d,]+",
        log,
    )
