"""Log-probabilities of a padded batch against those of its rows one by one."""

from __future__ import annotations

import pytest
import torch

from rlkv.training.trainer import completion_logprobs, shift_left
from tests.helpers.models import make_tiny_model


def make_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts padded on the left in 9 columns, completions on the right in 14."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 128, (6, 23), generator=generator)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate([(9, 14), (3, 1), (1, 14), (9, 2), (5, 7), (4, 13)]):
        mask[row, 9 - prompt : 9 + completion] = 1
    return ids * mask, mask


def test_shifting_moves_the_padding_only() -> None:
    ids, mask = make_rows()
    shifted, offset = shift_left(ids, mask)
    for row in range(6):
        real = ids[row][mask[row].bool()]
        assert torch.equal(shifted[row, : len(real)], real)
        assert offset[row] == mask[row].int().argmax()


@pytest.mark.parametrize("max_rows", [1, 4, 6])
def test_logprobs_equal_those_of_single_rows(max_rows: int) -> None:
    model = make_tiny_model("llama")
    ids, mask = make_rows()
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
