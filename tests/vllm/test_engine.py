"""VLLMEngine against transformers: gates at 1, at 0 and between, after every update, in every way
of scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from rlkv.attention import LocalSizes
from rlkv.rollout.base import Rows, SamplingParams, gate_version
from rlkv.rollout.hf import roll_out
from tests.helpers.mixed_reference import local_mask

pytest.importorskip("vllm")

from rlkv.vllm.engine import VLLMEngine
from tests.helpers.models import FAMILIES
from tests.helpers.vllm_models import (
    ENDS,
    KV_HEADS,
    LAYERS,
    OPTIONS,
    SINK,
    TOLERANCE,
    WINDOW,
    load_reference,
    make_folder,
    make_rows,
    put_gates,
    random_gates,
    worst_difference,
)

SIZES = LocalSizes(SINK, WINDOW)
SAMPLED = SamplingParams(40, temperature=1.0, seed=5)


def check_against_training_rollout(
    engine: VLLMEngine, model: torch.nn.Module, rows: Rows, top_p: float = 1.0
) -> None:
    """Same tokens as the training loop's own rollout, log-probabilities as teacher-forced."""
    sampling = SamplingParams(40, temperature=0.8, top_p=top_p, seed=5)
    found = dict(engine.sample(rows, sampling))
    expected = sorted(
        roll_out(model.get_base_model(), rows, sampling, ENDS, 0, 8), key=lambda row: row.index
    )
    tokens = [row.token_ids for row in expected]
    assert [found[i].token_ids for i in range(len(rows.prompts))] == tokens
    error = worst_difference(model, rows, found, temperature=0.8)
    print(f"{len(tokens)} rows, {sum(map(len, tokens))} tokens, max |delta logprob| {error:.1e}")
    assert error < TOLERANCE
    for i, row in enumerate(expected):
        assert (
            torch.tensor(found[i].logprobs) - torch.tensor(row.logprobs)
        ).abs().max() < TOLERANCE
    ends = {i: s.token_ids[-1] in ENDS for i, s in found.items()}
    assert {i: s.finish_reason for i, s in found.items()} == {
        i: "stop" if e else "length" for i, e in ends.items()
    }
    assert len(set(ends.values())) == 2, "all completions end alike: choose other prompts"


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, VLLMEngine]]:
    folder = make_folder(request.param, tmp_path_factory.mktemp(request.param))
    # 48 tokens a step: prompts of up to 125 tokens are prefilled in chunks, next to rows that
    # decode and more positions than the 512 that the model has
    with closing(
        VLLMEngine(str(folder), SIZES, max_positions=600, max_num_batched_tokens=48, **OPTIONS)
    ) as engine:
        yield folder, engine


def test_tokens_and_logprobs_equal_the_reference_after_every_update(
    served: tuple[Path, VLLMEngine],
) -> None:
    folder, engine = served
    model = load_reference(folder)
    for update in range(3):
        alpha = random_gates(update)
        version = engine.set_gates(alpha)
        assert version == gate_version(alpha)
        assert torch.equal(engine.gates(), alpha)
        rows = make_rows(rollout=update)
        check_against_training_rollout(
            engine, put_gates(model, alpha), rows, top_p=1.0 if update else 0.7
        )
        assert {sample.version for _, sample in engine.sample(rows, SAMPLED)} == {version}


def test_gates_at_one_equal_the_stock_model(served: tuple[Path, VLLMEngine]) -> None:
    folder, engine = served
    engine.set_gates(torch.ones(LAYERS, KV_HEADS))
    rows = make_rows()
    assert (
        worst_difference(
            load_reference(folder, gated=False), rows, dict(engine.sample(rows, SAMPLED))
        )
        < TOLERANCE
    )


