"""Which heads each rank of tensor parallelism has.

All ranks follow the block tables of one scheduler, so every rank needs as many full heads as any other, and every rank
has the same number of heads of a layer, because the projections are cut into equal shards.
"""

from __future__ import annotations

import torch
from torch import Tensor


def deal_heads(full_LH: Tensor, ranks: int) -> Tensor:
    """KV heads of each rank, ``[ranks, L, H / ranks]``, by their numbers in the checkpoint, ascending.

    The full heads of all layers go to the ranks in turn.  So a layer's are even to within one, which leaves room for
    them, and the model's are exactly even.  The compressible ones fill every rank up.

    Args:
        full_LH: True for full heads; their number and H must be multiples of ``ranks``.

    Raises:
        ValueError: if the number of full heads is not.
    """
    layers, heads = full_LH.shape
    assert heads % ranks == 0, "checked with the engine's settings"
    if int(full_LH.sum()) % ranks:
        raise ValueError(
            f"rlkv: {int(full_LH.sum())} full heads are not spread evenly over {ranks} ranks of tensor parallelism: "
            f"choose an allocation with a multiple of {ranks} full heads, or give gates and a sparsity, which "
            "is rounded down"
        )
    dealt = torch.empty(ranks, layers, heads // ranks, dtype=torch.int64)
    turn = 0
    for layer, row in enumerate(full_LH.tolist()):
        own: list[list[int]] = [[] for _ in range(ranks)]
        for head in (head for head, full in enumerate(row) if full):
            own[turn % ranks].append(head)
            turn += 1
        rest = iter(head for head, full in enumerate(row) if not full)
        for rank, mine in enumerate(own):
            mine.extend(next(rest) for _ in range(heads // ranks - len(mine)))
            dealt[rank, layer] = torch.tensor(sorted(mine))
    return dealt
