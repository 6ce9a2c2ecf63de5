"""Whether vLLM decodes: decided from what is installed, before anything of it is imported."""

from __future__ import annotations

import torch

from rlkv.vllm.plugin import check_version, is_cpu_build
from rlkv.vllm.settings import ARCHITECTURES


def check_vllm_options(engine: str, device: str, kv_gib: float | None) -> None:
    """Raise ``ValueError`` for no memory, and for a device that ``vllm`` cannot be told."""
    if kv_gib is not None and not kv_gib > 0:
        raise ValueError(f"--kv-gib must be above 0, got {kv_gib}")
    if engine == "vllm" and device != "auto":
        raise ValueError(f"--engine vllm takes the device that it was built for, not {device!r}: leave out --device")


def choose_engine(asked: str, has_gpu: bool, gated: str | None = None) -> tuple[str, str]:
    """``(engine, why)``: for ``auto`` vLLM where it can be used, else transformers and why; else what was asked for.

    Args:
        gated: architecture of the model whose rollouts see gates; None: a stock model, or one that is not known.
    """
    if asked != "auto":
        return asked, ""
    try:
        check_version()
    except ValueError as error:
        return "hf", str(error)
    if not has_gpu and not is_cpu_build():
        return "hf", "the installed vLLM is built for GPUs, and there is none"
    if torch.cuda.is_available() and is_cpu_build():  # here, not in a plan for GPUs elsewhere
        return "hf", "the installed vLLM is built for CPUs, and there is a GPU"
    if gated is not None and gated not in ARCHITECTURES:
        return "hf", f"rollouts of vLLM serve {', '.join(ARCHITECTURES)}, not {gated}"
    return "vllm", ""
