"""Elimination: the lazy search, the loss of masks, the choice between orders, and whole runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from rlkv import compress, tiny
from rlkv.attention.head_gate import HeadGateConfig, gate_counts
from rlkv.data.recall import MarkedText
from rlkv.gates.allocation import HeadAllocation, compression_order
from rlkv.gates.head_gates import HeadGates
from rlkv.models.layout import Layout
from rlkv.training import elimination, solutions
from rlkv.training.elimination import (
    best,
    choose_order,
    eliminate,
    eliminate_heads,
    mean_order,
    rerank_on_traces,
    with_order,
)
from rlkv.training.run_folder import RunLogs
from rlkv.training.solutions import (
    LikelyTokens,
    TraceLoss,
    draw_traces,
    hard_masks,
    log_probabilities,
    read_traces,
)
from rlkv.utils.files import read_log
from tests.helpers.families import make_family
from tests.helpers.models import make_tiny_model
from tests.training.conftest import finder_options, random_texts

# --- the search, on losses whose order is known

HEADS = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
WORTH = torch.tensor([[9.0, 0.0, 0.7], [0.9, 0.1, 0.8]])


class Known:
    """A loss by formula; a pass per measurement."""

    def __init__(self, formula: Callable[[Tensor], float]) -> None:
        self.formula = formula
        self.passes = 0.0
        self.cpu_seconds = 0.0

    def of(self, full_LH: Tensor) -> float:
        self.passes += 1
        return self.formula(full_LH)


def additive(full_LH: Tensor) -> float:
    return float((WORTH * ~full_LH).sum())


def either(full_LH: Tensor) -> float:
    """(0, 0) and (1, 0) replace each other: both may not go."""
    first, second = not full_LH[0, 0], not full_LH[1, 0]
    return additive(full_LH) - 8.0 * first + 20.0 * (first and second)


def search(loss: Known, steps: int, passes: float, order: Sequence[Any] = HEADS) -> Any:
    gone: list[dict[str, Any]] = []
    found, _ = eliminate(loss, order, 0.0, steps / 6, passes / 6, lambda step, _: gone.append(step))
    assert [(step["layer"], step["head"]) for step in gone] == found[:steps]
    return found, gone


def test_no_solution_is_measured_and_held_back() -> None:
    texts = [MarkedText((1, number % 4), (1,)) for number in range(12)]  # each is there three times
    for seed in range(5):
        measured, others = draw_traces(texts, 2, seed)
        assert len(measured) == 2
        assert others
        assert not {*measured} & {*others}


def test_where_costs_do_not_change_each_head_is_measured_once_more() -> None:
    loss = Known(additive)
    order, steps = search(loss, 6, torch.inf)
    assert order == [(0, 1), (1, 1), (0, 2), (1, 2), (1, 0), (0, 0)]
    assert loss.passes == 1 + 6 + 6  # the start, all heads, and the lowest at every step
    losses = WORTH.flatten().sort().values.cumsum(0).tolist()
    assert [step["loss"] for step in steps] == pytest.approx(losses)
    assert steps[-1]["passes"] == loss.passes
    assert all(step["measured"] for step in steps)


def test_a_cost_that_has_grown_is_seen_within_the_budget() -> None:
    assert search(Known(either), 5, 100)[0] == [(0, 1), (1, 1), (0, 2), (1, 2), (1, 0), (0, 0)]
    assert search(Known(either), 3, 100)[0][3:] == [(1, 2), (1, 0), (0, 0)]
    # without a second measurement the first one decides: (0, 0) costs 0.05 alone, later 20.05
    loss = Known(lambda full: either(full) - 0.95 * float(not full[0, 0]))
    order, steps = search(loss, 5, 7)
    assert order[:2] == [(0, 1), (0, 0)]
    assert loss.passes == 7
    assert not any(step["measured"] for step in steps)
    loss = Known(either)
    search(loss, 5, 10)
    assert loss.passes <= 10


def test_equal_heads_go_in_the_order_given() -> None:
    order = [(1, 2), (0, 1), (1, 0), (0, 0), (0, 2), (1, 1)]
    assert search(Known(lambda full: float(~full.sum())), 6, 100, order)[0] == order
    flat = HeadGates(alpha=torch.full((2, 3), 0.5))
    assert compression_order(with_order(flat, order)) == order


# --- the loss of masks on solutions

FULL = torch.rand(3, 4, generator=torch.Generator().manual_seed(3)) > 0.4
FULL_HEADS = [(int(layer), int(head)) for layer, head in FULL.nonzero()]
LENGTHS = [(8, 60), (9, 51), (10, 42), (11, 33)]  # tokens of prompts and whole texts


def make_loss(family: str = "llama", rows: int = 4, prefill: str = "full") -> TraceLoss:
    gated = get_peft_model(make_tiny_model(family), HeadGateConfig(sink=2, window=5)).eval()
    return TraceLoss(gated, random_texts(LENGTHS), rows, prefill)


HYBRIDS = ["gemma3_text", "qwen3_5_text", "qwen3_next", "falcon_h1", "nemotron_h", "ministral"]


def hybrid_loss(family: str, rows: int, prefill: str) -> tuple[TraceLoss, HeadAllocation]:
    """Return the loss on a hybrid, and an allocation that compresses a head of each gated layer."""
    gated = get_peft_model(make_family(family), HeadGateConfig(sink=2, window=5)).eval()
    heads = gate_counts(gated)
    full = torch.ones(len(heads), max(heads), dtype=torch.bool)
    full[torch.tensor(heads) > 0, 1] = False
    traces = random_texts(LENGTHS, vocabulary=64)
    return TraceLoss(gated, traces, rows, prefill), HeadAllocation(full, heads)


def without(head: tuple[int, int], full: Tensor = FULL) -> Tensor:
    reduced = full.clone()
    reduced[head] = False
    return reduced


def test_the_likeliest_tokens_say_nearly_all(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    full, other = log_probabilities(3 * torch.randn(2, 9, 50, dtype=torch.float64))
    whole = (full.exp() * (full - other)).sum(-1)
    assert torch.allclose(LikelyTokens.of(full).kl(other), whole, rtol=1e-12)
    monkeypatch.setattr(solutions, "KEPT", 20)
    found = LikelyTokens.of(full).kl(other)
    assert (found < whole).all()  # merged tokens are a bound
    assert (found > 0.95 * whole).all()
    sure = log_probabilities(torch.eye(9, 50) * 90)
    assert LikelyTokens.of(sure).kl(sure).abs().max() < 1e-6  # nothing is left for the others
    assert LikelyTokens.of(sure).kl(other.float()).isfinite().all()


@pytest.mark.parametrize("prefill", ["full", "local"])
def test_the_loss_is_the_formula_on_what_the_cache_serves(prefill: str) -> None:
    expected = served_loss(make_tiny_model("llama"), HeadAllocation(FULL), prefill)
    # sums of 50 tokens in float32, and caches add their tokens in another order
    assert make_loss(prefill=prefill).of(FULL) == pytest.approx(expected, rel=1e-4)
    assert expected > 0.1
    assert make_loss(prefill=prefill).of(torch.ones_like(FULL)) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("prefill", ["full", "local"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_the_loss_on_hybrids(family: str, prefill: str) -> None:
    """Sliding windows and linear states go on from the prompts again for each mask."""
    loss, heads = hybrid_loss(family, 1, prefill)
    expected = served_loss(make_family(family), heads, prefill)
    assert loss.of(heads.full) == pytest.approx(expected, rel=1e-4)
    assert expected > 0.01
    assert loss.of(torch.ones_like(heads.full)) == pytest.approx(0, abs=1e-4)
    assert loss.of(heads.full) == pytest.approx(expected, rel=1e-4)
    batched, _ = hybrid_loss(family, 3, prefill)
    assert batched.of(heads.full) == pytest.approx(expected, rel=1e-4)


def served_loss(model: PreTrainedModel, heads: HeadAllocation, prefill: str) -> float:
    """Read as a prompt and tokens one by one, under the cache that serves."""
    total = 0.0
    for trace in random_texts(LENGTHS, vocabulary=model.config.get_text_config().vocab_size):
        ids, answers = torch.tensor([trace.ids]), torch.tensor(trace.answers)
        prompt = trace.answers[0]
        with torch.no_grad():
            p = model(ids).logits[0, answers - 1].double().softmax(-1)
            with compress(model, heads, sink=2, window=5, prefill=prefill) as session:
                found = [model(ids[:, :prompt]).logits]
                for token in ids[:, prompt:].split(1, dim=1):
                    found.append(model(token, past_key_values=session.cache).logits)
            q = torch.cat(found, dim=1)[0, answers - 1].double().softmax(-1)
        total += math.log1p((p * (p / q).log()).sum().item())
    return total / 4


@pytest.mark.parametrize("prefill", ["full", "local"])
def test_batches_and_pieces_do_not_matter(
    family: str, prefill: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several lengths in a batch are padded on the left."""
    expected = make_loss(family, 1, prefill).of(FULL)
    assert make_loss(family, 4, prefill).of(FULL) == pytest.approx(expected, rel=1e-4)
    monkeypatch.setattr(solutions, "TOKENS_AT_ONCE", 7)
    assert make_loss(family, 3, prefill).of(FULL) == pytest.approx(expected, rel=1e-4)
    monkeypatch.setattr(solutions, "KEPT", 100)  # of 128
    assert 0.7 * expected < make_loss(family, 3, prefill).of(FULL) < expected


