"""R-KV's search for similar keys: its memory, and its look in integers of 8 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlkv.eviction import base, rkv
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.naive_eviction import random_entries


@pytest.mark.parametrize("floats", [2**14, 2**16])
def test_temporary_tensors_stay_within_the_limit(
    floats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None grows with N x N, nor with B x H x N beyond the scores themselves."""
    monkeypatch.setattr(base, "FLOATS", floats)
    rows, n = 2, 500
    # one query head per KV head: nothing is copied to group them
    keys, queries = random_entries(rows, n, 1, n, seed=0)
    valid = torch.ones(rows, n, dtype=torch.bool)
    calls = [
        lambda: rkv.redundancy(keys, valid, 0.5, 2, "published"),
        lambda: rkv.importance(keys, queries, valid, 8, 7, "paper"),
        lambda: base.attention_received(keys, queries, valid),
    ]
    for call in calls:
        with LiveBytes([keys, queries, valid]) as live:
            call()
        assert floats / 4 < live.largest <= max(floats, rows * 3 * n)
        assert live.largest < n * n


def test_a_look_in_8_bits_misses_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random keys a few are similar by less than 8 bits can tell."""
    torch.manual_seed(0)
    keys = torch.randn(2, 500, 256)
    keys /= keys.norm(dim=-1, keepdim=True)
    # one in a tile: all pairs of one with many are computed
    early = slice(0, 200, 20)
    late = slice(300, 500, 20)
    other = keys[:, late] - (keys[:, late] * keys[:, early]).sum(-1, keepdim=True) * keys[:, early]
    keys[:, late] = 0.5001 * keys[:, early] + (1 - 0.5001**2) ** 0.5 * other / other.norm(
        dim=-1, keepdim=True
    )
    exact, looked, blind = look_with(monkeypatch, keys, 0.5)
    assert exact[1].sum() == 2 * 20
    assert torch.allclose(exact[0], looked[0], rtol=0, atol=1e-6)  # of sums in another order
    assert exact[1].equal(looked[1])
    assert blind[1].sum() < exact[1].sum()


def test_a_look_in_8_bits_knows_its_worst_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """All coordinates but one of two equal keys are rounded down, by half a step."""
    torch.manual_seed(0)
    keys = torch.randn(1, 300, 401)
    keys[:, 5] = keys[:, 200] = 3.499 / 127
    keys[:, 5, 0] = keys[:, 200, 0] = 1
    keys /= keys.norm(dim=-1, keepdim=True)
    exact, looked, blind = look_with(monkeypatch, keys, 0.999)
    assert exact[1].sum() == looked[1].sum() == 2
    assert blind[1].sum() == 0


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.8])
def test_a_look_in_8_bits_finds_the_latest(
    threshold: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    keys = torch.randn(3, 300, 24)
    keys[2, 40:] = keys[2, :260] + 0.3 * torch.randn(260, 24)
    keys /= keys.norm(dim=-1, keepdim=True)
    keys[0, :20] = 0  # padding
    exact, looked, _ = look_with(monkeypatch, keys, threshold, count)
    assert 0 < exact[1].sum() < exact[1].numel() * count
    assert exact[1].equal(looked[1])
    assert torch.allclose(exact[0], looked[0], rtol=0, atol=1e-6)


def look_with(
    monkeypatch: pytest.MonkeyPatch, keys: torch.Tensor, threshold: float, count: int = 1
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Found always in float32, after a look in 8 bits, and with a look that is taken for exact."""
    found, valid = [], keys.norm(dim=-1) > 0
    codes_of, step_L = rkv._Codes.of, keys.abs().amax(dim=(1, 2)) / 127

    def exactly(unit: torch.Tensor, threshold: float) -> Any:
        return codes_of(unit, threshold)._replace(limits=(threshold / step_L.square()).tolist())

    for has_codes, of in ((False, codes_of), (True, codes_of), (True, exactly)):
        monkeypatch.setattr(rkv, "cpu_has_any", lambda *names, has=has_codes: has)
        monkeypatch.setattr(rkv._Codes, "of", of)
        found.append(rkv.latest_similar(keys, valid, threshold, count))
    return found
