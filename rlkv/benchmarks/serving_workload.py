"""What the serving benchmark runs: shapes, requests of fixed lengths, pools of equal bytes, and what to expect."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from rlkv.eviction import EvictionPolicy, make_policy
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from rlkv.vllm.blocks.demand import BlockDemand, BufferDemand, SinkWindowDemand
from rlkv.vllm.blocks.packing import PackingPlan, plan_packing

LIMITED, ROOMY = "memory-limited", "not limited"
SETTINGS = (LIMITED, ROOMY)


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama with random weights."""

    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def config(self, positions: int) -> dict[str, Any]:
        """A transformers config for texts of up to ``positions`` tokens."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": positions,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


@dataclass(frozen=True)
class Workload:
    """One benchmark: the same requests for every mode.

    Attributes:
        prompt_tokens: shortest and longest prompt; lengths are uniform between them.
        mean_output, max_output: of the output lengths, a clipped lognormal (:meth:`output_lengths`).
        spread: standard deviation of the logarithm of an output length.
        budget, buffer: entries that a compressible head keeps at a compaction, and that gather before the next one, in
            modes with an eviction policy; the others keep ``sink`` and ``window``.
        rows: requests that may run at once where memory is the limit; ``roomy_rows``: where it is not.
        pool_tokens: tokens of the full cache that the limited pool holds.
        step_tokens: tokens that the engine reads in one step at most.
    """

    shape: LlamaShape
    dtype: str = "float32"
    requests: int = 48
    prompt_tokens: tuple[int, int] = (32, 64)
    mean_output: int = 320
    max_output: int = 900
    spread: float = 0.6
    sink: int = 4
    window: int = 28
    budget: int = 64
    buffer: int = 32
    rows: int = 64
    roomy_rows: int = 8
    pool_tokens: int = 2048
    block_size: int = 32
    step_tokens: int = 128
    eager: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_tokens[0] <= self.prompt_tokens[1]:
            raise ValueError(f"prompts of {self.prompt_tokens[0]} to {self.prompt_tokens[1]} tokens: no such range")
        if not 1 <= self.mean_output < self.max_output:
            raise ValueError(
                f"a mean output of {self.mean_output} tokens needs to be at least 1 and below the longest one of "
                f"{self.max_output}: change --mean-output or --max-output"
            )
        if self.pool_tokens < self.positions:
            raise ValueError(
                f"a pool of {self.pool_tokens} tokens is smaller than one request of {self.positions} tokens: "
                "raise --pool-tokens"
            )
        if self.window < 1 or self.sink < 0:
            raise ValueError(f"a sink of {self.sink} and a window of {self.window} tokens: they start at 0 and 1")

    def policy(self, eviction: str | None) -> EvictionPolicy | None:
        """The policy of this name; None: sinks and window."""
        return None if eviction is None else make_policy(eviction, budget=self.budget, buffer=self.buffer)

    def demand(self, eviction: str | None) -> BlockDemand:
        """Blocks that requests take."""
        policy = self.policy(eviction)
        if policy is None:
            return SinkWindowDemand(self.block_size, self.sink, self.window)
        return BufferDemand.of(policy, self.block_size, self.shape.query_heads // self.shape.kv_heads)

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
        element: int = getattr(torch, self.dtype).itemsize
        return 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim * element

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Random token ids, the same in every process."""
        draws = torch.Generator().manual_seed(self.seed)
        low, high = self.prompt_tokens
        lengths = torch.randint(low, high + 1, (self.requests,), generator=draws).tolist()
        return [torch.randint(3, self.shape.vocabulary, (n,), generator=draws).tolist() for n in lengths]

    @cached_property
    def output_lengths(self) -> list[int]:
        """Lognormal draws, clipped to ``1 .. max_output``, with a median that makes their mean ``mean_output``."""
        draws = torch.Generator().manual_seed(self.seed + 1)
        factors = (self.spread * torch.randn(self.requests, generator=draws, dtype=torch.float64)).exp()

        def lengths(median: float) -> torch.Tensor:
            return (median * factors).round().clamp(1, self.max_output)

        low, high = 0.0, float(self.max_output) / float(factors.min())
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if float(lengths(middle).mean()) < self.mean_output else (low, middle)
        return [int(length) for length in lengths(high)]

    @cached_property
    def mean_length(self) -> float:
        """Tokens of a request, prompt and output together."""
        return (sum(map(len, self.prompts)) + sum(self.output_lengths)) / self.requests

    def pool_bytes(self, setting: str) -> int:
        """The same for every mode: whole blocks of the full cache, and the one that the engine sets aside.

        Where memory shall not be the limit, the longest requests fit at once, with a tenth more for blocks that
        packing does not fill.
        """
        blocks = -(-self.pool_tokens // self.block_size)
        if setting == ROOMY:
            blocks = math.ceil(1.1 * self.roomy_rows * (-(-self.positions // self.block_size) + 1))
        return (blocks + 1) * self.block_size * self.bytes_per_token

    def rows_of(self, setting: str) -> int:
        return self.roomy_rows if setting == ROOMY else self.rows

    def model_shape(self) -> ModelShape:
        shape = self.shape
        return ModelShape("", "llama", shape.layers, shape.kv_heads, shape.query_heads, shape.head_dim)

    def random_gates(self) -> HeadGates:
        """Gates that nothing was trained for: time and memory do not depend on which heads are full."""
        alpha = torch.rand(self.shape.layers, self.shape.kv_heads, generator=torch.Generator().manual_seed(self.seed))
        return HeadGates(alpha, model=self.model_shape(), deploy_sink=self.sink, deploy_window=self.window)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Workload:
        values = {**values, "shape": LlamaShape(**values["shape"]), "prompt_tokens": tuple(values["prompt_tokens"])}
        return cls(**values)


# 2 cores: weights of about 100 MB are read in every step, so that a step of many requests costs little more than one
SMALL = Workload(LlamaShape(2, 1024, 2816, 16, 8, 64, 2048))
# lengths as in MATH-500 (mean 3k, longest 8k); pools that leave room for 16 GB of weights on any GPU of 40 GB
LLAMA8B = Workload(
    LlamaShape(32, 4096, 14336, 32, 8, 128, 128256),
    dtype="bfloat16",
    requests=160,
    prompt_tokens=(64, 192),
    mean_output=3000,
    max_output=8000,
    sink=16,
    window=64,
    budget=256,
    buffer=128,
    rows=256,
    roomy_rows=8,
    pool_tokens=65536,
    block_size=16,
    step_tokens=4096,
    eager=False,
)
SHAPES = {"small": SMALL, "llama8b": LLAMA8B}


def theoretical_speedup(sparsity: float, kept: int, length: float) -> float:
    """``1 / ((1 - s) + s * kept / L)``: requests that fit more, if a request always had its mean length ``L``."""
    return 1 / (1 - sparsity + sparsity * min(kept, length) / length)


@dataclass(frozen=True)
class Expectation:
    """What an allocation should bring, from lengths alone.

    Attributes:
        sparsity: share of heads that are compressible, exactly.
        theory: :func:`theoretical_speedup`.
        by_blocks: bytes times tokens that the requests hold over their lives, full cache over this allocation, in
            whole blocks: requests start short, and blocks are coarse. Steps can shrink by about this.
    """

    sparsity: float
    theory: float
    by_blocks: float


def expect(work: Workload, gates: HeadGates, sparsity: float, eviction: str | None = None) -> Expectation:
    """What ``sparsity`` should bring where memory is the limit; ``eviction``: name of a policy."""
    allocation = HeadAllocation.from_gates(gates, sparsity)
    exact = allocation.num_compressible / allocation.full.numel()
    plan = plan_packing(allocation.full, work.demand(eviction), round(work.mean_length))
    theory = theoretical_speedup(exact, work.kept(eviction), work.mean_length)
    return Expectation(exact, theory, _gain_by_blocks(work, plan))


def _gain_by_blocks(work: Workload, plan: PackingPlan) -> float:
    held, full = [0], [0]  # running sums over the length of a text
    for tokens in range(1, work.positions + 1):
        held.append(held[-1] + plan.held(tokens))
        full.append(full[-1] + plan.uncompressed(tokens))
    spans = [(len(p), len(p) + n) for p, n in zip(work.prompts, work.output_lengths, strict=True)]
    return sum(full[end] - full[start] for start, end in spans) / sum(held[end] - held[start] for start, end in spans)
