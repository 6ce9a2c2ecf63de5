"""The softmax of a model's attention: of scaled logits, soft-capped or with learned sinks in some.

Shapes: B rows, H KV heads, G query heads per KV head, N = H * G, Q queries, K keys, D size of a
head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SCORES_AT_ONCE = 2**24  # of queries and keys, over all query heads: a few copies of 64 MB
# the same on a GPU, a few copies of 256 MB: less would be thousands of kernels for a long text
SCORES_ON_GPU = 2**26


@dataclass(frozen=True, eq=False)
class Softmax:
    """Weights of values, from the products of queries and keys.

    Attributes:
        scale: of the logits.
        cap: c of soft-capped logits, ``c * tanh(logit / c)``, as in Gemma 2; None: not capped.
        sinks_N: learned sinks ``[H * G]``, as in gpt-oss: each query head has a further logit,
            which takes its share of the weights and has no value; None: without.
    """

    scale: float
    cap: float | None = None
    sinks_N: Tensor | None = None

    @classmethod
    def of_call(cls, query: Tensor, scaling: float | None, arguments: Mapping[str, Any]) -> Softmax:
        """Read it off an attention call with query ``[B, H * G, Q, D]``.

        Raises:
            ValueError: for another number of sinks than query heads.
        """
        sinks = arguments.get("s_aux")
        if sinks is not None and sinks.shape != query.shape[1:2]:
            raise ValueError(
                f"s_aux has shape {list(sinks.shape)}, but the layer has {query.shape[1]} query "
                "heads: rlkv takes one learned sink for each"
            )
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        return cls(scale, arguments.get("softcap"), sinks)

    @property
    def is_plain(self) -> bool:
        """Return whether fused kernels compute it."""
        return self.cap is None and self.sinks_N is None

    def of_heads(self, chosen: Tensor, num_kv_heads: int) -> Softmax:
        """Return that of some of the KV heads: bool ``[H]``, or their numbers."""
        if self.sinks_N is None:
            return self
        return replace(self, sinks_N=self.sinks_N.view(num_kv_heads, -1)[chosen].flatten())

    def sinks_of(self, heads: int, queries: int) -> Tensor | None:
        """Return the sinks next to products ``[B, heads, queries, K]``: ``[1, heads, queries, 1]``.

        A group may stand among the heads or, query head by query head, among the queries.
        """
        if self.sinks_N is None:
            return None
        sinks = self.sinks_N.view(heads, -1)
        return sinks.repeat_interleave(queries // sinks.shape[1], dim=1)[None, :, :, None]

    def weights(self, products: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
        """Compute the weights of keys, in float32 or wider.

        Args:
            products: ``[B, heads, queries, K]``.
            mask: bool, or added to the logits; None: every query sees all keys.
            sinks: what :meth:`sinks_of` gives for the products.

        Returns:
            The shape of ``products``; with sinks they add up to less than 1.
        """
        wide = torch.promote_types(torch.float32, products.dtype)
        logits = products.to(wide) * self.scale
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        if mask is not None and mask.dtype == torch.bool:
            # finite: a query of padding may see nothing
            logits = logits.masked_fill(~mask, torch.finfo(wide).min)
        elif mask is not None:
            logits = logits + mask
        if sinks is None:
            return logits.softmax(-1)
        column = sinks.to(wide).expand(*logits.shape[:3], 1)
        return torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Attend from query ``[B, heads, queries, D]``, by torch's fused kernels if it is plain.

        ``heads`` are those of key and value ``[B, H, K, D]``, or a multiple.
        """
        batch, heads, length, size = query.shape
        if self.is_plain:
            groups = heads // key.shape[1]
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=causal,
                scale=self.scale,
                enable_gqa=groups > 1,
            )
        # blocks of queries: without gradients only the scores of one are in memory
        at_once = SCORES_ON_GPU if query.is_cuda else SCORES_AT_ONCE
        block = max(1, at_once // (batch * heads * key.shape[2]))
        place_K = torch.arange(key.shape[2], device=query.device)
        sinks = self.sinks_of(heads, length)
        outputs = []
        for begin in range(0, length, block):
            end = min(begin + block, length)
            seen = mask
            last = end if causal else None  # later keys are seen by no query of the block
            if causal:
                seen = place_K[:last] <= torch.arange(begin, end, device=query.device)[:, None]
            elif mask is not None and mask.shape[-2] > 1:
                seen = mask[..., begin:end, :]
            grouped = query[:, :, begin:end].reshape(batch, key.shape[1], -1, size)
            products = (grouped @ key[:, :, :last].mT).view(batch, heads, end - begin, -1)
            own = None if sinks is None else sinks[:, :, begin:end]
            weights = self.weights(products, seen, own).to(value.dtype)
            out = weights.reshape(*grouped.shape[:3], -1) @ value[:, :, :last]
            outputs.append(out.view(batch, heads, end - begin, -1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
