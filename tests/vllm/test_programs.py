"""``rlkv-infer --backend vllm`` and vLLM's server with the plugin; ``rlkv-bench serving``."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from rlkv import tiny
from rlkv.cache import CacheSettings
from rlkv.cli.jobs import bench_main
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.engine import InferenceEngine
from rlkv.inference.session import InferConfig, InferSession
from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import SamplingParams
from rlkv.vllm.engine import VLLMEngine
from tests.helpers.engines import need_vllm, save_adapter
from tests.helpers.gates import tiny_gates
from tests.helpers.programs import exit_code
from tests.helpers.served import ServedModel, post, served_model

need_vllm()

N, TOKENS = 6, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    tiny_gates().save(folder / "gates.safetensors")
    drawn = tiny.problems(N, seed=11, min_definitions=3, max_definitions=8)
    (folder / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in drawn))
    return folder


def prompts_of(number: int, **options: Any) -> list[list[int]]:
    _, tokenizer = tiny.load()
    problems = tiny.problems(number, min_definitions=3, **options)
    texts = [render_prompt(tokenizer, problem["problem"], "rlkv") for problem in problems]
    return tokenizer(texts, add_special_tokens=False).input_ids


def decoded(
    folder: Path, prompts: list[list[int]], tokens: int, model: Any = None
) -> list[list[int]]:
    """What transformers decode with the same masks."""
    own, tokenizer = tiny.load()
    allocation = HeadAllocation.from_gates(HeadGates.load(folder / "gates.safetensors"), 0.5)
    settings = CacheSettings(4, 16, "local")
    engine = InferenceEngine(model or own, tokenizer, allocation, settings, len(prompts))
    texts = [tokenizer.decode(prompt) for prompt in prompts]
    completions, _ = engine.batch(texts, SamplingParams(tokens))
    return [completion.token_ids for completion in completions]


@pytest.mark.usefixtures("alone")
def test_a_session_writes_what_transformers_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gates are read once, and the allocation travels on."""
    read: list[Path] = []
    load = HeadGates.load
    gates = str(folder / "gates.safetensors")
    expected = decoded(folder, prompts_of(N, seed=11, max_definitions=8), TOKENS)
    monkeypatch.setattr(HeadGates, "load", lambda path: read.append(path) or load(path))
    settings: dict[str, Any] = {"gates": gates, "prefill": "local", "batch_size": N}
    settings["input"] = folder / "problems.jsonl"
    settings["output"] = folder / "session.jsonl"
    config = InferConfig(backend="vllm", max_new_tokens=TOKENS, **settings)
    session = InferSession.open(config)
    texts = [session.render(problem["problem"]) for problem in session.problems]
    completions, usage = session.engine.batch(texts, session.sampling)
    session.engine.close()
    assert [completion.token_ids for completion in completions] == expected
    assert usage.tokens == sum(map(len, expected))
    assert usage.kv_bytes > 0
    assert read == [gates]


def infer(folder: Path, backend: str, options: list[str]) -> list[str]:
    output = folder / f"{backend}{len(options)}{options[1]}.jsonl"
    command = [sys.executable, "-m", "rlkv.cli.infer", "--backend", backend]
    command += ["--gates", str(folder / "gates.safetensors"), "--sparsity", "0.5", *options]
    command += ["--input", str(folder / "problems.jsonl"), "--output", str(output)]
    command += ["--max-new-tokens", str(TOKENS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line)["output"] for line in output.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "--prefill full",
        "--prefill local --protect-prompt",
        # the prompts are longer than the buffer, so heads evict while they are read
        "--prefill local --eviction rkv --budget 20 --eviction-option buffer=12",
    ],
)
def test_both_backends_of_rlkv_infer_write_the_same(folder: Path, options: str) -> None:
    found = infer(folder, "vllm", options.split())
    assert found == infer(folder, "hf", options.split())
    assert len(found) == N


@pytest.mark.usefixtures("alone")
def test_answers_too_short_for_an_eviction(folder: Path) -> None:
    gates = str(folder / "gates.safetensors")
    config = InferConfig(
        gates=gates, prompt="a=7", backend="vllm", eviction="rkv", budget=64, max_new_tokens=4
    )
    session = InferSession.open(config)
    completions, _ = session.engine.batch([session.render("a=7")], session.sampling)
    session.engine.close()
    assert len(completions[0].token_ids) <= 4


@pytest.mark.usefixtures("alone")
def test_a_refusal_is_told_without_pydantics_words() -> None:
    with pytest.raises(
        ValueError, match=r"(?s)^(?!.*validation error).*max_num_seqs: .*greater than"
    ):
        VLLMEngine("tiny", max_rows=0)


BENCH = """--layers 2 --hidden 128 --intermediate 256 --query-heads 2 --kv-heads 2 --requests 4
    --prompt-tokens 6 --output-tokens 40 --pool-tokens 320 --sparsities 0.5 --rounds 1"""