def test_layers_below_the_first_other_head_do_not_compute_again(family: str) -> None:
    loss = make_loss(family, rows=2)
    calls: list[int] = []
    for number, layer in enumerate(loss.decoder.layers):
        layer.self_attn.register_forward_hook(lambda *_, number=number: calls.append(number))
    # one more head, the same again, another of a later and of an earlier layer, and all at once
    late = without(FULL_HEADS[-1])
    masks = [FULL, late, late, without(FULL_HEADS[0], late), without(FULL_HEADS[0]), ~FULL]
    firsts = [0, FULL_HEADS[-1][0], 3, FULL_HEADS[0][0], FULL_HEADS[-1][0], 0]
    assert firsts[1] > firsts[3]
    for mask, first in zip(masks, firsts, strict=True):
        calls.clear()
        before = loss.passes
        found = loss.of(mask)
        assert loss.passes - before == pytest.approx(1 - first / 3)
        assert sorted(calls) == sorted(2 * list(range(first, 3)))  # two batches
        assert found == pytest.approx(make_loss(family, rows=2).of(mask), rel=1e-5)


# --- the choice between orders

SPAN = (0.25, 0.75)


def shuffled(seed: int) -> list[tuple[int, int]]:
    places = torch.randperm(12, generator=torch.Generator().manual_seed(seed)).tolist()
    return [divmod(place, 4) for place in places]


