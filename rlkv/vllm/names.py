"""Names that the mixed models and their callers share, without an import of vLLM."""

from __future__ import annotations

CONFIG_KEY = "rlkv_mixed"  # of the engine's additional_config: {"sink": S, "window": W}
PREFIX = "RLKVMixed"  # before the name of the stock architecture
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
WORKER = "rlkv.vllm.mixed.worker.GateWorker"  # worker_extension_cls
DRAWS = "rlkv.vllm.mixed.draws:RowDraws"  # one of logits_processors
DRAW_KEY = "rlkv_draw"  # of a request's extra_args


def mixed_architecture(architectures: list[str] | None) -> str:
    """The mixed counterpart of a model's architecture.

    Raises:
        ValueError: if there is none.
    """
    name = (architectures or ["none"])[0]
    if name not in ARCHITECTURES:
        raise ValueError(
            f"rollouts of vLLM serve {', '.join(ARCHITECTURES)}, not {name}: sample this model with --rollout hf"
        )
    return PREFIX + name
