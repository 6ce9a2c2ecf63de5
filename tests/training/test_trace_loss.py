"""The loss of masks on solutions: its formula, batches, and layers that run once for several heads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor

from rlkv import compress
from rlkv.attention.head_gate import HeadGateConfig
from rlkv.data.recall import MarkedText
from rlkv.gates.allocation import HeadAllocation
from rlkv.training.distillation import log_probabilities, make_batch
from rlkv.training.elimination import KEY, LikelyTokens, TraceLoss
from rlkv.utils.store import open_store
from tests.helpers.models import make_tiny_model

FULL = torch.rand(3, 4, generator=torch.Generator().manual_seed(3)) > 0.4
HEADS = [(int(layer), int(head)) for layer, head in FULL.nonzero()]


def random_traces(number: int) -> list[MarkedText]:
    generator = torch.Generator().manual_seed(0)
    texts = [
        torch.randint(3, 128, (60 - 9 * i,), generator=generator).tolist() for i in range(number)
    ]
    return [MarkedText(tuple(ids), tuple(range(8 + i, len(ids)))) for i, ids in enumerate(texts)]


def make_loss(
    family: str = "llama", rows: int = 4, prefill: str = "full", **overrides: Any
) -> TraceLoss:
    gated = get_peft_model(
        make_tiny_model(family, **overrides), HeadGateConfig(sink=2, window=5)
    ).eval()
    return TraceLoss(gated, random_traces(4), rows, prompts_in_full=prefill == "full")


def without(layer: int, head: int) -> Tensor:
    reduced = FULL.clone()
    reduced[layer, head] = False
    return reduced


def test_the_likeliest_tokens_say_nearly_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of merged tokens: below the KL over all, equal to the KL of the merged
    distributions by hand.
    """
    torch.manual_seed(0)
    full, other = (log_probabilities(3 * torch.randn(9, 50, dtype=torch.float64)) for _ in range(2))
    whole = (full.exp() * (full - other)).sum(-1)
    assert torch.allclose(LikelyTokens.of(full).kl(other), whole, rtol=1e-12)
    monkeypatch.setattr("rlkv.training.elimination.KEPT", 20)
    likely = full.topk(20).indices
    rest = torch.ones(9, 50, dtype=torch.bool).scatter(1, likely, False)

    def merged(log: Tensor) -> Tensor:
        others = torch.stack([row.exp()[keep].sum() for row, keep in zip(log, rest, strict=True)])
        return torch.cat([log.exp().gather(1, likely), others[:, None]], dim=1)

    p, q = merged(full), merged(other)
    found = LikelyTokens.of(full).kl(other)
    assert torch.allclose(found, (p * (p / q).log()).sum(-1), rtol=1e-9)
    assert (found < whole).all()
    assert (found > 0.95 * whole).all()
    sure = log_probabilities(torch.nn.functional.one_hot(torch.arange(9), 50).float() * 90)
    assert LikelyTokens.of(sure).kl(sure).abs().max() < 1e-6  # nothing is left for the others
    assert LikelyTokens.of(sure).kl(other.float()).isfinite().all()


@pytest.mark.parametrize(("in_full", "answers"), [(False, [6, 7, 9]), (True, [7])])
def test_batches_look_one_token_back(in_full: bool, answers: list[int]) -> None:
    """A first answer is predicted by the prompt: read in full, no mask acts on it."""
    decoder = make_tiny_model("llama").get_decoder()
    texts = [MarkedText((5, 6, 7), (1, 2)), MarkedText((8, 9), (1,))]
    batch = make_batch(decoder, texts, in_full, torch.device("cpu"))
    assert batch.answer_N.tolist() == answers
    assert batch.ids_BT.tolist() == ([[6, 7], [9, 0]] if in_full else [[5, 6, 7], [8, 9, 0]])
    assert batch.mask_BK.tolist() == [[1, 1, 1], [1, 1, 0]]
    where = ([0], [0]) if in_full else ([0, 0, 1], [0, 1, 0])
    assert (batch.row_N.tolist(), batch.position_N.tolist()) == where