def test_the_mean_of_two_orders() -> None:
    first, second = [(0, 0), (0, 1), (1, 0), (1, 1)], [(0, 0), (1, 1), (0, 1), (1, 0)]
    assert mean_order(first, second) == [(0, 0), (0, 1), (1, 1), (1, 0)]  # sums 0, 3, 4, 5
    assert mean_order(first, first[::-1]) == first[::-1]  # all sums are equal


@pytest.mark.parametrize(
    ("less", "expected"),
    [
        ([0.1, 0.1, 0.1], "measured"),  # than the mean order's, on each solution
        ([0.3, -0.1, -0.1], "mean"),  # lower in the mean, by less than its standard error
        ([0.0, 0.0, 0.0], "mean"),
        ([-0.1, -0.1, -0.1], "mean"),
        ([0.1], "mean"),  # one solution says nothing of the error
    ],
)
def test_the_mean_is_kept_unless_another_is_clearly_better(
    less: list[float], expected: str
) -> None:
    mean = torch.linspace(0.5, 1.5, len(less), dtype=torch.float64)
    measured = mean - torch.tensor(less, dtype=torch.float64)
    assert best({"measured": measured, "mean": mean, "distilled": mean + 0.5}) == expected
    better = best({"measured": measured, "mean": mean, "distilled": mean - 0.2})
    assert better == ("mean" if len(less) == 1 else "distilled")


def test_each_order_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, traces = make_tiny_model("llama"), random_texts(LENGTHS[:3])
    first, second = shuffled(0), shuffled(1)
    orders = {"measured": second, "mean": mean_order(first, second), "distilled": first}
    with hard_masks(model, sink=2, window=5) as gated:
        loss = TraceLoss(gated, traces, 1)
        for name, order in orders.items():
            monkeypatch.setattr(elimination, "best", lambda losses, name=name: name)
            chosen, told = choose_order(gated, traces, first, second, *SPAN, "full")
            assert (chosen, told["order"]) == (order, name)
            total = 0.0
            for gone in (5, 7):  # of 12 heads, at a third and two thirds of the span
                total += loss.of(HeadAllocation.from_order(order, 3, 4, gone / 12).full)
            assert told["order_losses"][name] == pytest.approx(total / 2, rel=1e-5)
    assert not any("rlkv_gate" in parameter for parameter, _ in model.named_parameters())


# --- whole runs of the tiny model


def recorded(path: Path) -> list[MarkedText]:
    return read_traces(str(path), tiny.load()[1], "rlkv")


