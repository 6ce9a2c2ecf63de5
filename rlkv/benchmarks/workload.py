"""What the serving benchmark runs: requests of fixed lengths, pools of equal bytes, and what to
expect of them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from rlkv.benchmarks.common import LlamaSizes, at_least
from rlkv.eviction import EvictionPolicy, make_policy
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.loading import DTYPES
from rlkv.models.shape import ModelShape
from rlkv.vllm.packing import BlockDemand, BufferDemand, SinkWindowDemand, plan_packing

LIMITED, ROOMY = "memory-limited", "not limited"
SETTINGS = (LIMITED, ROOMY)
PERCENTILES = (50, 90, 99)  # of the times of requests


@dataclass(frozen=True, kw_only=True)
class Workload(LlamaSizes):
    """The same requests for every mode; the default model is for 2 cores."""

    layers: int = 2
    hidden: int = 1024
    intermediate: int = 2816
    vocabulary: int = 2048
    dtype: str = "float32"
    """float32, bfloat16 or float16."""
    requests: int = 48
    """Requests, all at once."""
    prompt_tokens: tuple[int, int] = (32, 64)
    """Shortest and longest prompt; lengths are uniform between them."""
    mean_output: int = 320
    """Mean output length, of a clipped lognormal distribution."""
    max_output: int = 900
    """Longest output."""
    spread: float = 0.6
    """Standard deviation of the logarithm of an output length."""
    sink: int = 4
    """First tokens that compressible heads keep without an eviction policy."""
    window: int = 28
    """Last tokens that they keep."""
    budget: int = 64
    """Entries that an eviction keeps."""
    buffer: int = 32
    """Entries between two evictions."""
    rows: int = 64
    """Requests that may run at once where memory is the limit."""
    roomy_rows: int = 8
    """Requests that may run at once where it is not."""
    pool_tokens: int = 2048
    """Full-cache tokens in the limited pool."""
    block_size: int = 32
    """Tokens in a block."""
    step_tokens: int = 128
    """Most tokens that the engine reads in one step."""
    eager: bool = True
    """Whether the engine runs without compilation and CUDA graphs."""
    seed: int = 0
    """Of the prompts, output lengths and random gates."""

    def check(self) -> None:
        """Raise ValueError for impossible settings."""
        low, high = self.prompt_tokens
        if not 1 <= low <= high:
            raise ValueError(
                f"--prompt-tokens {low} {high}: give the shortest and the longest prompt"
            )
        if not 1 <= self.mean_output < self.max_output:
            raise ValueError(
                f"--mean-output is {self.mean_output}: it must be at least 1 and below "
                f"--max-output, {self.max_output}"
            )
        if self.pool_tokens < self.positions:
            raise ValueError(
                f"--pool-tokens is {self.pool_tokens}: the pool must hold one request of "
                f"{self.positions} tokens"
            )
        at_least(0, sink=self.sink)
        at_least(1, window=self.window, requests=self.requests, block_size=self.block_size)
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype}: choose one of {', '.join(DTYPES)}")

    def policy(self, eviction: str | None) -> EvictionPolicy | None:
        """The policy of this name; None: sinks and window."""
        return (
            None
            if eviction is None
            else make_policy(eviction, budget=self.budget, buffer=self.buffer)
        )

    def demand(self, eviction: str | None) -> BlockDemand:
        """Blocks that requests take."""
        policy = self.policy(eviction)
        if policy is None:
            return SinkWindowDemand(self.block_size, self.sink, self.window)
        return BufferDemand.of(policy, self.block_size, self.query_heads // self.kv_heads)

    def kept(self, eviction: str | None) -> int:
        """Entries for which a compressible head needs room."""
        return self.sink + self.window if eviction is None else self.budget + self.buffer

    @property
    def positions(self) -> int:
        """Tokens of the longest request."""
        return self.prompt_tokens[1] + self.max_output

    @property
    def bytes_per_token(self) -> int:
        """Of the full cache: keys and values of all heads."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPES[self.dtype].itemsize

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Random token ids, the same in every process."""
        draws = torch.Generator().manual_seed(self.seed)
        low, high = self.prompt_tokens
        lengths = torch.randint(low, high + 1, (self.requests,), generator=draws).tolist()
        return [torch.randint(3, self.vocabulary, (n,), generator=draws).tolist() for n in lengths]

    @cached_property
    def output_lengths(self) -> list[int]:
        """Lognormal draws, clipped to ``1 .. max_output``, with a median that makes their mean
        ``mean_output``.
        """
        draws = torch.Generator().manual_seed(self.seed + 1)
        factors = (
            self.spread * torch.randn(self.requests, generator=draws, dtype=torch.float64)
        ).exp()

        def lengths(median: float) -> torch.Tensor:
            return (median * factors).round().clamp(1, self.max_output)

        low, high = 0.0, float(self.max_output) / float(factors.min())
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (
                (middle, high)
                if float(lengths(middle).mean()) < self.mean_output
                else (low, middle)
            )
        return [int(length) for length in lengths(high)]

    @cached_property
    def mean_length(self) -> float:
        """Tokens of a request, prompt and output together."""
        return (sum(map(len, self.prompts)) + sum(self.output_lengths)) / self.requests

    def pool_bytes(self, setting: str) -> int:
        """The same for every mode: whole blocks of the full cache, and the one that the engine sets
        aside.
        """
        blocks = -(-self.pool_tokens // self.block_size)
        if (
            setting == ROOMY
        ):  # the longest requests at once, and a tenth more for what packing leaves empty
            blocks = math.ceil(1.1 * self.roomy_rows * (-(-self.positions // self.block_size) + 1))
        return (blocks + 1) * self.block_size * self.bytes_per_token

    def rows_of(self, setting: str) -> int:
        return self.roomy_rows if setting == ROOMY else self.rows

    def random_gates(self) -> HeadGates:
        """Gates that nothing was trained for: time and memory do not depend on which heads are
        full.
        """
        alpha = torch.rand(
            self.layers, self.kv_heads, generator=torch.Generator().manual_seed(self.seed)
        )
        shape = ModelShape("", "llama", self.layers, self.kv_heads, self.query_heads, self.head_dim)
        return HeadGates(alpha, model=shape, deploy_sink=self.sink, deploy_window=self.window)

    def to_dict(self) -> dict[str, Any]:
        """The fields of the workload alone, without those of subclasses."""
        names = {field.name for field in fields(Workload)}
        return {name: value for name, value in asdict(self).items() if name in names}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Workload:
        low, high = values["prompt_tokens"]
        return Workload(**{**values, "prompt_tokens": (low, high)})


def theoretical_speedup(sparsity: float, kept: int, length: float) -> float:
    """``1 / ((1 - s) + s * kept / L)``: requests that fit more, if a request always had its mean
    length ``L``.
    """
    return 1 / (1 - sparsity + sparsity * min(kept, length) / length)


def expect(
    work: Workload, gates: HeadGates, sparsity: float, eviction: str | None = None
) -> dict[str, float]:
    """What ``sparsity`` should bring where memory is the limit, from lengths alone; ``eviction``:
    name of a policy.

    ``by_blocks``: bytes times tokens that requests hold over their lives, full cache over this
    allocation.
    """
    allocation = HeadAllocation.from_gates(gates, sparsity)
    plan = plan_packing(allocation.full, work.demand(eviction), round(work.mean_length))
    theory = theoretical_speedup(allocation.sparsity, work.kept(eviction), work.mean_length)
    held, full = (
        [0, *accumulate(map(count, range(1, work.positions + 1)))]
        for count in (plan.held, plan.uncompressed)
    )  # running sums over the length of a text
    spans = [(len(p), len(p) + n) for p, n in zip(work.prompts, work.output_lengths, strict=True)]
    gain = sum(full[end] - full[start] for start, end in spans) / sum(
        held[end] - held[start] for start, end in spans
    )
    return {"sparsity": allocation.sparsity, "theory": theory, "by_blocks": gain}
