"""The OpenAI-compatible server under load: right answers, aborts, preemptions, no leaked block,
flat memory.
"""

from __future__ import annotations

import json
import random
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import psutil
import pytest
import torch

from rlkv import tiny
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.engine import InferenceEngine
from rlkv.models.prompts import render_prompt
from rlkv.models.shape import ModelShape
from rlkv.rollout.base import SamplingParams
from tests.helpers.engines import need_vllm
from tests.helpers.served import ServedModel, post, served_model

need_vllm()

REQUESTS, CLIENTS, PROMPTS = 500, 24, 25
LONGEST = 150  # tokens of an answer
ABORTED = 0.15  # share of the requests whose clients go away
GROWTH = 30  # MiB that the server's processes may gain
BLOCKS = 60  # of the pool: texts of 24 clients need more


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    _, tokenizer = tiny.load()
    problems = tiny.problems(PROMPTS, seed=23, min_definitions=3, max_definitions=12)
    texts = [render_prompt(tokenizer, problem["problem"], "rlkv") for problem in problems]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


@pytest.fixture(scope="module")
def gates() -> HeadGates:
    model, _ = tiny.load()
    alpha = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    return HeadGates(
        alpha, model=ModelShape.from_config(model.config, "tiny"), deploy_sink=4, deploy_window=16
    )


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]], gates: HeadGates) -> list[list[int]]:
    """What transformers decode with the same masks."""
    model, tokenizer = tiny.load()
    allocation = HeadAllocation.from_gates(gates, 0.5)
    engine = InferenceEngine(
        model, tokenizer, allocation, sink=4, window=16, prefill="local", batch_size=PROMPTS
    )
    texts = [tokenizer.decode(prompt) for prompt in prompts]
    completions, _ = engine.batch(texts, SamplingParams(LONGEST))
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, gates: HeadGates) -> Iterator[ServedModel]:
    folder = tmp_path_factory.mktemp("load")
    gates.save(folder / "gates.safetensors")
    settings = {"gates": str(folder / "gates.safetensors"), "sparsity": 0.5}
    options = (
        "--num-gpu-blocks-override",
        str(BLOCKS),
        "--max-num-seqs",
        str(CLIENTS),
        "--max-num-batched-tokens",
        "64",
    )
    with served_model(folder, settings, *options) as served:
        yield served


def metrics(server: ServedModel) -> dict[str, float]:
    """The engine's own page; labels of the same name are summed."""
    with urllib.request.urlopen(f"{server.address}/metrics") as page:
        lines = page.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = name.split("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


def memory(server: ServedModel) -> int:
    """Bytes that the server's processes have to themselves."""
    own = psutil.Process(server.process.pid)
    return sum(process.memory_full_info().uss for process in (own, *own.children(recursive=True)))


def ask(
    server: ServedModel, prompt: list[int], tokens: int, leave_after: int | None
) -> list[int] | None:
    """The tokens of an answer, or None if the client went away after so many of them."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    found: list[int] = []
    with post(server.address, {**body, "stream": True}) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                found += json.loads(line[6:])["choices"][0].get("token_ids") or []
            if leave_after is not None and len(found) >= leave_after:
                return None
    return found


def test_500_requests(
    server: ServedModel, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    draw = random.Random(0)
    plan = [
        (
            draw.randrange(PROMPTS),
            draw.randint(5, LONGEST),
            draw.randint(1, 40) if draw.random() < ABORTED else None,
        )
        for _ in range(REQUESTS)
    ]
    most, used = {"rlkv:kv_blocks": 0.0, "rlkv:kv_bytes_saved": 0.0}, []
    answers: list[list[int] | None] = []
    with ThreadPoolExecutor(CLIENTS) as clients:
        running = [
            clients.submit(ask, server, prompts[i], tokens, leave) for i, tokens, leave in plan
        ]
        for number, answer in enumerate(running):
            answers.append(answer.result())
            if number % 20 == 0:
                shown = metrics(server)
                most = {name: max(value, shown[name]) for name, value in most.items()}
                used.append(memory(server))
    aborted = sum(answer is None for answer in answers)
    assert aborted > REQUESTS * ABORTED / 3
    for (i, tokens, _), answer in zip(plan, answers, strict=True):
        assert answer is None or answer == expected[i][:tokens]
    for _ in range(100):  # requests whose clients went away last end a moment later
        shown = metrics(server)
        if shown["vllm:num_requests_running"] + shown["rlkv:kv_blocks"] == 0:
            break
        time.sleep(0.2)
    assert (
        shown["vllm:kv_cache_usage_perc"]
        == shown["rlkv:kv_blocks"]
        == shown["rlkv:kv_bytes_saved"]
        == 0
    )
    assert shown["vllm:num_requests_running"] == shown["vllm:num_requests_waiting"] == 0
    assert shown["vllm:num_preemptions_total"] > 10
    assert shown["rlkv:sparsity"] == 0.5
    assert 0 < most["rlkv:kv_blocks"] <= BLOCKS
    assert most["rlkv:kv_bytes_saved"] > 0
    early, late = median(used[4:10]), median(used[-6:])
    print(
        f"{REQUESTS} requests, {aborted} aborted, {shown['vllm:num_preemptions_total']:.0f} "
        "preemptions, "
        f"{shown['vllm:generation_tokens_total']:.0f} tokens; memory {early / 2**20:.0f} -> "
        f"{late / 2**20:.0f} MiB"
    )
    assert late < early + 2**20 * GROWTH
