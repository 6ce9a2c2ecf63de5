"""Liger's kernels for what is frozen: RMSNorm, rotary embeddings and SwiGLU of the layers, not the loss."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from rlkv.utils.extras import require


def apply_liger(model: PreTrainedModel, device: torch.device) -> None:
    """Replace these parts of ``model``, which is not yet wrapped; ``device`` is where it will be trained.

    Rotary embeddings are replaced for all models of this family in the process.  Not run on a GPU yet.

    Raises:
        ValueError: without a GPU, without the package ``liger-kernel``, or for a family that it does not know.
    """
    if device.type != "cuda":
        raise ValueError(f"liger_kernels needs a CUDA GPU, and this runs on {device.type}: leave it out")
    liger = require("liger_kernel.transformers.monkey_patch", "liger")
    family = model.config.model_type
    if family not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(f"liger-kernel has no kernels for models of type {family}: leave liger_kernels out")
    # its losses would replace the output head, which the objective calls itself
    losses = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    liger._apply_liger_kernel_to_instance(model, rope=True, rms_norm=True, swiglu=True, **losses)
