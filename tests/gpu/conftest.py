"""What breaks first on a GPU: fixtures, and the JSON file that ``rlkv-bench check`` leaves.

On a GPU the tests run at full size in bfloat16, on a CPU small and in float32; what needs CUDA has
the marker ``gpu``.  Figures of a test are what it gives to ``record_property``.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, LlamaForCausalLM

from rlkv.benchmarks.turns import LlamaSizes, relative_error
from rlkv.models.loading import resolve_device
from rlkv.rollout.footprint import GIB, free_memory
from rlkv.utils.files import write_json
from rlkv.utils.runtime import provenance

Record = Callable[[str, Any], None]  # of record_property
SINK = 4
WINDOW = 16
FACTOR = 2.0  # times the error of the unpatched model; 0.97 to 1.05 were measured on a CPU in bf16
LEAST = 1e-5  # of what is allowed: in float32 the order of additions decides
RESERVE_GIB = 10.0  # for what runs on the 8B shape: an update of 8k tokens, the KV of 16 rows

SMALL = LlamaSizes(
    layers=2, hidden=64, intermediate=96, query_heads=8, kv_heads=2, head_dim=16, vocabulary=128
)
MEDIUM = LlamaSizes(
    layers=3, hidden=256, intermediate=512, query_heads=8, kv_heads=2, head_dim=128, vocabulary=512
)
LLAMA_8B = LlamaSizes(
    layers=32,
    hidden=4096,
    intermediate=14336,
    query_heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=128256,
)


# --- the JSON file


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", type=Path, help="JSON file for outcomes and figures of tests/gpu")


def pytest_configure(config: pytest.Config) -> None:
    # without the option where this file is read after the command line
    file = config.getoption("figures", None)
    if file is not None:
        config.pluginmanager.register(FigureFile(file))


class FigureFile:
    """Writes hardware, versions, figures and outcomes, after each test."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.results: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self.results.setdefault(report.nodeid, {"test": report.nodeid, "seconds": 0.0})
        row["seconds"] += report.duration
        row["figures"] = dict(report.user_properties)
        if report.when == "call" or not report.passed:
            row["outcome"] = report.outcome
            row["reason"] = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            row["reason"] = report.longrepr[2]
        elif report.failed:
            row["reason"] = str(report.longrepr)[-4000:]
        if report.when == "teardown":
            self.write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            row = {"test": report.nodeid, "outcome": report.outcome, "figures": {}, "seconds": 0.0}
            self.results[report.nodeid] = {**row, "reason": str(report.longrepr)[-4000:]}
            self.write()

    def write(self) -> None:
        write_json(self.file, {**provenance(), "results": list(self.results.values())})


# --- devices


@pytest.fixture(scope="session")
def device() -> torch.device:
    return resolve_device("auto")


@pytest.fixture(scope="session")
def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


@pytest.fixture(scope="session")
def dtype(on_gpu: bool) -> torch.dtype:
    return torch.bfloat16 if on_gpu else torch.float32


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest, device: torch.device, on_gpu: bool) -> Iterator[None]:
    """Drop what earlier tests left; end the run if the GPU computes no more."""
    if request.node.get_closest_marker("gpu") and not on_gpu:
        pytest.skip("needs a CUDA device")
    torch._dynamo.reset()
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    # torch would run FlexAttention dense past its recompile limit, and only log it
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    if on_gpu:
        try:
            torch.ones(1, device=device).sum().item()
        except RuntimeError as error:
            pytest.exit(f"the GPU computes no more since {request.node.nodeid}: {error}", 1)


# --- a small Llama twice


