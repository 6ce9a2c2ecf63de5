"""GPUs by name, as ``--plan_gpus 8xh100`` takes them: memory and peak rates of the vendor's data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Card:
    """``memory`` in GiB; peak rates without sparsity: bfloat16 operations/s, and bytes/s of memory."""

    memory: float
    flops: float
    bandwidth: float


CARDS = {
    "a10g": Card(24, 70e12, 0.60e12),
    "rtx4090": Card(24, 165e12, 1.01e12),
    "l40s": Card(48, 362e12, 0.86e12),
    "a100-40": Card(40, 312e12, 1.56e12),
    "a100": Card(80, 312e12, 2.04e12),
    "h100": Card(80, 989e12, 3.35e12),
    "h200": Card(141, 989e12, 4.80e12),
    "b200": Card(180, 2250e12, 7.70e12),
}
DEFAULT = "h100"


def parse_gpus(text: str) -> tuple[int, str]:
    """``8xh100`` or ``h100``: number and name; ``ValueError`` for another form or name."""
    found = re.fullmatch(r"(?:([1-9]\d*)x)?([\w-]+)", text.lower())
    if found is None or found[2] not in CARDS:
        raise ValueError(
            f"plan_gpus is {text!r}: name a GPU, and how many, such as 8xh100; known are {', '.join(CARDS)}"
        )
    return int(found[1] or 1), found[2]


def card_of(device: torch.device) -> Card | None:
    """What is known of a GPU that is here, of an unknown one what is known of an A100; None: a CPU."""
    if device.type != "cuda":
        return None
    name = re.sub(r"[\s-]", "", torch.cuda.get_device_name(device).lower())
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    known = [card for key, card in CARDS.items() if key.partition("-")[0] in name]
    nearest = min(known or [CARDS["a100"]], key=lambda card: abs(card.memory - memory))
    return Card(memory, nearest.flops, nearest.bandwidth)
