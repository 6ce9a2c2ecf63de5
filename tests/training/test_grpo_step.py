"""Parts of a GRPO step: how rows are shared out, verdicts, and log-probabilities."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from rlkv.rollout.base import Sample
from rlkv.training.config import passes
from rlkv.training.grpo import find_liger
from rlkv.training.objective import completion_logprobs
from rlkv.training.sharding import RowSampler, Shares, make_micro_batches
from rlkv.training.trainer import judged
from tests.helpers.models import make_tiny_model

# --- sampler


@pytest.mark.parametrize(("processes", "at_once"), [(1, 1), (2, 3), (7, 8)])
def test_any_number_of_processes_has_slots_for_a_step(processes: int, at_once: int) -> None:
    slots = passes(32, 4, at_once * processes) * at_once
    assert slots * processes % 4 == 0
    assert Shares(1, slots, processes).of(0) == range(1)  # the first process logs its texts
    shares = Shares(128, slots, processes)
    parts = [shares.of(rank) for rank in range(processes)]
    assert [row for part in parts for row in part] == list(range(128))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert max(map(len, parts)) <= slots


@pytest.mark.parametrize(("processes", "slots"), [(1, 12), (3, 4), (5, 4)])
def test_prompts_lie_in_the_slots_of_their_rows(processes: int, slots: int) -> None:
    shares = Shares(rows=12, slots=slots, processes=processes)  # 4 prompts of 3 samples
    options = {"data_source": range(10), "mini_repeat_count": 3, "batch_size": 4, "seed": 5}
    sampler = RowSampler(shares, 2, lambda: 1, **options)
    drawn = list(sampler)
    assert len(drawn) == len(sampler) == 2 * 2 * slots * processes
    batches = torch.tensor(drawn).view(2, 2, processes, slots)
    assert torch.equal(batches[:, 0], batches[:, 1])  # a rollout has two micro-batches
    rows = batches[:, 0].flatten(1)[:, shares.filled()]
    assert (rows.view(2, 4, 3) == rows.view(2, 4, 3)[:, :, :1]).all()
    assert rows.unique().numel() == 8
    alone = RowSampler(Shares(12, 12, 1), 2, lambda: 1, **options)
    assert torch.equal(rows, torch.tensor(list(alone)).view(2, 2, 12)[:, 0])


# --- rollout


def test_completions_that_end_while_others_are_judged_are_one_batch() -> None:
    begun, all_ended, batches = threading.Event(), threading.Event(), list[list[int]]()

    def ended() -> Iterator[tuple[int, Sample]]:
        for index in reversed(range(6)):
            yield index, Sample([index], [0.0], "stop", "v")
            assert begun.wait(20), "verdicts wait for the whole rollout"
        all_ended.set()

    def judge(batch: list[tuple[int, Sample]]) -> list[float]:
        batches.append([index for index, _ in batch])
        begun.set()
        assert all_ended.wait(20)
        return [10.0 * sample.token_ids[0] for _, sample in batch]

    found, seconds = judged(ended(), judge)
    assert [(sample.token_ids, reward) for sample, reward in found] == [
        ([index], 10.0 * index) for index in range(6)
    ]
    assert batches == [[5], [4, 3, 2, 1, 0]]
    assert seconds >= 0


def test_an_error_of_the_verifier_is_raised() -> None:
    def judge(batch: list[tuple[int, Sample]]) -> list[float]:
        raise ValueError("no verdict")

    with pytest.raises(ValueError, match="no verdict"):
        judged([(0, Sample([1], [0.0], "stop", "v"))], judge)


# --- micro-batches


def make_rows(number: int, teaching: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number + teaching)
    lengths = torch.randint(1, 30, (number,), generator=generator)
    advantages = torch.zeros(number)
    advantages[torch.randperm(number, generator=generator)[:teaching]] = 0.5
    return {
        "prompt_mask": torch.ones(number, 2).long(),
        "completion_mask": (torch.arange(30) < lengths[:, None]).long(),
        "advantages": advantages,
        "mean_reward": torch.rand(number, generator=generator),
        "number": torch.arange(number),
    }


@pytest.mark.parametrize(
    ("processes", "micro", "teaching"), [(1, 1, 24), (1, 4, 17), (2, 3, 24), (7, 2, 9), (5, 1, 0)]
)
def test_every_row_that_teaches_is_in_one_micro_batch(
    processes: int, micro: int, teaching: int
) -> None:
    rows = make_rows(24, teaching)
    parts = torch.randperm(24).chunk(2)
    ranks = [make_micro_batches(rows, parts, micro, processes, rank) for rank in range(processes)]
    for number, part in enumerate(parts):
        trained: list[int] = []
        num_samples = 0.0
        num_tokens = 0.0
        for i in range(number * micro, (number + 1) * micro):
            for batch in (rank[i] for rank in ranks):
                # every process takes part in every backward pass
                assert 0 < len(batch["number"]) <= -(-len(part) // (micro * processes)) + 1
                assert torch.equal(batch["mean_reward"], rows["mean_reward"][part])
                trained += batch["number"][batch["advantages"] != 0].tolist()
                num_samples += batch["num_samples"].item()
                num_tokens += batch["num_tokens"].item()
        assert sorted(trained) == sorted(part[rows["advantages"][part] != 0].tolist())
        assert num_samples == pytest.approx(len(part))
        assert num_tokens == pytest.approx(rows["completion_mask"][part].sum().item())


# --- loss


@pytest.mark.parametrize("max_rows", [1, 4, 6])
def test_logprobs_equal_those_of_single_rows(max_rows: int) -> None:
    """Prompts padded on the left in 9 columns, completions on the right in 14."""
    ids = torch.randint(3, 128, (6, 23), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate([(9, 14), (3, 1), (1, 14), (9, 2), (5, 7), (4, 13)]):
        mask[row, 9 - prompt : 9 + completion] = 1
    ids *= mask
    model = make_tiny_model("llama")
    widths = []

    def score(rows: torch.Tensor, real: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        widths.append(rows.shape[1])
        logits = model(rows, attention_mask=real).logits[:, :-1].log_softmax(-1)
        picked = logits.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        return picked.masked_fill(labels[:, 1:] == -100, 0)

    logprobs = completion_logprobs(score, ids, mask, 14, max_rows)
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == 23
    for row in range(6):
        real = ids[row][mask[row].bool()]
        completion = int(mask[row, 9:].sum())
        single = model(real[None]).logits[0, :-1].log_softmax(-1)
        expected = single.gather(-1, real[1:, None])[-completion:, 0]
        assert (logprobs[row, :completion] - expected).abs().max() < 2e-5
        assert not logprobs[row, completion:].any()
    logprobs.sum().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


# --- Liger's kernels in the frozen layers

LIGER = "liger_kernel.transformers.monkey_patch"


def test_liger_replaces_layers_but_no_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is imitated: it needs a GPU."""
    asked: list[dict[str, object]] = []
    model = make_tiny_model("llama")
    for name in ("liger_kernel", "liger_kernel.transformers", LIGER):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    liger = sys.modules[LIGER]
    monkeypatch.setattr(liger, "MODEL_TYPE_TO_APPLY_LIGER_FN", {"llama": None}, raising=False)

    def call(served: object, **options: object) -> None:
        assert served is model
        asked.append(options)

    monkeypatch.setattr(liger, "_apply_liger_kernel_to_instance", call, raising=False)
    find_liger(model, torch.device("cuda"))(model)
    losses = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    assert asked == [{"rope": True, "rms_norm": True, "swiglu": True, **losses}]
    with pytest.raises(ValueError, match="type qwen3"):
        find_liger(make_tiny_model("qwen3"), torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_liger_gives_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liger_kernel")
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):
        monkeypatch.setattr(modeling, name, getattr(modeling, name))
    model = make_tiny_model("llama").cuda()
    ids = torch.randint(10, (2, 40), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        before = model(input_ids=ids).logits
        find_liger(model, model.device)(model)
        torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-3, atol=1e-3)
