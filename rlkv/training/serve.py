"""The rollout server of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rlkv.attention import LocalSizes
from rlkv.inference.options import ModelOptions, check_positive
from rlkv.models.loading import resolve_device
from rlkv.rollout.base import DEFAULT_PORT, EngineFacts, GatedEngine
from rlkv.rollout.footprint import DEFAULT_KV_GIB, Footprint, free_memory
from rlkv.rollout.remote import RolloutServer
from rlkv.vllm.plugin import check_vllm_options


@dataclass(frozen=True, kw_only=True)
class ServeConfig(ModelOptions):
    """What to serve, and where."""

    sink: int = 128
    """first tokens that the local branch sees, as in the training"""
    window: int = 256
    """last tokens that the local branch sees, as in the training"""
    engine: Literal["hf", "vllm"] = "vllm"
    """hf: plain transformers"""
    host: str = "127.0.0.1"
    """address to listen on"""
    port: int = DEFAULT_PORT
    """port to listen on, 0: a free one"""
    max_positions: int | None = None
    """tokens of a prompt and its completion, default: what the model allows"""
    kv_gib: float | None = None
    """vllm: memory of the KV cache in GiB; default: what the GPU has left, without one 4"""
    max_rows: int = 64
    """completions decoded at once"""
    eager: bool = False
    """vllm: neither compile the model nor capture graphs"""

    def check(self) -> None:
        check_vllm_options(self.engine, self.device, self.kv_gib)
        check_positive(self, "max_rows", "max_positions")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(
                f"--port {self.port} is not a port: choose one from 1 to 65535, or 0 for a free one"
            )


def fitting_kv_gib(config: ServeConfig) -> float:
    """GiB of KV that fit the GPU; ``ValueError`` if it is too small."""
    free = free_memory(resolve_device())
    footprint = None if free is None else Footprint.of(config.model, config.dtype)
    if footprint is None or free is None:
        return DEFAULT_KV_GIB
    return footprint.vllm_kv_gib(free, config.max_positions or 1)


def load_gated_engine(config: ServeConfig) -> tuple[GatedEngine, EngineFacts]:
    """The engine with mixed attention; ``ValueError`` if it is not installed or the model cannot be
    loaded.
    """
    sizes = LocalSizes(config.sink, config.window)
    engine: Any
    if config.engine == "vllm":
        from rlkv.vllm.engine import VLLMEngine

        kv_gib = fitting_kv_gib(config) if config.kv_gib is None else config.kv_gib
        limits = config.max_positions, kv_gib, config.max_rows
        engine = VLLMEngine(config.model, sizes, config.dtype, *limits, enforce_eager=config.eager)
        positions, vocabulary = (
            engine.max_positions,
            engine.llm.llm_engine.model_config.get_vocab_size(),
        )
    else:
        from rlkv.training.trainer import GatedHFEngine

        loaded, tokenizer = config.load()
        engine = GatedHFEngine(loaded, sizes, tokenizer.pad_token_id, config.max_rows)
        text_config = loaded.config.get_text_config()
        positions, vocabulary = (
            config.max_positions or text_config.max_position_embeddings,
            text_config.vocab_size,
        )
    layers, heads = engine.gates().shape
    return engine, EngineFacts(
        config.model, sizes.sink, sizes.window, positions, layers, heads, vocabulary
    )


def serve(config: ServeConfig) -> None:
    """Serve until the process is ended."""
    engine, facts = load_gated_engine(config)
    with RolloutServer((config.host, config.port), engine, facts) as server:
        where = f"http://{config.host}:{server.server_port}"
        print(
            f"serving {config.model} at {where} (sink {config.sink}, window {config.window})",
            flush=True,
        )
        server.serve_forever()
