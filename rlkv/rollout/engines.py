"""Engines by name, so that programs know the protocol only."""

from __future__ import annotations

from rlkv.rollout.base import RolloutEngine

ENGINES = ("hf", "vllm")


def check_engine(name: str) -> None:
    """Refuse an engine that is unknown or not there yet.

    Raises:
        ValueError: names the engines that there are.
    """
    if name == "vllm":
        raise ValueError("engine 'vllm' comes with the extra rlkv[vllm] and is not built yet: use --engine hf")
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}: use one of {', '.join(ENGINES)}")


def load_engine(
    name: str, model: str, dtype: str = "auto", device: str = "auto", batch_size: int = 16
) -> RolloutEngine:
    """Load ``model`` (``tiny``, a folder or a hub id) into the engine ``name``.

    Raises:
        ValueError: if the engine is unknown, or the model cannot be loaded.
    """
    check_engine(name)
    from rlkv.models import load_model
    from rlkv.rollout.hf import HFEngine

    return HFEngine(*load_model(model, dtype, device), batch_size=batch_size)