def run(folder: Path, curriculum: Path, *model: Any, **other: object) -> HeadGates:
    given = {"finder": "elimination", "curriculum": curriculum, "elimination_traces": 6}
    given |= {"elimination_sparsity": 0.25, "elimination_distillation": 0, **other}
    return eliminate_heads(*finder_options(**given, output_dir=folder), *model)


@pytest.fixture(scope="module")
def measured_run(
    curriculum: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, HeadGates]:
    folder = tmp_path_factory.mktemp("measured") / "run"
    return folder, run(folder, curriculum, elimination_budget=2)


DISTILLED = {"elimination_distillation": 8, "elimination_sparsity": 0.55, "forward_rows": 3}


def test_a_run_exports_an_order(measured_run: tuple[Path, HeadGates]) -> None:
    folder, gates = measured_run
    assert HeadGates.load(folder / "gates.pt") == gates
    assert gates.alpha.flatten().sort().values.equal(torch.linspace(0, 1, 24))
    assert (gates.sink, gates.window, gates.deploy_sink, gates.deploy_window) == (4, 16, 4, 16)
    order, records = compression_order(gates), read_log(folder / "log.jsonl")
    assert [(record["layer"], record["head"]) for record in records] == order[:6]
    assert order.index((1, 1)) > 12  # which the built-in model always needs
    last = torch.tensor(read_log(folder / "gates.jsonl")[-1]["alpha"])
    assert torch.equal(last == 1, HeadAllocation.from_gates(gates, 0.25).full)
    told = gates.training
    assert told["passes"] == records[-1]["passes"] <= 48
    assert "curriculum" not in told