def test_the_benchmark_serves_both_the_same_requests(tmp_path: Path) -> None:
    """No time is judged."""
    options = [*BENCH.split(), "--output-dir", tmp_path]
    assert exit_code(bench_main, "rlkv-bench", "serving", *options) == 0
    found = json.loads((tmp_path / "serving.json").read_text())
    assert [run["mode"] for run in found["runs"]] == ["full cache", "sparsity 0.5"]
    assert len({run["tokens"] for run in found["runs"]}) == 1
    assert all(run["steps"] > 16 for run in found["runs"])  # the shortest output has 16 tokens
    assert all(row["tokens_per_second"] > 0 for row in found["results"])
    assert found["vllm"]
    assert (tmp_path / "serving.png").stat().st_size > 5000
    assert "| sparsity 0.5 |" in (tmp_path / "serving.md").read_text()


def test_the_server_answers_with_head_reallocation(folder: Path, tmp_path: Path) -> None:
    settings = {"gates": str(folder / "gates.safetensors"), "sparsity": 0.5}
    prompts = prompts_of(N, seed=11, max_definitions=8)
    expected = decoded(folder, prompts, TOKENS)
    with served_model(tmp_path, settings) as served:
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert ask(served, prompt, TOKENS, None) == tokens
    log = (tmp_path / "server.log").read_text()
    assert re.search(r"rlkv: .* times the tokens in the same pool", log)
    assert re.search(
        r"rlkv: the pool of [\d,]+ blocks .* holds [\d,]+ tokens .* full cache would hold [\d,]+",
        log,
    )


def metrics(server: ServedModel) -> dict[str, float]:
    """Read the engine's own page; labels of the same name are summed."""
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
    """Count the bytes that the server's processes have to themselves."""
    own = psutil.Process(server.process.pid)
    return sum(process.memory_full_info().uss for process in (own, *own.children(recursive=True)))


def ask(
    server: ServedModel,
    prompt: list[int],
    tokens: int,
    leave_after: int | None,
    model: str = "tiny",
) -> list[int] | None:
    """The tokens of an answer, or None if the client went away after so many of them."""
    body: dict[str, Any] = {
        "model": model,
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


REQUESTS, CLIENTS, PROMPTS = 500, 24, 25
LONGEST = 150  # tokens of an answer
ABORTED = 0.15  # share of the requests whose clients go away
GROWTH = 30  # MiB that the server's processes may gain
BLOCKS = 60  # of the pool: texts of 24 clients need more
ADAPTERS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"),
    "keys": ("k_proj",),
}


@pytest.mark.slow
def test_500_requests(folder: Path, tmp_path: Path) -> None:
    """Right answers of adapters too, aborts, preemptions, hits, no leaked block, flat memory."""
    prompts = prompts_of(PROMPTS, seed=23, max_definitions=12)
    expected = {"tiny": decoded(folder, prompts, LONGEST)}
    adapters = []
    for name, modules in ADAPTERS.items():
        merged = save_adapter(tiny.load()[0], tmp_path / name, modules)
        expected[name] = decoded(folder, prompts, LONGEST, merged)
        adapters.append(f"{name}={tmp_path / name}")
    settings = {"gates": str(folder / "gates.safetensors"), "sparsity": 0.5}
    options = ["--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", str(CLIENTS)]
    options += ["--max-num-batched-tokens", "64", "--enable-lora", "--max-lora-rank", "8"]
    # as in LORA of tests.helpers.engines
    options += ["--max-loras", "3", "--lora-modules", *adapters]
    with served_model(tmp_path, settings, *options) as server:
        check_under_load(server, prompts, expected)


def check_under_load(
    server: ServedModel, prompts: list[list[int]], expected: dict[str, list[list[int]]]
) -> None:
    draw = random.Random(0)
    plan = [
        (
            draw.randrange(PROMPTS),
            draw.randint(5, LONGEST),
            draw.randint(1, 40) if draw.random() < ABORTED else None,
            draw.choice(list(expected)),
        )
        for _ in range(REQUESTS)
    ]
    most, used = {"rlkv:kv_blocks": 0.0, "rlkv:kv_bytes_saved": 0.0}, []
    answers: list[list[int] | None] = []
    with ThreadPoolExecutor(CLIENTS) as clients:
        running = [clients.submit(ask, server, prompts[i], *others) for i, *others in plan]
        for number, answer in enumerate(running):
            answers.append(answer.result())
            if number % 20 == 0:
                shown = metrics(server)
                most = {name: max(value, shown[name]) for name, value in most.items()}
                used.append(memory(server))
    aborted = sum(answer is None for answer in answers)
    assert aborted > REQUESTS * ABORTED / 3
    for (i, tokens, _, model), answer in zip(plan, answers, strict=True):
        assert answer is None or answer == expected[model][i][:tokens]
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
    assert shown["vllm:prefix_cache_hits_total"] > 500
    assert shown["rlkv:sparsity"] == 0.5
    assert 0 < most["rlkv:kv_blocks"] <= BLOCKS
    assert most["rlkv:kv_bytes_saved"] > 0
    early, late = median(used[4:10]), median(used[-6:])
    print(
        f"{REQUESTS} requests, {aborted} aborted, {shown['vllm:num_preemptions_total']:.0f} "
        f"preemptions, {shown['vllm:prefix_cache_hits_total']:.0f} tokens of cached prefixes, "
        f"{shown['vllm:generation_tokens_total']:.0f} tokens; memory {early / 2**20:.0f} -> "
        f"{late / 2**20:.0f} MiB"
    )
    assert late < early + 2**20 * GROWTH
