"""torch's fallback past its recompile limit is seen: at small limits on a CPU, and by the memory
that it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlkv.attention.branches import local_attention
from rlkv.benchmarks.check import local_attention as check
from rlkv.benchmarks.check.fallback import compiled_graphs, fallback_refused, is_dense, is_fallback
from rlkv.benchmarks.check.one import Check, Findings, Setting, run_one

CPU = Setting(torch.device("cpu"))


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2):
        yield


def compiled() -> Any:
    """A function that torch compiles for every length again."""
    return torch.compile(lambda x: x * 2, backend="eager", dynamic=False)


def test_a_call_beyond_the_limit_raises_inside_only() -> None:
    double, before = compiled(), compiled_graphs()
    with fallback_refused():
        for length in (4, 5):
            assert double(torch.ones(length)).sum() == 2 * length
        for length in (6, 7):
            with pytest.raises(Exception, match="recompile_limit") as raised:
                double(torch.ones(length))
            assert is_fallback(raised.value)
        double(torch.ones(4))
    assert compiled_graphs() - before == 2
    assert double(torch.ones(6)).sum() == 12  # as torch does it: silently not compiled


def test_a_check_that_falls_back_fails_and_says_so() -> None:
    double = compiled()

    def run(setting: Setting, found: Findings) -> None:
        for length in range(4, 9):
            double(torch.ones(length))

    row = run_one(Check("lengths", "", run), CPU)
    assert row["outcome"] == "fails"
    assert row["reason"].startswith("torch's limit of compiled variants is reached")


def test_the_check_of_local_attention_names_the_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    double = compiled()

    def compiles_for_every_length(query: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():  # these would be variants as well
            double(torch.ones(query.shape[2]))
        return local_attention(query, *args, **kwargs)

    monkeypatch.setattr(check, "local_attention", compiles_for_every_length)
    sizes = replace(check.ON_CPU, lengths=(9, 10, 11), batches=(1,), groups=((4, 2),))
    found = Findings()
    with fallback_refused():
        check.run(CPU, found, sizes)
    assert found.figures["graphs per model"] == 2
    assert found.figures["cases"] == 8  # four modes of two lengths
    assert len(found.problems) == 1
    assert "(4 cases, first grad, T 11, B 1, group 4)" in found.problems[0]


def test_memory_of_dense_scores_is_seen() -> None:
    rows, heads, length, size = 3, 32, 8192, 128
    scores = rows * heads * length * length * 2  # in bfloat16
    outputs = (
        12 * rows * heads * length * size
    )  # outputs and gradients of query, key and value, and some more
    assert is_dense(scores, rows, heads, length)
    assert not is_dense(outputs, rows, heads, length)
    assert not is_dense(10 * scores, rows, heads, 513)  # too short to tell
    found = Findings()
    row = {
        "mode": "grad",
        "length": length,
        "batch": rows,
        "group": 4,
        "kv_heads": 8,
        "error": 0.0,
        "recompiled": 0,
    }
    check.judge({**row, "peak_bytes": scores}, found, CPU)
    assert found.problems == ["grad, T 8192, B 3, group 4: 12.0 GiB, as much as dense scores take"]
    check.judge({**row, "peak_bytes": outputs, "recompiled": 1}, found, CPU)
    assert "compiled again" in found.problems[1]
