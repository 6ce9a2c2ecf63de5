r"""Sample for a training run on a GPU of its own: some GPUs train and others sample.

    CUDA_VISIBLE_DEVICES=1 python rollout/serve_vllm.py --model ./my-model --sink 128 \
        --window 256 --max-positions 8192
    CUDA_VISIBLE_DEVICES=0 rlkv-train --config llama8b --rollout vllm-server

Several servers, on this machine (--port) or others (--host), are named with --rollout-servers
URL,URL. The trainer sends the gates (a few hundred numbers) with the rows and gets completions
with log-probabilities. The server keeps nothing: kill it and start it again, and the training goes
on.  It takes requests from anyone who reaches its port: leave --host at this machine unless the
network is yours.

GET /health says which model it serves and whether it is busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rlkv.attention import LocalSizes
from rlkv.cli.app import parse, run_app
from rlkv.inference.options import ModelOptions, check_least
from rlkv.models.loading import files_digest
from rlkv.models.shape import max_positions
from rlkv.rollout.base import DEFAULT_PORT, EngineFacts, GatedEngine
from rlkv.rollout.footprint import fitting_kv_gib
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
    """tokens of a prompt and its completion, default, and at most: what the model allows"""
    kv_gib: float | None = None
    """vllm: memory of the KV cache in GiB; default: what the GPU has left, without one 4"""
    max_rows: int = 64
    """completions decoded at once"""
    eager: bool = False
    """vllm: neither compile the model nor capture graphs"""

    def check(self) -> None:
        check_vllm_options(self.engine, self.device, self.kv_gib)
        check_least(self, 1, "max_rows", "max_positions")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(
                f"--port {self.port} is not a port: choose one from 1 to 65535, or 0 for a free one"
            )


def load_engine(config: ServeConfig) -> tuple[GatedEngine, EngineFacts]:
    """Load the engine with mixed attention.

    Raises:
        ValueError: if it is not installed or the model cannot be loaded.
    """
    sizes = LocalSizes(config.sink, config.window)
    engine: Any
    if config.engine == "vllm":
        from rlkv.vllm.engine import VLLMEngine

        engine = VLLMEngine(
            config.model,
            sizes,
            config.dtype,
            max_positions=config.max_positions,
            kv_gib=config.kv_gib
            or fitting_kv_gib(config.model, config.dtype, config.max_positions or 1),
            max_rows=config.max_rows,
            enforce_eager=config.eager,
        )
        positions = engine.max_positions
        vocabulary = engine.llm.llm_engine.model_config.get_vocab_size()
    else:
        from rlkv.rollout.hf import GatedHFEngine

        model, tokenizer = config.load()
        engine = GatedHFEngine(model, sizes, tokenizer.pad_token_id, config.max_rows)
        positions = max_positions(model.config)
        if config.max_positions is not None:
            positions = min(positions, config.max_positions)
        vocabulary = model.config.get_text_config().vocab_size
    layers, heads = engine.gates().shape
    files = files_digest(config.model)
    facts = EngineFacts(
        config.model, sizes.sink, sizes.window, positions, layers, heads, vocabulary, files
    )
    return engine, facts


def serve(config: ServeConfig) -> None:
    """Serve until the process is ended."""
    engine, facts = load_engine(config)
    with RolloutServer((config.host, config.port), engine, facts) as server:
        where = f"http://{config.host}:{server.server_port}"
        print(
            f"serving {config.model} at {where} (sink {config.sink}, window {config.window})",
            flush=True,
        )
        server.serve_forever()


def main() -> None:
    serve(parse(ServeConfig, __doc__))


if __name__ == "__main__":
    run_app(main)