@pytest.mark.parametrize("prefill", ["full", "local"])
def test_the_loss_is_the_formula_on_what_the_cache_serves(prefill: str) -> None:
    """Read as a prompt and tokens one by one, under the cache that serves."""
    model, total = make_tiny_model("llama"), 0.0
    for trace in random_traces(4):
        ids, answers = torch.tensor([trace.ids]), torch.tensor(trace.answers)
        prompt = trace.answers[0]
        with torch.no_grad():
            p = model(ids).logits[0, answers - 1].double().softmax(-1)
            with compress(
                model, HeadAllocation(FULL), sink=2, window=5, prefill=prefill
            ) as session:
                found = [model(ids[:, :prompt]).logits]
                for token in ids[:, prompt:].split(1, dim=1):
                    found.append(model(token, past_key_values=session.cache).logits)
            q = torch.cat(found, dim=1)[0, answers - 1].double().softmax(-1)
        total += math.log1p((p * (p / q).log()).sum().item())
    # sums of 50 tokens in float32, and caches add their tokens in another order
    assert make_loss(prefill=prefill).of(FULL) == pytest.approx(total / 4, rel=1e-4)
    assert total / 4 > 0.1
    assert make_loss(prefill=prefill).of(torch.ones_like(FULL)) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("prefill", ["full", "local"])
def test_batches_and_pieces_do_not_matter(
    family: str, prefill: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several lengths in a batch are padded on the left."""
    expected = make_loss(family, 1, prefill).of(FULL)
    assert make_loss(family, 4, prefill).of(FULL) == pytest.approx(expected, rel=1e-4)
    monkeypatch.setattr("rlkv.training.elimination.TOKENS_AT_ONCE", 7)
    assert make_loss(family, 3, prefill).of(FULL) == pytest.approx(expected, rel=1e-4)
    monkeypatch.setattr("rlkv.training.elimination.KEPT", 100)  # of 128
    assert 0.7 * expected < make_loss(family, 3, prefill).of(FULL) < expected


@pytest.mark.parametrize("rows", [2, 4])
def test_one_more_head(family: str, rows: int) -> None:
    loss = make_loss(family, rows=rows)
    expected = [loss.of(without(*head)) for head in HEADS]
    assert len({round(value, 5) for value in expected}) == len(HEADS) > 4
    before = loss.passes
    assert loss.without_each(FULL, HEADS) == pytest.approx(expected, rel=1e-5)
    assert loss.passes - before == pytest.approx(1 + sum(1 - layer / 3 for layer, _ in HEADS))
    assert loss.without_each(FULL, HEADS[::-1]) == pytest.approx(expected[::-1], rel=1e-5)
    assert loss.of(FULL) == pytest.approx(
        make_loss(family).of(FULL), rel=1e-4
    )  # all layers compute again


def test_layers_below_a_head_that_goes_next_do_not_compute_again(family: str) -> None:
    loss, calls = make_loss(family, rows=2), list[int]()
    for number, layer in enumerate(loss.decoder.layers):
        layer.self_attn.register_forward_hook(lambda *_, number=number: calls.append(number))
    full = FULL.clone()
    first = loss.without_each(full, HEADS)
    lowest = HEADS[first.index(min(first))]
    full[lowest] = False
    rest = [head for head in HEADS if head != lowest]
    calls.clear()
    before = loss.passes
    for head in (*rest[-2:], rest[0]):
        alone = full.clone()
        alone[head] = False
        found = loss.without_each(full, [head])
        assert loss.passes - before == pytest.approx(1 - head[0] / 3)
        assert sorted(calls) == sorted(2 * list(range(head[0], 3)))  # two batches
        assert found == pytest.approx([make_loss(family, rows=2).of(alone)], rel=1e-5)
        calls.clear()
        before = loss.passes


def test_what_was_measured_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for _ in range(2):
        with open_store(tmp_path / "measured.jsonl", {}, KEY) as store:
            loss = TraceLoss(make_loss().model, random_traces(4), 2, store=store)
            found.append(
                (
                    [loss.of(FULL), *loss.without_each(FULL, HEADS)],
                    loss.passes,
                    round(loss.cpu_seconds, 1),
                )
            )
        for name in ("_measure", "_below"):  # not even the layers below a head
            monkeypatch.setattr(TraceLoss, name, None)
    assert found[0] == found[1]
    assert len(store.rows) == 2 * (1 + len(HEADS))


def test_layers_compute_again_after_an_error() -> None:
    loss = make_loss()
    expected = loss.of(FULL)
    with pytest.raises(IndexError):
        loss.without_each(FULL, [(2, 0), (2, 9)])
    assert loss.of(FULL) == expected


def test_bfloat16_is_close() -> None:
    rounded = get_peft_model(
        make_tiny_model("llama").bfloat16(), HeadGateConfig(sink=2, window=5)
    ).eval()
    # bfloat16 has 3 digits
    assert TraceLoss(rounded, random_traces(4), rows=2).of(FULL) == pytest.approx(
        make_loss().of(FULL), rel=0.05
    )


def test_layers_with_a_window_are_refused() -> None:
    options = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    with pytest.raises(ValueError, match="full attention"):
        make_loss("qwen2", **options)
