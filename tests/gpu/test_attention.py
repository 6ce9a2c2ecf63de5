"""Part 2: mixed attention in a model, and its local branch: on a GPU FlexAttention.

Shapes: B rows, T tokens, H KV heads, G query heads per KV head, D size of a head.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from rlkv.attention.branches import local_attention
from rlkv.attention.call import MixedCall
from rlkv.attention.head_gate import HeadGateConfig, set_gates
from rlkv.attention.softmax import Softmax
from rlkv.benchmarks.turns import relative_error, timed
from rlkv.cache.reallocation import full_cache
from rlkv.rollout.footprint import free_memory
from tests.gpu.conftest import SINK, WINDOW, Record, Twins
from tests.helpers.mixed_reference import local_mask

EXACT_UP_TO = 1024  # tokens with a float64 reference; beyond it float32, which all GPUs are fast at
# tokens from which T x T scores are much larger than all that a fused kernel holds
DENSE_FROM = 2048
MODES = ("grad", "no grad", "inference", "checkpointed")
# a window of 255 instead of 256 makes 0.023, 127 sinks instead of 128 0.017; rounding made 0.004 in
# bfloat16 and 3e-7 in float32 (banded form, T = 700)
TOLERANCE = {torch.bfloat16: 0.01, torch.float32: 1e-5}


def gated(model: Any, alpha_LH: Tensor) -> Any:
    """Return a copy of the model with gates ``[layers, KV heads]``."""
    copied = get_peft_model(copy.deepcopy(model), HeadGateConfig(sink=SINK, window=WINDOW)).eval()
    set_gates(copied, alpha_LH)
    return copied


def visible_keys(real_BT: Tensor, sink: int, window: int) -> Tensor:
    """Return what each query sees: bool ``[B, T, T]``; a padding query sees itself."""
    itself = torch.eye(real_BT.shape[1], dtype=torch.bool, device=real_BT.device)
    return local_mask(real_BT, sink, window) | itself


@pytest.mark.parametrize("gates", ["1", "0", "between"])
def test_mixed_attention_equals_float64(gates: str, twins: Twins, record_property: Record) -> None:
    shape = (twins.sizes.layers, twins.sizes.kv_heads)
    between = torch.rand(shape, generator=torch.Generator().manual_seed(2))
    alpha = {"1": torch.ones(shape), "0": torch.zeros(shape), "between": between}[gates]
    own = gated(twins.own, alpha)
    for texts in twins.texts:
        if gates == "1":
            wanted = texts.read_at_once(twins.exact)
        elif gates == "0":
            seen = visible_keys(texts.real, SINK, WINDOW)
            wanted = texts.read_at_once(twins.exact, seen[:, None])
        else:
            wanted = texts.read_at_once(gated(twins.exact, alpha))
        allowed = twins.allowed(texts)
        at_once = texts.error(texts.read_at_once(own), wanted)
        cache = full_cache(own.config, texts.ids.shape[1])
        by_tokens = texts.error(texts.read_by_tokens(own, cache), wanted)
        rows = f"{len(texts.ids)} rows"
        record_property(rows, {"at once": at_once, "by tokens": by_tokens, "allowed": allowed})
        assert max(at_once, by_tokens) <= allowed, rows


# --- the local branch alone


@dataclass(frozen=True)
class Sizes:
    """Sizes that all cases have, and the lengths and batches of which every pair is one."""

    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    head_dim: int
    sink: int
    window: int


ON_GPU = Sizes((50, 127, 128, 129, 513, 3001, 8192), (1, 3, 16), 128, 128, 256)
ON_CPU = Sizes((50, 300), (1, 3), 16, 16, 32)


@dataclass(frozen=True)
class Case:
    """One shape; three rows are padded on the left, sixteen on the right."""

    length: int
    batch: int
    group: int
    kv_heads: int
    sizes: Sizes

    def padding(self, device: torch.device) -> Tensor:
        """Return bool ``[B, T]``, True for real tokens; the first row has no padding."""
        order = torch.arange(self.length, device=device)
        shift = torch.arange(self.batch, device=device)[:, None]
        return order >= 5 * shift if self.batch < 4 else order < self.length - shift

    def states(self, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
        """Return query ``[B, H * G, T, D]``, key and value ``[B, H, T, D]``, and output weights."""
        torch.manual_seed(0)
        queries = (self.batch, self.kv_heads * self.group, self.length, self.sizes.head_dim)
        keys = (self.batch, self.kv_heads, self.length, self.sizes.head_dim)
        shapes = (queries, keys, keys, queries)
        *states, weight = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
        return states, weight * self.padding(device)[:, None, :, None]

    def needed_bytes(self, itemsize: int) -> int:
        """Return about the memory that states and reference take; a block mask is small."""
        heads = self.kv_heads * self.group
        states = 8 * self.batch * heads * self.length * self.sizes.head_dim * itemsize
        return states + 20 * self.group * self.length**2

    def attend(
        self, mode: str, states: list[Tensor], weight: Tensor, call: MixedCall
    ) -> list[Tensor]:
        """Return the output and, in modes with gradients, those of query, key and value."""
        branch = partial(
            local_attention,
            call=call,
            sink=self.sizes.sink,
            window=self.sizes.window,
            softmax=Softmax(self.sizes.head_dim**-0.5),
        )
        if mode == "no grad":
            with torch.no_grad():
                return [branch(*states)]
        if mode == "inference":
            with torch.inference_mode():
                return [branch(*states)]
        inputs = [state.detach().requires_grad_() for state in states]
        if mode == "checkpointed":
            out: Any = checkpoint(branch, *inputs, use_reentrant=False)
        else:
            out = branch(*inputs)
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]

    def wanted(self, states: list[Tensor], weight: Tensor, row: int) -> list[Tensor]:
        """Return what ``attend`` should give for a row, by an explicit mask, head by head."""
        wide = torch.float64 if self.length <= EXACT_UP_TO else torch.float32
        real = self.padding(weight.device)[row : row + 1]
        (visible,) = visible_keys(real, self.sizes.sink, self.sizes.window)
        heads = []
        for head in range(self.kv_heads):
            own = slice(head * self.group, (head + 1) * self.group)
            parts = (states[0][row, own], states[1][row, head], states[2][row, head])
            query, key, value = (part.detach().to(wide).requires_grad_() for part in parts)
            scores = query @ key.T * self.sizes.head_dim**-0.5
            out = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value
            total = (out * weight[row, own].to(wide)).sum()
            heads.append([out.detach(), *torch.autograd.grad(total, (query, key, value))])
        out, query, key, value = (torch.stack(tensors) for tensors in zip(*heads, strict=True))
        return [out.flatten(0, 1), query.flatten(0, 1), key, value]


def compiled_graphs() -> int:
    """Return the number of graphs that torch has compiled in this process."""
    return counters["stats"]["unique_graphs"]


def peak_of(work: Callable[[], Any], device: torch.device) -> tuple[float, int]:
    """Return the seconds of ``work()``, and the bytes that it held in addition; 0 on a CPU."""
    if device.type != "cuda":
        return timed(work, device)[0], 0
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    seconds, _ = timed(work, device)
    return seconds, torch.cuda.max_memory_allocated(device) - before


def is_dense(peak_bytes: int, rows: int, query_heads: int, length: int) -> bool:
    """Return whether attention held a byte or more for each score.

    Dense attention needs at least 2; a fused kernel about ``12 * size of a head / length`` for
    outputs and gradients.
    """
    return length >= DENSE_FROM and peak_bytes > rows * query_heads * length**2


def run_case(case: Case, mode: str, tensors: Any, device: torch.device) -> dict[str, Any]:
    """Return the errors, time and memory of a case, and assert what does not depend on them."""
    states, weight, wanted = tensors
    real = case.padding(device)

    def new_call() -> MixedCall:
        return MixedCall(case.batch, case.length, case.length, 0, real, True, lambda: None)

    before = compiled_graphs()
    found = case.attend(mode, states, weight, new_call())
    once = compiled_graphs()
    error = 0.0
    for row, expected in wanted.items():
        for own, other in zip(found, expected, strict=False):  # no gradients in some modes
            seen = real[row]
            error = max(error, relative_error(own[row][:, seen], other[:, seen]))
    del found
    call = new_call()
    work = partial(case.attend, mode, states, weight, call)
    seconds, mask_bytes = peak_of(work, device)  # makes the block mask, too
    _, peak_bytes = peak_of(work, device)
    heads = case.group * case.kv_heads
    return {
        **asdict(case),
        "mode": mode,
        "error": error,
        "seconds": seconds,
        "compiled": once - before,
        "recompiled": compiled_graphs() - once,
        "peak_bytes": peak_bytes,
        "mask_bytes": mask_bytes,
        "dense": is_dense(peak_bytes, case.batch, heads, case.length),
    }


# the groups of Llama-8B and Qwen-7B: on a CPU fewer heads
@pytest.mark.parametrize(("group", "kv_heads"), [(4, 8), (7, 4)])
def test_the_local_branch_equals_an_explicit_mask(
    group: int,
    kv_heads: int,
    device: torch.device,
    dtype: torch.dtype,
    on_gpu: bool,
    record_property: Record,
) -> None:
    sizes = ON_GPU if on_gpu else ON_CPU
    kv_heads = kv_heads if on_gpu else 1
    start = compiled_graphs()
    rows: list[dict[str, Any]] = []
    left_out = []
    # one process serves all shapes of a model: nothing is reset between cases
    for length, batch in product(sizes.lengths, sizes.batches):
        case = Case(length, batch, group, kv_heads, sizes)
        free = free_memory(device)
        if free is not None and case.needed_bytes(dtype.itemsize) > 0.8 * free:
            left_out.append(f"T {length}, B {batch}")
            continue
        states, weight = case.states(device, dtype)
        wanted = {row: case.wanted(states, weight, row) for row in {0, batch - 1}}
        for mode in MODES:
            rows.append(run_case(case, mode, (states, weight, wanted), device))
    record_property("cases", rows)
    record_property("left out for memory", left_out)
    record_property("graphs", compiled_graphs() - start)
    assert rows
    for row in rows:
        name = "{mode}, T {length}, B {batch}".format(**row)
        assert row["error"] < TOLERANCE[dtype], name
        assert not row["recompiled"], f"{name}: compiled again for a shape that it had just run"
        assert not row["dense"], f"{name}: {row['peak_bytes']:,} bytes, as dense scores take"


# --- the checks find what they look for


@pytest.fixture
def two_variants() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=2):
        yield


def test_a_call_past_the_limit_of_variants_is_an_error(two_variants: None) -> None:
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    before = compiled_graphs()
    for length in (4, 5):
        double(torch.ones(length))
    with pytest.raises(FailOnRecompileLimitHit):
        double(torch.ones(6))
    assert compiled_graphs() - before == 2


def test_memory_of_dense_scores_is_seen() -> None:
    rows, heads, length, size = 3, 32, 8192, 128
    scores = rows * heads * length * length * 2  # in bfloat16
    outputs = 12 * rows * heads * length * size  # and gradients
    assert is_dense(scores, rows, heads, length)
    assert not is_dense(outputs, rows, heads, length)
    assert not is_dense(10 * scores, rows, heads, 513)  # too short to tell
