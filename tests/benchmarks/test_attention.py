"""The attention benchmark at a small size: bytes, agreement, and what has no speed-up or no
figures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.benchmarks import attention
from rlkv.benchmarks.attention import AttentionConfig, Layer, measure_attention
from rlkv.cache import HeadReallocationCache

SMALL: dict[str, Any] = {
    "query_heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "sink": 2,
    "window": 6,
    "device": "cpu",
}
CONFIG = AttentionConfig(batches=(1, 3), lengths=(40,), rounds=2, steps=3, **SMALL)


@pytest.mark.parametrize("served", [False, True])
def test_rows_have_the_bytes_of_their_heads_and_a_speedup(
    served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "kernel_serves", lambda config: served)
    rows = measure_attention(CONFIG)
    names = ["sparsity 0", "sparsity 0.5", "sparsity 0.9"]
    names = ["torch, full cache", *names, *(f"{name}, kernel" for name in names if served)]
    assert [(row["batch"], row["attention"]) for row in rows] == [
        (batch, name) for batch in (1, 3) for name in names
    ]
    for row in rows:
        full_heads = {"sparsity 0.5": 1, "sparsity 0.9": 0}.get(
            row["attention"].removesuffix(", kernel"), 2
        )
        entry = 2 * row["batch"] * 8 * 4
        assert row["kv_bytes"] == entry * (full_heads * 40 + (2 - full_heads) * 8)
        assert row["gigabytes_per_second"] == pytest.approx(
            row["kv_bytes"] / row["microseconds"] / 1000
        )
        assert 0 <= row["error"] < 1e-5
        assert row["speedup"] > 0


def test_a_wrong_output_has_no_speedup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        attention, "HeadReallocationCache", lambda full, s, w: HeadReallocationCache(full, s, w - 1)
    )
    by_name = {row["attention"]: row for row in measure_attention(CONFIG)}
    assert "speedup" in by_name["sparsity 0"]
    for name in ("sparsity 0.5", "sparsity 0.9"):
        assert "speedup" not in by_name[name]
        assert by_name[name]["note"].startswith("wrong output: relative error ")


def test_what_does_not_fit_is_noted_and_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stock(self: Layer) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Layer, "stock", stock)
    theirs, ours, *_ = measure_attention(CONFIG)
    assert (theirs["note"], "microseconds" in theirs) == ("out of memory", False)
    assert ours["microseconds"] > 0
    assert "speedup" not in ours


def test_files_are_written(tmp_path: Path) -> None:
    AttentionConfig(
        batches=(1,), lengths=(40,), rounds=1, steps=2, output_dir=tmp_path, **SMALL
    ).run()
    assert {file.name for file in tmp_path.iterdir()} == {
        "attention.json",
        "attention.md",
        "attention.png",
    }
    assert (
        "attention of 4 query heads, 2 KV heads of 8, float32"
        in (tmp_path / "attention.md").read_text()
    )


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="--query-heads 5 must be a multiple of --kv-heads 2"):
        AttentionConfig(**{**SMALL, "query_heads": 5}).check()
    with pytest.raises(ValueError, match="--lengths 0"):
        AttentionConfig(lengths=(0,)).check()
    with pytest.raises(ValueError, match="--window 0"):
        AttentionConfig(window=0).check()
