"""How rows are shared out for sampling and for the update: nothing lost, nothing twice, whatever
the processes.
"""

from __future__ import annotations

import pytest
import torch

from rlkv.training.config import passes
from rlkv.training.trainer import RowSampler, Shares, make_micro_batches


@pytest.mark.parametrize("processes", [1, 2, 7])
@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_any_number_of_processes_has_slots_for_a_step(processes: int, at_once: int) -> None:
    slots = passes(32, 4, at_once * processes) * at_once
    assert slots * processes % 4 == 0
    assert 0 <= slots * processes - 128 < 4 * at_once * processes
    shares = Shares(128, slots, processes)
    assert [row for rank in range(processes) for row in shares.of(rank)] == list(range(128))
    assert {len(shares.of(rank)) for rank in range(processes)} <= {
        128 // processes,
        128 // processes + 1,
    }
    assert max(len(shares.of(rank)) for rank in range(processes)) <= slots


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


def make_rows(number: int, teaching: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number + teaching)
    lengths = torch.randint(1, 30, (number,), generator=generator)
    advantages = torch.zeros(number)
    advantages[torch.randperm(number, generator=generator)[:teaching]] = 0.5
    completion_mask = (torch.arange(30) < lengths[:, None]).long()
    return {
        "prompt_mask": torch.ones(number, 2).long(),
        "completion_mask": completion_mask,
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
        batches = [batch for rank in ranks for batch in rank[number * micro : (number + 1) * micro]]
        trained = [
            i for batch in batches for i in batch["number"][batch["advantages"] != 0].tolist()
        ]
        assert sorted(trained) == sorted(part[rows["advantages"][part] != 0].tolist())
        assert (
            max(len(batch["number"]) for batch in batches)
            <= -(-len(part) // (micro * processes)) + 1
        )
        assert all(
            len(batch["number"]) for batch in batches
        )  # every process takes part in every backward pass
        assert all(
            torch.equal(batch["mean_reward"], rows["mean_reward"][part]) for batch in batches
        )
        assert sum(batch["num_samples"].item() for batch in batches) == pytest.approx(len(part))
        tokens = rows["completion_mask"][part].sum().item()
        assert sum(batch["num_tokens"].item() for batch in batches) == pytest.approx(tokens)
    for i in range(
        2 * micro
    ):  # ranks work on rows of similar length: none is longer than those of the next step
        longest = [
            rank[i]["completion_mask"].sum(1).max() for rank in ranks if rank[i]["advantages"].any()
        ]
        if i % micro and longest:
            before = [
                rank[i - 1]["completion_mask"].sum(1).min()
                for rank in ranks
                if rank[i - 1]["advantages"].any()
            ]
            assert max(longest) <= min(before)
