"""Parts that benchmarks share: options of a random Llama, work that takes turns, result files."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rlkv.evaluation.evaluate import FULL, parse_methods
from rlkv.evaluation.report import Page, Panel, Point, plot_curves
from rlkv.inference.options import check_least
from rlkv.models.loading import resolve_device, resolve_dtype
from rlkv.utils.files import write_json
from rlkv.utils.progress import progress_bar
from rlkv.utils.runtime import hardware_line, provenance

COMPARED = 2  # steps of which the outputs are kept
LEAST_ENTRIES = 128  # what policies need to choose from
# in the place of options that are at their defaults
QUICK: dict[str, Any] = {"batches": (1, 2), "contexts": (256, 1024), "new_tokens": 128}
QUICK |= {"rounds": 2, "seconds": 0.5, "methods": (FULL, "random-heads@0.5", "rkv@64")}
QUICK |= {"layers": 4, "hidden": 256, "intermediate": 682, "vocabulary": 512}

# options that a measurement does not read; "": of a model's steps
_OF_TEXTS = ("methods", "memory_gib", "prompt_tokens", "new_tokens")
UNREAD: dict[str, tuple[str, ...]] = {
    "": _OF_TEXTS,
    "layer": (*_OF_TEXTS, "layers", "hidden", "intermediate", "vocabulary"),
    "eviction": (*_OF_TEXTS, "sparsities", "seconds", "sink", "window"),
    "texts": ("contexts", "sparsities", "seconds", "max_steps"),
}


def check_sparsities(sparsities: Sequence[float], is_share: list[bool], wanted: str) -> None:
    """Raise ``ValueError`` if not all ``is_share``, or one is given twice."""
    shown = [f"{sparsity:g}" for sparsity in sparsities]
    if not all(is_share) or len(set(shown)) != len(shown):
        raise ValueError(f"--sparsities {' '.join(shown)}: give each once, {wanted}")


@dataclass(frozen=True, kw_only=True)
class LlamaSizes:
    """Sizes of a Llama with random weights."""

    layers: int = 12
    """Layers of the model."""
    hidden: int = 768
    """Hidden size."""
    intermediate: int = 2048
    """Size of the feed-forward layers."""
    query_heads: int = 16
    """Query heads per layer."""
    kv_heads: int = 8
    """KV heads per layer."""
    head_dim: int = 64
    """Size of a head."""
    vocabulary: int = 8192
    """Tokens in the vocabulary."""

    def check(self) -> None:
        check_least(self, 1, *(field.name for field in fields(LlamaSizes)))
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"--query-heads {self.query_heads} must be a multiple of --kv-heads {self.kv_heads}"
            )

    def check_rotation(self) -> None:
        """Raise ``ValueError`` if a model's heads could not be rotated by halves."""
        if self.head_dim % 2:
            raise ValueError(f"--head-dim must be even, got {self.head_dim}: halves are rotated")

    def llama(self, positions: int) -> LlamaConfig:
        """Return the config for texts of up to ``positions`` tokens."""
        return LlamaConfig(
            architectures=["LlamaForCausalLM"],
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=self.query_heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocabulary,
            max_position_embeddings=positions,
            rms_norm_eps=1e-5,
        )


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(LlamaSizes):
    """Median time of a decode step, with bytes of KV held, against transformers' own caches.

    rlkv-bench decode                        # about 15 minutes on 2 cores
    rlkv-bench decode --quick                # a small model, under a minute
    rlkv-bench decode --layer                # one layer's attention against torch's own
    rlkv-bench decode --eviction             # an eviction of each policy against a decode step
    rlkv-bench decode --texts --memory-gib 1 # whole texts by method, and the largest batch
    """

    layer: bool = False
    """One attention layer: latency, and GB/s of keys and values read."""
    eviction: bool = False
    """One eviction of each policy, which keeps half of --contexts, and its peak memory."""
    texts: bool = False
    """Whole texts: memory, latency, throughput, largest batch."""
    quick: bool = False
    """Small model, short contexts, in the place of all sizes that are at their defaults."""
    batches: tuple[int, ...] = (1, 8)
    """Rows that decode together."""
    contexts: tuple[int, ...] = (1024, 4096, 16384)
    """Tokens cached."""
    sparsities: tuple[float, ...] = (0.0, 0.5, 0.9)
    """Compared with the full cache; must include 0."""
    methods: tuple[str, ...] = (FULL, "random-heads@0.5", "rkv@256")
    """With --texts, as of rlkv-eval: full, random-heads@SPARSITY, POLICY@BUDGET, or joined by +."""
    memory_gib: float | None = None
    """With --texts: also the largest batch whose weights and KV in use fit into this memory.

    It must leave room for activations and for the headroom of buffers.
    """
    prompt_tokens: int = 128
    """With --texts: tokens of a prompt."""
    new_tokens: int = 512
    """With --texts: tokens written after it."""
    sink: int = 16
    """First tokens that compressible heads keep."""
    window: int = 64
    """Last tokens that they keep."""
    rounds: int = 5
    """Turns of each cache, policy or method that is compared."""
    seconds: float = 4.0
    """Most seconds of decode steps in one turn."""
    max_steps: int = 20
    """Most timed decode steps in one turn."""
    threads: int | None = None
    """Torch threads; default: all cores."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """auto, fast, float32, bfloat16 or float16."""
    output_dir: Path = Path("results/bench")
    """Where the results go: .json, .md and .png."""

    @property
    def kind(self) -> str:
        """What is measured: layer, eviction, texts, or an empty string for steps of a model."""
        return next((kind for kind in UNREAD if kind and getattr(self, kind)), "")

    @property
    def name(self) -> str:
        """Name of the result files."""
        return f"decode_{self.kind}" if self.kind else "decode"

    def check(self) -> None:
        super().check()
        if not self.layer:
            self.check_rotation()
        if self.layer + self.eviction + self.texts > 1:
            raise ValueError("--layer, --eviction and --texts are measured one at a time: give one")
        check_least(self, 1, "batches", "contexts", "rounds")
        check_least(self, 1, "max_steps", "window")
        check_least(self, 1, "prompt_tokens", "threads")
        check_least(self, 2, "new_tokens")
        check_least(self, 0, "sink")
        if self.eviction:
            check_least(self, LEAST_ENTRIES, "contexts")
        if 0.0 not in self.sparsities:
            raise ValueError("--sparsities must include 0: the others are compared with it")
        is_share = [0 <= sparsity <= 1 for sparsity in self.sparsities]
        check_sparsities(self.sparsities, is_share, "from 0 to 1")
        if not self.methods:
            raise ValueError("--methods is empty: give at least one")
        parse_methods(self.methods, [])
        if self.memory_gib is not None and not 0 < self.memory_gib < float("inf"):
            raise ValueError(f"--memory-gib must be a number above 0, got {self.memory_gib:g}")
        for name in UNREAD[self.kind]:
            if getattr(self, name) != getattr(type(self), name):
                what = f"--{self.kind}" if self.kind else "steps of a model"
                raise ValueError(f"--{name.replace('_', '-')} is not read for {what}: leave it out")

    def sized(self) -> DecodeConfig:
        """Return the options with small sizes for those not given, if ``quick`` asks for it."""
        if not self.quick:
            return self
        unset = {}
        for name, value in QUICK.items():
            if getattr(self, name) == getattr(type(self), name):
                unset[name] = value
        return replace(self, **unset)

    @property
    def options(self) -> dict[str, Any]:
        """Device and dtype of tensors."""
        device = resolve_device(self.device)
        return {"device": device, "dtype": resolve_dtype(self.dtype, device)}

    def build_model(self) -> Any:
        """Return the model in eval mode; about 100 M parameters with the default sizes."""
        positions = max(*self.contexts, self.prompt_tokens + self.new_tokens) + 1024
        return LlamaForCausalLM(self.llama(positions)).to(**self.options).eval()


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Return the seconds that ``work()`` takes, a GPU's kernels included, and what it returns."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    start = time.perf_counter()
    result = work()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start, result


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return the root mean square of the difference over that of ``wanted``.

    Infinite if ``found`` is not finite.
    """
    wanted = wanted.to(found.device)
    error = (found.to(wanted.dtype) - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    return float(error) if bool(error.isfinite()) else torch.inf


# the work of a step, by its number; None: it cannot be done, which ends the turn
Prepare = Callable[[int], Callable[[], Tensor] | None]


@dataclass
class Contender:
    """One of the things that are compared, and what its turns measured.

    Attributes:
        facts: what identifies it in a row of results.
        begin: fills a cache, notes ``kv_bytes``, and returns what prepares a step.
        first_times: seconds of the first step of each turn, which warms up.
        times: seconds of the other steps.
        outputs: of the first two steps of the last turn, in float32 on the CPU.
        peak_bytes: most bytes on the GPU in a turn; ``set_up_bytes`` those before its first step.
        fits: whether no turn ran out of memory; if one did, it takes no further ones.
    """

    name: str
    facts: dict[str, Any]
    begin: Callable[[Contender], Prepare]
    first_times: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    kv_bytes: int = 0
    set_up_bytes: int = 0
    peak_bytes: int | None = None
    fits: bool = True

    @torch.inference_mode()
    def take_turn(self, device: torch.device, steps: int, seconds: float = torch.inf) -> None:
        """Set up, take one step to warm up, then time up to ``steps`` of them one by one."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        prepare = self.begin(self)
        if device.type == "cuda":
            self.set_up_bytes = torch.cuda.memory_allocated(device)
        self.outputs.clear()
        spent = 0.0
        for index in range(1 + steps):
            work = prepare(index)
            if work is None:
                break
            taken, output = timed(work, device)
            if index < COMPARED:
                self.outputs.append(output.cpu().float())
            del output  # not next to the following one: peak bytes are those of a step
            if index == 0:
                self.first_times.append(taken)
                continue
            self.times.append(taken)
            spent += taken
            if spent + taken > seconds:
                break
        if device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(device)

    def milliseconds(self) -> float:
        """Return the median time of a step."""
        return 1000 * median(self.times)

    def error(self, reference: Contender) -> float:
        """Return the largest relative error of the compared outputs."""
        pairs = zip(self.outputs, reference.outputs, strict=False)
        return max((relative_error(own, wanted) for own, wanted in pairs), default=0.0)


def take_turns(
    contenders: list[Contender], config: Any, steps: int, seconds: float = torch.inf
) -> None:
    """Let each of ``contenders`` take a turn in each round.

    A machine that slows down slows all of them; each round starts with another one, so that none
    always runs on a rested machine.
    """
    device = config.options["device"]
    with progress_bar(config.name, "turns", config.rounds * len(contenders)) as bar:
        for turn in range(config.rounds):
            shift = turn % len(contenders)
            for contender in [*contenders[shift:], *contenders[:shift]]:
                if contender.fits:
                    work = partial(contender.take_turn, device, steps, seconds)
                    contender.fits = fits(work)
                bar.advance()


def fits(work: Callable[[], Any]) -> bool:
    """Do ``work()``; return False if the memory of a GPU, or of the CPU, does not suffice."""
    try:
        work()
    except RuntimeError as error:
        # the CPU's allocator has no type of its own
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            return False
        raise
    return True


def panels_of(
    results: list[dict[str, Any]], label: str, figure: str, xlabel: str, ylabel: str
) -> list[Panel]:
    """Return a panel per batch with a curve per ``label``, ``figure`` over the context."""
    panels = []
    for batch in dict.fromkeys(row["batch"] for row in results):
        curves: dict[str, list[Point]] = defaultdict(list)
        for row in results:
            if row["batch"] == batch and figure in row:
                quartiles = row.get("ms_quartiles", [row[figure]] * 2)
                curves[row[label]].append((row["context"], row[figure], *quartiles))
        panels.append(Panel(f"batch {batch}", xlabel, curves, ylabel, limits=None, log=True))
    return panels


def write_measurement(
    config: DecodeConfig,
    results: list[dict[str, Any]],
    columns: dict[str, str],
    panels: list[Panel],
    sharey: bool = True,
) -> None:
    """Write the files of a measurement, with a title that says what ran, and where."""
    with torch.device("meta"):
        parameters = LlamaForCausalLM(config.llama(1024)).num_parameters()
    device = config.options["device"]
    dtype = str(config.options["dtype"]).removeprefix("torch.")
    heads = f"{config.query_heads} query heads, {config.kv_heads} KV heads of {config.head_dim}"
    model = f"Llama of {parameters / 1e6:.0f} M parameters"
    what = f"attention of {heads}" if config.layer else model
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    page = Page(f"rlkv-bench {config.name.replace('_', ' --')}")
    page.records(results, columns)
    facts = {"parameters": parameters, "dtype": dtype, "device": str(device)}
    title = f"{what}, {dtype}, {hardware_line()}{threads}"
    write_result(config, config.name, title, facts, results, page, panels, sharey)


def write_result(
    config: Any,
    name: str,
    title: str,
    facts: dict[str, Any],
    results: list[dict[str, Any]],
    page: Page,
    panels: list[Panel],
    sharey: bool = True,
) -> None:
    """Write NAME.json (with ``facts``), .md and .png into ``config.output_dir``; print the page."""
    folder = config.output_dir
    found = provenance()
    content = {"config": asdict(config), "title": title, **facts, **found, "results": results}
    write_json(folder / f"{name}.json", content)
    page.paragraph(f"{title}; torch {found['versions']['torch']}")
    page.write(folder / f"{name}.md")
    plot_curves(folder / f"{name}.png", *panels, title=title, sharey=sharey)
    print(f"{page.markdown()}\nwritten to {folder}")
