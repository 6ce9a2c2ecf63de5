"""Engines for a rollout server, by name."""

from __future__ import annotations

from rlkv.attention.sizes import SinkWindow
from rlkv.models.loading import load_model
from rlkv.rollout.gated import GatedEngine
from rlkv.rollout.protocol import EngineFacts

GATED_ENGINES = ("vllm", "hf")


def load_gated_engine(
    name: str,
    model: str,
    sizes: SinkWindow,
    dtype: str = "auto",
    max_positions: int | None = None,
    kv_gib: float = 4.0,
    max_rows: int = 64,
    eager: bool = False,
) -> tuple[GatedEngine, EngineFacts]:
    """Load ``model`` with mixed attention; ``kv_gib`` and ``eager`` concern vLLM.

    Raises:
        ValueError: if the engine is unknown or not installed, or the model cannot be loaded.
    """
    if name == "vllm":
        from rlkv.vllm.engine import VLLMEngine

        served = VLLMEngine(model, sizes, dtype, max_positions, kv_gib, max_rows, enforce_eager=eager)
        layers, heads = served.gates().shape
        return served, EngineFacts(model, sizes.sink, sizes.window, served.max_positions, layers, heads)
    if name != "hf":
        raise ValueError(f"unknown engine {name!r}: use one of {', '.join(GATED_ENGINES)}")
    from rlkv.training.head_gate import gates_matrix
    from rlkv.training.hf_engine import GatedHFEngine

    loaded, tokenizer = load_model(model, dtype)
    limit = max_positions or loaded.config.get_text_config().max_position_embeddings
    engine = GatedHFEngine(loaded, sizes, tokenizer.pad_token_id, max_rows)
    layers, heads = gates_matrix(engine.model).shape
    return engine, EngineFacts(model, sizes.sink, sizes.window, limit, layers, heads)
