"""Texts of a model under an allocation, whose rows end, leave and join, with and without graphs.

    TRITON_INTERPRET=1 RLKV_DECODE_GRAPH=1 python -m tests.helpers.graphed

decodes on a CPU, through the Triton interpreter.  The same forward call, with the Python numbers of
its recording, stands in for a graph.  It prints a line for each way of decoding: ``texts``, whether
they are those of plain torch, how many graphs were recorded, and how many tokens a graph read.  The
last line is of a model of which no graph can be made: ``refused``, whether the texts are those of
plain torch, how often a graph was tried, and the warning.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rlkv.cache.layer as layer_module
from rlkv.attention import LocalSizes, mixed
from rlkv.cache import CacheSettings
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.engine import InferenceEngine
from rlkv.rollout import graphed
from rlkv.rollout.base import Completion, Rows, Sample, SamplingParams
from rlkv.rollout.hf import GatedHFEngine, HFEngine
from rlkv.utils.runtime import GRAPH
from tests.helpers.cached_logits import MIXED
from tests.helpers.models import build_tokenizer, make_tiny_model

AHEAD = 7  # tokens, so that graphs end before the texts do
PROMPTS = [
    "a=7 . b=2 . c = b + a . find c ?",
    "a=3 . find a ?",
    "b=1 . a=7 . c = a + b . d = c + a . find d ?",
    "a=5 .",
]
WAYS: list[dict[str, Any]] = [
    {"heads": MIXED[:2], "temperature": 1.0},
    {"heads": MIXED[:2], "temperature": 0.0, "protect_prompt": True},
    {"heads": torch.zeros_like(MIXED[:2]), "temperature": 1.0},
]


def decode_texts(way: dict[str, Any], device: str, tokens: int = 24) -> list[list[int]]:
    """Token ids, at most ``tokens`` each, of more prompts than rows of a batch."""
    model = make_tiny_model("llama", num_hidden_layers=2, vocab_size=340).to(device)
    settings = CacheSettings(sink=2, window=5, protect_prompt=way.get("protect_prompt", False))
    allocation = HeadAllocation(way["heads"])
    engine = InferenceEngine(model, build_tokenizer(), allocation, settings, batch_size=3)
    engine.eos_ids = list(range(0, 340, 40))  # of random tokens: rows end at different times
    sampling = SamplingParams(tokens, temperature=way["temperature"], seed=1)
    return [completion.token_ids for completion in engine.generate(PROMPTS, sampling)]


ENDS = [40, 300]  # of random tokens: rows end at different times
SAMPLED = SamplingParams(64, temperature=1.0, seed=1)


def sample_gated(device: str) -> list[Sample]:
    """Sample from a model under gates between 0 and 1, and at both."""
    model = make_tiny_model("llama", num_hidden_layers=2, vocab_size=340).to(device)
    engine = GatedHFEngine(model, LocalSizes(sink=2, window=5), pad_id=0, max_rows=3)
    gates = engine.gates()
    engine.set_gates(torch.linspace(0, 1, gates.numel()).view_as(gates))
    prompts = build_tokenizer()(PROMPTS).input_ids
    found = dict(engine.sample(Rows(prompts, [3, 1, 0, 2], 0), SAMPLED, ENDS))
    return [found[index] for index in range(len(PROMPTS))]


def sample_plain(device: str) -> list[Completion]:
    """Sample from a model without gates, with the full cache."""
    model = make_tiny_model("llama", num_hidden_layers=2, vocab_size=340).to(device)
    engine = HFEngine(model, build_tokenizer(), batch_size=3)
    engine.eos_ids = ENDS
    return engine.generate(PROMPTS, SAMPLED)


WAITS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.lift_fresh.default,
}


class NoWait(TorchDispatchMode):
    """Refuses what would wait for a GPU, or copy to it, which cannot be captured."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function not in WAITS, f"a captured step calls {function}"
        given = kwargs or {}
        with self:  # inference mode shows composite functions as a whole
            found = function.decompose(*args, **given)
        return function(*args, **given) if found is NotImplemented else found


class Standin:
    """Counts recordings and replays."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def record(
        self, forward: Callable[[], Tensor], device: torch.device
    ) -> tuple[Callable[[], None], Tensor]:
        self.recorded += 1
        step: Any = forward.__self__  # type: ignore[attr-defined]
        columns = step._columns
        with NoWait():
            result = forward()
        step._place -= 1  # recording computes nothing

        def replay() -> None:
            self.replayed += 1
            now = step._columns
            step._columns = columns
            step.settle()
            with step._recording():
                result.copy_(forward())
            step._columns = now

        return replay, result

    def fail_once(self, forward: Callable[[], Tensor], device: torch.device) -> Any:
        """As a model for which memory ends in its first capture, which then cannot end."""
        if self.recorded:
            return self.record(forward, device)
        self.recorded += 1
        try:
            raise torch.OutOfMemoryError
        except torch.OutOfMemoryError:
            raise RuntimeError("capture invalidated")  # noqa: B904

    def fail(self, forward: Callable[[], Tensor], device: torch.device) -> Any:
        """As a model that waits: its error, and that of the capture which then cannot end."""
        self.recorded += 1
        try:
            raise RuntimeError("it waits")
        except RuntimeError:
            forward()
            raise RuntimeError("capture invalidated")  # noqa: B904


@contextmanager
def kernel(on: bool) -> Any:
    """Tokens that come one at a time go through the kernel, or not, whatever the device."""
    serves = mock.patch.object(
        layer_module, "serves", lambda query, key, value: on and key.shape[2] == 1
    )
    with serves:
        yield


@contextmanager
def recorded(record: Callable[..., Any]) -> Any:
    """Full caches on a CPU are decoded by graphs, too, with ``record`` to make them."""
    with (
        mock.patch.dict(os.environ, {GRAPH: "1"}),
        mock.patch.object(graphed, "record_graph", record),
        mock.patch.object(graphed, "AHEAD", AHEAD),
        mock.patch.object(graphed, "_takes_places", return_value=True),
        mock.patch.object(mixed, "_is_mask", return_value=False),
    ):
        yield


def decoded(way: dict[str, Any], record: Callable[..., Any], tokens: int = 24) -> list[list[int]]:
    """Texts by the kernel, with ``record`` in the place of what records graphs."""
    from rlkv.kernels import decode

    with (
        kernel(True),
        mock.patch.object(decode, "_processors", return_value=24),
        mock.patch.object(graphed, "record_graph", record),
        mock.patch.object(graphed, "AHEAD", AHEAD),
    ):
        return decode_texts(way, "cpu", tokens)


def main() -> None:
    torch.set_num_threads(1)
    for way in WAYS:
        with kernel(False):
            expected = decode_texts(way, "cpu")
        standin = Standin()
        print("texts", decoded(way, standin.record) == expected, standin.recorded, standin.replayed)
    standin = Standin()
    with warnings.catch_warnings(record=True) as caught:
        equal = decoded(way, standin.fail, tokens=10) == [ids[:10] for ids in expected]
    print("refused", equal, standin.recorded, *(warning.message for warning in caught))


if __name__ == "__main__":
    main()
