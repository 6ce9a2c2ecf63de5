"""Engines by name, so that programs know the protocol only."""

from __future__ import annotations

from importlib.util import find_spec

from rlkv.rollout.base import RolloutEngine

ENGINES = ("hf", "vllm")


def check_engine(name: str) -> None:
    """Refuse an engine that is unknown or not installed, before anything is loaded.

    Raises:
        ValueError: names the engines that there are, or the extra to install.
    """
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}: use one of {', '.join(ENGINES)}")
    if name == "vllm" and find_spec("vllm") is None:
        raise ValueError("engine 'vllm' comes with the extra rlkv[vllm], which is not installed: use --engine hf")


def load_engine(
    name: str, model: str, dtype: str = "auto", device: str = "auto", batch_size: int = 16
) -> RolloutEngine:
    """Load ``model`` (``tiny``, a folder or a hub id) into the engine ``name``.

    Raises:
        ValueError: if the engine is unknown, or the model cannot be loaded.
    """
    check_engine(name)
    if name == "vllm":
        if device != "auto":
            raise ValueError(f"--engine vllm takes the device that it was built for, not {device!r}: leave --device")
        from rlkv.vllm.engine import VLLMEngine

        return VLLMEngine(model, dtype=dtype, max_rows=batch_size)
    from rlkv.models.loading import load_model
    from rlkv.rollout.hf import HFEngine

    return HFEngine(*load_model(model, dtype, device), batch_size=batch_size)
