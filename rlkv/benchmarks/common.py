"""What the benchmarks share: the sizes of a random Llama, the options of those that time a process,
their files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rlkv.evaluation.report import Page, Panel, plot_curves
from rlkv.kernels.step import serves
from rlkv.models.loading import resolve_device, resolve_dtype
from rlkv.utils.files import write_json
from rlkv.utils.runtime import hardware, hardware_line, provenance

KERNEL = ", kernel"  # behind the name of what decodes by the kernel, which is off by default


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

    def llama(self, positions: int) -> LlamaConfig:
        """The config for texts of up to ``positions`` tokens."""
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
class ProcessConfig(ABC):
    """Options of a benchmark that runs in this process."""

    output_dir: Path = Path("results/bench")
    """Where the results go: .json, .md and .png."""
    rounds: int = 5
    """Turns that each of the compared takes."""
    threads: int | None = None
    """Torch threads; default: all cores."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """auto, fast, float32, bfloat16 or float16."""

    def check(self) -> None:
        """Raise ValueError for impossible settings."""
        at_least(1, rounds=self.rounds)
        if self.threads is not None:
            at_least(1, threads=self.threads)

    @property
    def options(self) -> dict[str, Any]:
        """Device and dtype of tensors."""
        device = resolve_device(self.device)
        return {"device": device, "dtype": resolve_dtype(self.dtype, device)}

    def begin(self) -> None:
        """Set the threads, and the seed of random numbers."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        torch.manual_seed(0)

    @abstractmethod
    def describe(self) -> tuple[str, dict[str, Any]]:
        """What runs, in words for a title and as facts for the JSON file."""

    def write(
        self,
        name: str,
        results: list[dict[str, Any]],
        columns: Mapping[str, str],
        panels: list[Panel],
        sharey: bool = True,
    ) -> None:
        """The files of a benchmark: a table (:meth:`Page.records`), and a title that says what ran,
        and where.
        """
        (what, facts), device, dtype = (
            self.describe(),
            self.options["device"],
            str(self.options["dtype"])[6:],
        )
        threads = f", {hardware()['torch_threads']} threads" if device.type == "cpu" else ""
        title, page = f"{what}, {dtype}, {hardware_line()}{threads}", Page(f"rlkv-bench {name}")
        page.records(results, columns)
        facts |= {"dtype": dtype, "device": str(device)}
        write_result(self.output_dir, name, title, self, results, page, panels, sharey, **facts)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(LlamaSizes, ProcessConfig):
    """Options of a benchmark that runs a whole model in this process."""

    def check(self) -> None:
        super().check()
        at_least(1, **{field.name: getattr(self, field.name) for field in fields(LlamaSizes)})

    def build_model(self, positions: int) -> PreTrainedModel:
        """The model in eval mode; about 100 M parameters with the default sizes.  Sets the threads."""
        self.begin()
        model: Any = LlamaForCausalLM(self.llama(positions))
        return model.to(**self.options).eval()

    def describe(self) -> tuple[str, dict[str, Any]]:
        with torch.device("meta"):
            parameters = LlamaForCausalLM(self.llama(1024)).num_parameters()
        return f"Llama of {parameters / 1e6:.0f} M parameters", {"parameters": parameters}


@dataclass(frozen=True, kw_only=True)
class TimingConfig(ModelConfig):
    """Options of a benchmark that times single decode steps."""

    seconds: float = 4.0
    """Most seconds of decoding in one turn."""
    max_steps: int = 20
    """Most timed decode steps in one turn."""

    def check(self) -> None:
        super().check()
        at_least(1, max_steps=self.max_steps)


def at_least(least: float, **options: float | tuple[float, ...]) -> None:
    """Raise ValueError unless every value of every option is ``least`` or more and given at all."""
    for name, values in options.items():
        given = values if isinstance(values, tuple) else (values,)
        if not given or min(given) < least:
            shown = " ".join(f"{value:g}" for value in given)
            raise ValueError(
                f"--{name.replace('_', '-')} {shown}: give numbers of {least:g} or more"
            )


def kernel_serves(config: Any) -> bool:
    """Whether the decode kernel serves layers of these heads on this device.

    It warns of what a GPU lacks.
    """
    group = config.query_heads // config.kv_heads
    query = torch.empty(1, config.kv_heads, group, 1, config.head_dim, **config.options)
    return serves(query, query[:, :, 0], query[:, :, 0])


def write_result(
    folder: Path,
    name: str,
    title: str,
    config: Any,
    results: list[dict[str, Any]],
    page: Page,
    panels: list[Panel],
    sharey: bool = True,
    **facts: Any,
) -> None:
    """Write NAME.json (with ``facts``; their ``versions`` join the installed ones), .md and .png.

    Print the page.
    """
    found = provenance()
    found["versions"] |= facts.pop("versions", {})
    content = {"config": asdict(config), "title": title, **facts, **found, "results": results}
    write_json(folder / f"{name}.json", content)
    page.paragraph(f"{title}; torch {found['versions']['torch']}")
    page.write(folder / f"{name}.md")
    plot_curves(folder / f"{name}.png", *panels, title=title, sharey=sharey)
    print(f"{page.markdown()}\nwritten to {folder}")