def test_a_stopped_or_finished_run_goes_on_from_what_it_measured(
    curriculum: Path,
    measured_run: tuple[Path, HeadGates],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure, measured = TraceLoss._measure, list[int]()

    def counted(loss: TraceLoss, number: int) -> float:
        measured.append(number)
        if len(measured) == 20:
            raise KeyboardInterrupt
        return measure(loss, number)

    monkeypatch.setattr(TraceLoss, "_measure", counted)
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(folder, curriculum, elimination_sparsity=0.1, elimination_budget=2)
    assert not (folder / "gates.pt").exists()
    run(folder, curriculum, elimination_sparsity=0.1, elimination_budget=2)
    before = (folder / "measured.jsonl").read_text()
    found = run(folder, curriculum, elimination_budget=2)
    after = (folder / "measured.jsonl").read_text()
    assert after.startswith(before)
    assert len(measured) == len(after.splitlines()) + 1  # the kill
    assert found.alpha.equal(measured_run[1].alpha)
    assert found.training["passes"] == measured_run[1].training["passes"]
    assert len(read_log(folder / "log.jsonl")) == 6
    with pytest.raises(ValueError, match="forward_rows was 16 and is now 2"):
        run(folder, curriculum, forward_rows=2)
    with pytest.raises(ValueError, match="elimination_prefill 'full' -> 'local'"):
        run(folder, curriculum, elimination_prefill="local")


def test_distillation_orders_the_first_heads_and_other_solutions_say_which_order_is_kept(
    curriculum: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sent = Mock()
    monkeypatch.setattr(wandb.Run, "log", sent)
    model, tokenizer = tiny.load()
    options = {**DISTILLED, "elimination_traces": 2, "gradient_checkpointing": True}
    folder = tmp_path / "run"
    gates = run(folder, curriculum, model, tokenizer, **options, wandb="offline", l1_beta=0.3)
    texts = recorded(curriculum)
    measured, others = draw_traces(texts, 2, seed=0)
    assert len({text.ids for text in [*measured, *others]}) == 6
    distilled, order = HeadGates.load(folder / "distilled" / "gates.pt"), compression_order(gates)
    assert order[:10] == compression_order(distilled)[:10]
    assert order.index((1, 1)) > 12
    steps = read_log(folder / "distilled" / "log.jsonl")
    # all solutions in each step
    answers = sum(len(text.answers) for text in texts)
    assert {record["tokens/answers"] for record in steps} == {answers}
    told = gates.training
    assert told["order"] in told["order_losses"].keys() == {"measured", "mean", "distilled"}
    seconds = sum(record["time/step_cpu_s"] for record in steps)
    assert told["distillation_cpu_seconds"] == pytest.approx(seconds, abs=1e-3)
    parts = [told["choice_cpu_seconds"], told["cpu_seconds"], seconds]
    assert min(parts) > 0
    records = read_log(folder / "log.jsonl")
    assert len(records) == 3
    total = sum(record["time/step_cpu_s"] for record in records)
    assert total == pytest.approx(sum(parts), rel=0.2)
    # activations were recomputed in the distillation alone
    noted = json.loads((folder / "distilled" / "run_config.json").read_text())
    assert noted["gradient_checkpointing"] is True
    assert list((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [call.kwargs["step"] for call in sent.call_args_list] == [1, 2, 3]
    assert {"collapse/traces_kept", "heads/gates"} <= sent.call_args.args[0].keys()
    assert not model.training
    assert not model.is_gradient_checkpointing
    unread = capsys.readouterr().out.partition("does not read ")[2].partition("(")[0]
    assert "l1_beta" in unread
    assert "max_steps" in unread  # of configs/tiny.yaml
    assert "elimination" not in unread


def test_gates_are_the_start(curriculum: Path) -> None:
    """Head (1, 1) goes last (the ground truth of the tiny model), whatever the gates say of it."""
    model, _ = tiny.load()
    implementation = model.config._attn_implementation
    alpha = torch.arange(24).view(4, 6) / 24
    # the gates would let it go before (0, 2), which nothing needs
    alpha[1, 1] = 0.98
    alpha[0, 2] = 0.99
    gates = HeadGates(alpha=alpha, deploy_sink=4, deploy_window=16, training={"method": "hand"})
    texts = recorded(curriculum)
    traces, _ = draw_traces(texts, 6, seed=0)
    result = rerank_on_traces(model, traces, gates, 0.92, 1.0)
    assert compression_order(gates)[-2:] == [(1, 1), (0, 2)]
    assert compression_order(result) == [*compression_order(gates)[:-2], (0, 2), (1, 1)]
    facts = result.training["reranked"]
    assert (facts["low"], facts["high"], facts["traces"]) == (0.92, 1.0, 6)
    assert facts["passes"] > 2
    assert result.training["method"] == "hand"
    assert model.config._attn_implementation == implementation
    assert not any("rlkv_gate" in name for name, _ in model.named_modules())
    assert traces == draw_traces(texts, 6, seed=0)[0] != draw_traces(texts, 6, seed=1)[0]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"elimination_sparsity": 0.01}, "0.01"),
        ({"elimination_sparsity": 0.41, "elimination_distillation": 8}, "further apart"),
        ({"elimination_sparsity": 1.5, "elimination_distillation": 8}, "1.5"),
        ({"elimination_traces": 7}, "7.*has only 6"),
    ],
)
def test_what_does_not_fit_is_named(
    changed: dict[str, object], named: str, curriculum: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=named):
        run(tmp_path / "run", curriculum, **changed)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("family", ["gemma3_text", "nemotron_h"])
def test_a_run_on_a_hybrid(family: str, curriculum: Path, tmp_path: Path) -> None:
    """Heads of layers with full attention are ordered, all other places are no gates."""
    _, tokenizer = tiny.load()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    model = make_family(family, **sizes)
    settings = {**DISTILLED, "elimination_sparsity": 0.8, "elimination_traces": 4}
    gates = run(tmp_path / "run", curriculum, model, tokenizer, **settings)
    total = int(gates.gated.sum())
    assert gates.heads == Layout.from_config(model.config).heads
    assert gates.alpha[gates.gated].sort().values.equal(torch.linspace(0, 1, total))
    assert HeadGates.load(tmp_path / "run" / "gates.pt") == gates
    logs = RunLogs.read(tmp_path / "run")
    assert len(logs.gates[-1]["alpha"]) == gates.num_layers
    assert logs.gates[-1]["heads"] == list(gates.heads)
    assert gates.training["order"] in ("measured", "mean", "distilled")


def test_jamba_reads_prompts_through_the_masks(curriculum: Path, tmp_path: Path) -> None:
    """Its linear layers take no state up for several tokens."""
    _, tokenizer = tiny.load()
    model = make_family("jamba", vocab_size=len(tokenizer), max_position_embeddings=1024)
    with pytest.raises(ValueError, match="--elimination-prefill local"):
        run(tmp_path / "run", curriculum, model, tokenizer, elimination_sparsity=0.5)
    assert not (tmp_path / "run").exists()
    options = {"elimination_sparsity": 0.5, "elimination_prefill": "local"}
    assert run(tmp_path / "run", curriculum, model, tokenizer, **options).layers == [1]
