"""What memory the plan makes of the pool: checked against what the engine allocated, and logged once."""

from __future__ import annotations

from typing import Any

from rlkv.vllm.blocks.packing import PackingPlan


def block_bytes(plan: PackingPlan, head_size: int, element_size: int) -> int:
    """Bytes of one block of the pool: keys and values of the largest bin."""
    return plan.heads_per_block * plan.demand.block_size * 2 * head_size * element_size


def check_block_bytes(vllm_config: Any, layer: Any) -> None:
    """Raise ``RuntimeError`` if the engine made blocks of another size than was planned.

    The engine groups layers by rules of its own, which :func:`rlkv.vllm.blocks.packing.engine_groups` foresees.
    If that were wrong, the text would still be right, but memory would be wasted unnoticed.
    """
    cache = layer.kv_cache
    if cache.dim() != 4 or len(cache) < 2:
        return  # not allocated yet
    found = cache.stride(0) * cache.element_size()
    if found != layer.block_bytes:
        raise RuntimeError(
            f"rlkv: the engine's blocks have {found:,} bytes, planned were {layer.block_bytes:,}: "
            "please report this with the gates file and the sparsity"
        )


def memory_summary(plan: PackingPlan, bytes_per_head: int, tokens: int) -> str:
    """One line: what a request of ``tokens`` tokens holds, and how many more tokens fit into the same pool.

    Args:
        bytes_per_head: keys and values of one head in one block.
    """
    held, ideal, full = (
        amount * bytes_per_head for amount in (plan.held(tokens), plan.ideal(tokens), plan.uncompressed(tokens))
    )
    return (
        f"{plan.num_heads(True)} full and {plan.num_heads(False)} compressible heads in {len(plan.groups)} block "
        f"tables; a request of {tokens:,} tokens holds {held:,} bytes of KV, the full cache would hold {full:,} "
        f"({held / full:.3f}; without any waste {ideal / full:.3f}): "
        f"{full / held:.2f} times the tokens in the same pool"
    )