def test_gates_at_zero_equal_an_explicit_mask(served: tuple[Path, VLLMEngine]) -> None:
    folder, engine = served
    engine.set_gates(torch.zeros(LAYERS, KV_HEADS))
    rows = make_rows()
    stock = load_reference(folder, gated=False)

    class Masked(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return stock(
                ids, attention_mask=local_mask(torch.ones_like(ids).bool(), SINK, WINDOW)[:, None]
            )

    samples = dict(engine.sample(rows, SAMPLED))
    assert worst_difference(Masked(), rows, samples) < TOLERANCE
    assert worst_difference(stock, rows, samples) > 0.1  # the mask hides something that matters


def test_a_prefix_cache_that_is_not_reset_is_noticed(
    served: tuple[Path, VLLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, engine = served
    rows = make_rows(seed=1)
    assert max(map(len, rows.prompts)) > 64  # whole blocks to be found again
    model = load_reference(folder)
    engine.set_gates(torch.ones(LAYERS, KV_HEADS))
    dict(engine.sample(rows, SAMPLED))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_drop_cached", lambda: None)
        engine.set_gates(torch.zeros(LAYERS, KV_HEADS))
    put_gates(model, torch.zeros(LAYERS, KV_HEADS))
    assert worst_difference(model, rows, dict(engine.sample(rows, SAMPLED))) > 0.01
    engine.set_gates(torch.zeros(LAYERS, KV_HEADS))
    assert worst_difference(model, rows, dict(engine.sample(rows, SAMPLED))) < TOLERANCE
    assert (
        worst_difference(model, rows, dict(engine.sample(rows, SAMPLED))) < TOLERANCE
    )  # hits under the same gates


def test_a_row_gets_its_tokens_in_any_company(served: tuple[Path, VLLMEngine]) -> None:
    _, engine = served
    engine.set_gates(random_gates(7))
    rows = make_rows(12)
    together = dict(engine.sample(rows, SAMPLED))
    some = [7, 2, 9]
    alone = dict(engine.sample(rows.only(some), SAMPLED))
    assert [alone[k].token_ids for k in range(3)] == [together[i].token_ids for i in some]
    assert together[0].token_ids != together[1].token_ids  # same prompt, another row: other draws


def test_greedy_completions_as_any_engine_gives_them(served: tuple[Path, VLLMEngine]) -> None:
    from rlkv.rollout.hf import HFEngine

    folder, engine = served
    model = put_gates(load_reference(folder), random_gates(2))
    engine.set_gates(random_gates(2))
    prompts = [engine.tokenizer.decode(ids) for ids in make_rows().prompts[::2]]
    reference = HFEngine(model.get_base_model(), engine.tokenizer)
    greedy = SamplingParams(30)
    found = engine.generate(prompts, greedy)
    assert [c.token_ids for c in found] == [
        c.token_ids for c in reference.generate(prompts, greedy)
    ]
    assert [c.text for c in found] == [c.text for c in reference.generate(prompts, greedy)]
    assert engine.prompt_lengths(prompts) == reference.prompt_lengths(prompts)


def test_wrong_use_is_named(served: tuple[Path, VLLMEngine]) -> None:
    _, engine = served
    with pytest.raises(ValueError, match=rf"gates \[{LAYERS}, {KV_HEADS}\].*\[2, 2\]"):
        engine.set_gates(torch.ones(2, 2))
    with pytest.raises(ValueError, match="prompt 1"):
        next(engine.sample(Rows([[5], []], [0, 1], 0), SAMPLED))
    with pytest.raises(ValueError, match="512 positions"):
        next(engine.sample(Rows([[5] * 500], [0], 0), SAMPLED))
    stream = engine.sample(make_rows(), SAMPLED)
    next(stream)
    with pytest.raises(ValueError, match="being sampled"):
        engine.set_gates(random_gates(0))
    stream.close()  # drops the rest
    engine.set_gates(random_gates(0))
    with pytest.raises(ValueError, match="one vLLM engine"):
        VLLMEngine("tiny")
    with pytest.raises(ValueError, match="2 prompts"):
        Rows([[1], [2]], [0], 0)
