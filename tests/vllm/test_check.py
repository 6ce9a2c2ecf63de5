"""The check of what attention reads: nothing to find in the engine, and every mutation is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlkv.vllm.packing import SinkWindowDemand
from rlkv.vllm.settings import CHECK
from tests.helpers.engines import (
    BLOCK,
    ITSELF,
    Engines,
    Served,
    engine,
    generate,
    need_vllm,
    random_prompts,
    watch_preemptions,
)

need_vllm()

from rlkv.attention.softmax import Softmax
from rlkv.vllm import aligned, check, specs
from rlkv.vllm.drafts import HeadDraftProposer
from rlkv.vllm.head_rows import StepRows

SMALL = {"max_num_batched_tokens": 100, "enable_prefix_caching": True, "max_model_len": 640}
POOL = {"num_gpu_blocks_override": 56, "async_scheduling": False}
PROMPTS = random_prompts((5, 33, 150, 180, 200, 220, 240), seed=2)
# at 0.5 the bins of aligned windows are read together, at 0.6 one by one
MODES = {
    "exact": {},
    "aligned": {"aligned_windows": True},
    "joined": {"aligned_windows": True, "sparsity": 0.5},
    "keep": {"mode": "keep"},
    "lossless": {"mode": "lossless"},
    "in full": {"prefill": "full"},
    "protected": {"protect_prompt": True, "aligned_windows": True},
}


def run(served: Served, **settings: Any) -> check.ReachabilityCheck:
    options = dict(SMALL | POOL)
    if settings.get("prefill") == "full":
        options["max_num_batched_tokens"] = 640
    if settings.get("mode") == "lossless":
        options |= {"speculative_config": ITSELF, "num_gpu_blocks_override": 42}
    request = served.request(**{"sparsity": 0.6, **settings})
    with engine(served, request, **options) as llm:
        generate(llm, PROMPTS[-1:], 20)
        (again,) = generate(llm, PROMPTS[-1:], 20)
        preempted = watch_preemptions(llm)
        generate(llm, PROMPTS, 100)
        assert preempted
        assert bool(again.num_cached_tokens) == (settings.get("prefill") != "full")
    return check._current[0]


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    monkeypatch.setenv(CHECK, "1")
    # what an engine held when it was ended by a fault would stay on this process's metrics
    monkeypatch.setattr(specs.CountingManager, "report", lambda self: None)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_found_in_the_engine(llama: Served, mode: str) -> None:
    found = run(llama, **MODES[mode])
    # each of 16 heads for every token but the last of each text
    assert found.sets >= 16 * 99 * len(PROMPTS)
    assert found.outputs > 10
    assert found.largest < 1e-5


def widen(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = SinkWindowDemand.__init__

    def wider(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        object.__setattr__(self, "window", self.window + 1)

    monkeypatch.setattr(SinkWindowDemand, "__init__", wider)


def free_early(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = specs.SinkWindowManager.remove_skipped_blocks

    def early(self: Any, request_id: str, processed: int, *args: Any) -> None:
        stock(self, request_id, processed + BLOCK, *args)

    monkeypatch.setattr(specs.SinkWindowManager, "remove_skipped_blocks", early)


def swap(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = aligned.cut_tables

    def swapped(*args: Any) -> torch.Tensor:
        table = stock(*args)
        if table.shape[1] > 2:
            table = table[:, [1, 0, *range(2, table.shape[1])]]
        return table

    monkeypatch.setattr(aligned, "cut_tables", swapped)


def hit_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = specs.SinkWindowManager.find_longest_cache_hit.__func__

    def wrong(cls: Any, *args: Any, **kwargs: Any) -> Any:
        tables, length = stock(cls, *args, **kwargs)
        for table in tables:
            table[:2] = reversed(table[:2])  # as if a block had another one's hash
        return tables, length

    monkeypatch.setattr(specs.SinkWindowManager, "find_longest_cache_hit", classmethod(wrong))


def take_the_next_page(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = StepRows._tables
    monkeypatch.setattr(StepRows, "_tables", lambda self: [table + 1 for table in stock(self)])


def draft_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = HeadDraftProposer.set_inputs_first_pass

    def misplaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows, last, first = stock(self, *args, **kwargs)
        first.slot_mapping -= 1  # of the token before, which was verified
        return rows, last, first

    monkeypatch.setattr(HeadDraftProposer, "set_inputs_first_pass", misplaced)


@pytest.mark.parametrize(
    ("mutate", "mode"),
    [
        *((own, "joined") for own in (widen, free_early, swap, hit_wrongly, take_the_next_page)),
        (draft_elsewhere, "lossless"),
    ],
)
def test_mutations_are_found(
    llama: Served, mutate: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(RuntimeError, match=CHECK):
        run(llama, **MODES[mode])


def test_evictions_are_refused(llama: Served) -> None:
    with pytest.raises(ValueError, match="does not know what an eviction policy has kept"):
        run(llama, eviction={"name": "rkv", "budget": 40, "buffer": 24})


def test_prompts_of_embeddings_are_refused(llama: Served) -> None:
    """The runner hands the model no tokens then, also of other prompts."""
    with (
        pytest.raises(ValueError, match=f"{CHECK} compares tokens.*--enable-prompt-embeds out"),
        engine(llama, llama.request(0.6), enable_prompt_embeds=True) as llm,
    ):
        generate(llm, PROMPTS[:1], 3)


def test_a_cache_in_fp8(llama: Served) -> None:
    """Sets are compared; outputs are of rounded keys and values, which float64 ones are not."""
    with engine(llama, llama.request(0.6, mode="keep"), kv_cache_dtype="fp8") as llm:
        generate(llm, PROMPTS[:3], 20)  # the last is longer than sinks and window
    found = check._current[0]
    assert found.sets >= 16 * 19 * 3
    assert found.outputs == 0


def test_outputs_with_learned_sinks(engines: Engines) -> None:
    """They are part of what is computed again."""
    served = engines.served("gpt_oss")
    with engine(served, served.request(0.625), **SMALL, **POOL) as llm:
        generate(llm, PROMPTS[:3], 100)
    found = check._current[0]
    assert found.outputs >= 10
    assert found.largest < 1e-5


def recompute(found: check.ReachabilityCheck, out: torch.Tensor) -> None:
    """Hand over calls with keys and values of ones, until an output is computed again."""
    states = (torch.ones(1, 2, 4), torch.ones(1, 1, 4), torch.ones(1, 1, 4))
    for call in range(check.OUTPUTS_EVERY):
        slots = torch.tensor([call])
        rows = [check.Row(0, slots)]
        found.recompute("layer", 64, slots, states, rows, Softmax(0.5), out)


def test_noted_states_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as large as the cache: made for each call they would take most of the time."""
    made = []
    stock = torch.Tensor.new_zeros

    def counted(self: torch.Tensor, *size: int) -> torch.Tensor:
        made.append(size)
        return stock(self, *size)

    monkeypatch.setattr(torch.Tensor, "new_zeros", counted)
    found = check.ReachabilityCheck()
    recompute(found, torch.ones(1, 2, 4))
    assert made == [(2, 64, 1, 4)]
    assert found.outputs == 1


@pytest.mark.parametrize("value", [1.001, float("nan")])  # NaN: of a block that was never written
def test_a_wrong_output_is_found(value: float) -> None:
    with pytest.raises(RuntimeError, match=f"{CHECK}: an output of layer is .* off float64"):
        recompute(check.ReachabilityCheck(), torch.full((1, 2, 4), value))
