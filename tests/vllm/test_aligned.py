"""Aligned windows, in memory mode and in mode keep, against explicit masks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.vllm.packing import SinkWindowDemand
from tests.helpers.engines import (
    BLOCK,
    ENGINES,
    LENGTHS,
    SINK,
    TWO_RANKS,
    WINDOW,
    Served,
    check_all_free,
    compare,
    drafted_and_accepted,
    engine,
    generate,
    need_vllm,
    random_prompts,
    save_adapter,
    tokens_of,
    watch_preemptions,
)
from tests.helpers.mixed_reference import reference_logits
from tests.vllm.conftest import Serving

need_vllm()

from vllm.v1.kv_cache_interface import FullAttentionSpec

from rlkv.vllm.aligned import aligned_pieces, cut_tables
from rlkv.vllm.specs import SinkWindowSpec

# (queries, tokens) of each request
REQUESTS = [(1, 1), (1, 17), (1, 260), (9, 9), (7, 33), (150, 300), (40, 90), (2, 500), (128, 128)]


def seen(position: int, demand: SinkWindowDemand, prefix: int) -> set[int]:
    """The specification: the whole blocks of the first tokens and of the window."""
    size = demand.block_size
    first = -(-prefix // size) * size
    window = (position - demand.window + 1) // size
    return {p for p in range(position + 1) if p < first or p // size >= window}


@pytest.mark.parametrize("sizes", [(5, 0, 1), (5, 4, 9), (16, 16, 64), (8, 7, 3), (16, 17, 33)])
@pytest.mark.parametrize("protects", [False, True])
def test_pieces_read_what_their_queries_see(sizes: tuple[int, int, int], protects: bool) -> None:
    demand = SinkWindowDemand(*sizes)
    size = demand.block_size
    starts = [0]
    for queries, _ in REQUESTS:
        starts.append(starts[-1] + queries)
    lengths = [tokens for _, tokens in REQUESTS]
    prompts = [queries if queries == tokens else 0 for queries, tokens in REQUESTS]
    prefixes = [max(demand.sink, row * 7) for row in range(len(REQUESTS))] if protects else None
    pieces = aligned_pieces(starts, lengths, demand, prompts, prefixes)
    table = torch.arange(len(REQUESTS) * 101).view(-1, 101)  # block = 101 * request + place
    ends = [0, *(piece.end for piece in pieces)]
    assert ends[-1] == starts[-1]
    for piece, (begin, end) in zip(pieces, pairwise(ends), strict=True):
        prefix = prefixes[piece.row] if prefixes else demand.sink
        kept = demand.full(prefix)
        gap = torch.tensor([piece.gap])
        (cut,) = cut_tables(table[piece.row : piece.row + 1], gap, kept, 101)
        held = piece.length - piece.gap * size  # tokens that the kernel is handed
        tokens = [int(cut[i // size]) % 101 * size + i % size for i in range(held)]
        assert end > begin
        for place in range(begin, end):
            position = lengths[piece.row] - starts[piece.row + 1] + place
            # the causal rule of the kernel: the last query sees all that is handed over
            read = tokens[: held - (end - 1 - place)]
            whole = prompts[piece.row] > place - starts[piece.row]
            wanted = set(range(position + 1)) if whole else seen(position, demand, prefix)
            assert set(read) == wanted
            assert len(read) == len(wanted)


def seen_blocks(llm: Any) -> int:
    """Tokens of a block of compressible heads."""
    core = llm.llm_engine.engine_core.engine_core
    specs = [group.kv_cache_spec for group in core.scheduler.kv_cache_config.kv_cache_groups]
    kind = SinkWindowSpec if any(isinstance(spec, SinkWindowSpec) for spec in specs) else None
    found = {spec.block_size for spec in specs if isinstance(spec, kind or FullAttentionSpec)}
    (size,) = found
    return size


def check(serving: Serving, outputs: list[Any], block: int | None = None) -> int:
    """Compare tokens and log-probabilities with one masked forward; the number of tokens."""
    block = seen_blocks(serving.llm) if block is None else block
    settings = serving.key.settings
    full = serving.served.allocation(serving.key.sparsity or 0).full
    compared = 0
    for output in outputs:
        prompt = list(output.prompt_token_ids)
        tokens = list(output.outputs[0].token_ids)
        ids = torch.tensor([prompt + tokens])
        sink = settings.get("sink", SINK)
        call_start = None
        if settings.get("protect_prompt"):
            sink = max(sink, len(prompt))
        if settings.get("prefill") == "full":
            call_start = torch.arange(ids.shape[1])
            call_start[: len(prompt)] = 0
        window = settings.get("window", WINDOW)
        model = serving.served.model
        logits = reference_logits(model, ids, full, sink, window, call_start, block=block)
        compare(prompt, output.outputs[0], logits[0, len(prompt) - 1 : -1])
        compared += len(tokens)
    return compared


@pytest.mark.parametrize(
    "served_by",
    [
        "aligned",
        "keep",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "aligned in full",
                "keep in full",
                "keep protected",
                "keep compiled",
                "keep granite 4",
            )
        ),
    ],
)
def test_tokens_are_those_of_a_masked_forward(serving: Serving, served_by: str) -> None:
    outputs = generate(serving.llm, random_prompts(LENGTHS), 80)
    assert check(serving, outputs) == 480
    if served_by == "aligned":  # its bins are read by one call a layer
        (model,) = serving.llm.llm_engine.collective_rpc("get_model")
        assert any(layer.self_attn.attn.number is not None for layer in model.model.layers)
    with pytest.raises(AssertionError):  # exact windows: the test can tell them apart
        check(serving, outputs, block=1)


@pytest.mark.parametrize("served_by", ["aligned", "keep"])
def test_preemption_and_cached_prefixes_change_nothing(serving: Serving, served_by: str) -> None:
    prompts = random_prompts((150, 180, 200, 220, 240, 260), seed=2)
    preempted = watch_preemptions(serving.llm)
    outputs = generate(serving.llm, prompts, 160)
    again = generate(serving.llm, prompts[-1:], 40)
    assert preempted
    assert again[0].num_cached_tokens >= 4 * BLOCK
    assert check(serving, outputs + again) == 1000
    check_all_free(serving.llm)


# one engine each

KEEP = {"mode": "keep"}
BOTH = pytest.mark.parametrize("settings", [KEEP, {"aligned_windows": True}], ids=str)


@BOTH
@pytest.mark.usefixtures("alone")
def test_drafts_by_ngrams(llama: Served, settings: dict[str, Any]) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    # repetitive texts, which n-grams continue
    prompts = [[7, 8, 9, 10] * 20 + prompt for prompt in random_prompts((5, 40))]
    drafting = {"speculative_config": ngram, "disable_log_stats": False}
    found = []
    for options in ({}, drafting):
        with engine(llama, llama.request(0.6, **settings), **options) as llm:
            found.append(tokens_of(generate(llm, prompts, 100, logprobs=None)))
            if options:
                assert drafted_and_accepted(llm)[1] > 0
    assert found[0] == found[1]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("plain_layers", [{}, {"kv_cache_dtype_skip_layers": ["1"]}])
def test_keep_serves_a_cache_in_fp8(llama: Served, plain_layers: dict[str, Any]) -> None:
    # aligned windows see all of so short texts: the stock engine's tokens, by other calls
    prompts = random_prompts((5, 33, 50))
    found = []
    for request in (None, llama.request(0.6, **KEEP)):
        with engine(llama, request, kv_cache_dtype="fp8", **plain_layers) as llm:
            found.append(tokens_of(generate(llm, prompts, 40)))
    assert found[0] == found[1]


@BOTH
@pytest.mark.usefixtures("alone")
def test_adapters_of_attention(llama: Served, tmp_path: Path, settings: dict[str, Any]) -> None:
    from vllm.lora.request import LoRARequest

    merged = save_adapter(llama.model, tmp_path, ("q_proj", "k_proj", "v_proj", "o_proj"))
    with engine(llama, llama.request(0.6, **settings), enable_lora=True, max_lora_rank=8) as llm:
        lora = LoRARequest("adapter", 1, str(tmp_path))
        outputs = generate(llm, random_prompts((40, 90), seed=3), 60, lora_request=lora)
        key = replace(ENGINES["keep"], settings=settings)
        serving = Serving(llm, replace(llama, model=merged), key)
        assert check(serving, outputs) == 120
        serving = replace(serving, served=llama)
        with pytest.raises(AssertionError):  # without the adapter
            check(serving, outputs)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_keep_on_two_ranks(llama: Served) -> None:
    options = {"max_num_batched_tokens": 100}
    with engine(llama, llama.request(0.6, **KEEP), **TWO_RANKS, **options) as llm:
        serving = Serving(llm, llama, ENGINES["keep"])
        assert check(serving, generate(llm, random_prompts(LENGTHS), 60)) == 360
