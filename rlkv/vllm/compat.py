"""What the tested versions of vLLM have in different forms, and names that the engine calls private.

All other names of the engine are imported where they are used; ``tests/vllm/test_interfaces.py`` lists them.
"""

from __future__ import annotations

import os
from typing import Any

import vllm.envs as envs
from vllm.triton_utils import HAS_TRITON
from vllm.utils.torch_utils import LayerNameType
from vllm.utils.torch_utils import _encode_layer_name as encode_layer_name
from vllm.utils.torch_utils import _resolve_layer_name as resolve_layer_name
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

__all__ = ["BlockManager", "LayerNameType", "choose_runner", "encode_layer_name", "register_spec", "resolve_layer_name"]


class BlockManager(SingleTypeKVCacheManager):
    """Base of rlkv's managers of blocks."""

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """None, for cascade attention: abstract in the engine's base class in 0.31, gone in 0.32."""
        return 0


def register_spec(spec: type[Any], manager: type[SingleTypeKVCacheManager], base: type[Any]) -> None:
    """Make a kind of blocks known to this process; ``base``: the kind with which it may share a block table."""
    # the registry fills itself with the stock specs only as long as it is empty
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(spec, manager, base)


def choose_runner() -> bool:
    """Pin the engine's model runner: the second one, its default where Triton runs, else the deprecated first one.

    Returns:
        Whether it is the second one. ``VLLM_USE_V2_MODEL_RUNNER`` decides where it is set.
    """
    asked = envs.VLLM_USE_V2_MODEL_RUNNER
    second = HAS_TRITON if asked is None else asked
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(second))
    return second