@dataclass(frozen=True)
class Texts:
    """Token ids and real tokens ``[B, T]``, of which the first ``prompt`` are read in one call."""

    ids: Tensor
    real: Tensor
    prompt: int

    @classmethod
    def draw(cls, vocabulary: int, length: int, prompt: int, padding: tuple[int, ...]) -> Texts:
        """Draw texts with so many columns of ``padding`` on the left of each row."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, vocabulary, (len(padding), length), generator=generator)
        return cls(ids, torch.arange(length) >= torch.tensor(padding)[:, None], prompt)

    def call(self, begin: int, end: int, device: torch.device) -> dict[str, Tensor]:
        """Return what a model takes to read the columns from ``begin`` to ``end``."""
        positions = (self.real.long().cumsum(-1) - 1).clamp(min=0)
        call = {
            "input_ids": self.ids[:, begin:end],
            "attention_mask": self.real[:, :end].long(),
            "position_ids": positions[:, begin:end],
        }
        return {name: tensor.to(device) for name, tensor in call.items()}

    @torch.inference_mode()
    def read_at_once(self, model: Any, mask: Tensor | None = None) -> Tensor:
        """Return logits ``[B, T, V]``; ``mask``: bool ``[B, 1, T, T]`` instead of the padding."""
        call = self.call(0, self.ids.shape[1], model.device)
        if mask is not None:
            call["attention_mask"] = mask
        return model(**call, use_cache=False).logits.cpu()

    @torch.inference_mode()
    def read_by_tokens(self, model: Any, cache: Cache) -> Tensor:
        """Return logits ``[B, T, V]`` of a call with the prompt and calls of one token."""
        ends = [0, *range(self.prompt, self.ids.shape[1] + 1)]
        outputs = []
        for begin, end in pairwise(ends):
            call = self.call(begin, end, model.device)
            outputs.append(model(**call, past_key_values=cache, use_cache=True).logits)
        return torch.cat(outputs, dim=1).cpu()

    def error(self, logits: Tensor, wanted: Tensor) -> float:
        """Return the relative error over the real tokens."""
        return relative_error(logits[self.real], wanted[self.real])


@dataclass(frozen=True)
class Twins:
    """``own``: on the device in its dtype; ``exact``: on the CPU in float64, with its weights."""

    own: Any
    exact: Any
    sizes: LlamaSizes
    texts: list[Texts]

    def allowed(self, texts: Texts) -> float:
        """Return the largest error: rounding is the same in the unpatched model on the device."""
        stock = texts.error(texts.read_at_once(self.own), texts.read_at_once(self.exact))
        assert stock < 1, f"the unpatched model has a relative error of {stock:.2g}"
        return max(FACTOR * stock, LEAST)


@pytest.fixture(scope="module")
def twins(device: torch.device, dtype: torch.dtype, on_gpu: bool) -> Twins:
    sizes = MEDIUM if on_gpu else SMALL
    config = sizes.llama(1024)
    config.initializer_range = 0.05  # attention is far from uniform
    torch.manual_seed(0)
    own: Any = LlamaForCausalLM(config)
    own = own.to(dtype).eval()
    exact = copy.deepcopy(own).double()
    length, prompt = (200, 150) if on_gpu else (60, 40)
    padded = [(0,), (0, 9, 31)]
    texts = [Texts.draw(sizes.vocabulary, length, prompt, padding) for padding in padded]
    return Twins(own.to(device), exact, sizes, texts)


# --- the shape of Llama-8B


def layers_that_fit(sizes: LlamaSizes, free: int) -> int:
    """Return how many layers' 16-bit weights leave ``RESERVE_GIB`` of ``free`` bytes."""
    attention = 2 * sizes.hidden * sizes.head_dim * (sizes.query_heads + sizes.kv_heads)
    layer = attention + 3 * sizes.hidden * sizes.intermediate
    outside = 2 * sizes.vocabulary * sizes.hidden
    return min(sizes.layers, int((free - RESERVE_GIB * GIB) / 2 - outside) // layer)


@dataclass(frozen=True)
class Built:
    """A model with random weights, and its sizes."""

    model: Any
    sizes: LlamaSizes


@pytest.fixture
def llama_8b(device: torch.device, dtype: torch.dtype, record_property: Record) -> Built:
    """Make a Llama of the 8B shape with as many layers as fit the device; a small one on a CPU."""
    sizes = SMALL
    free = free_memory(device)
    if free is not None:
        sizes = replace(LLAMA_8B, layers=layers_that_fit(LLAMA_8B, free))
        if sizes.layers < 1:
            pytest.skip(f"{free / GIB:.0f} GiB of GPU memory are free, less than a layer needs")
    torch.manual_seed(0)
    with device:
        model: Any = AutoModelForCausalLM.from_config(sizes.llama(16384 + 256), dtype=dtype)
    record_property("layers", sizes.layers)
    return Built(model.eval(), sizes)
