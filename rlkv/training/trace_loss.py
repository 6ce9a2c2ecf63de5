"""What it costs to make heads compressible: the distance from the full model on recorded solutions.

Shapes: L layers, H KV heads, B rows, N answer tokens of a batch, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlkv.data.recall import MarkedText
from rlkv.training.distillation import TOKENS_AT_ONCE, Batch, collate, next_token_kl
from rlkv.training.head_gate import gate_parameters, set_gates

Head = tuple[int, int]  # layer, KV head
PADDING = 0  # on the right, where no token sees it


@contextmanager
def replaced(layers: Sequence[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``layers`` compute ``forward`` instead."""
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = forward
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            if own is None:
                del layer.forward
            else:
                layer.forward = own


class TraceLoss:
    """``mean_i log(1 + KL_i)``, ``KL_i`` the sum over a solution's tokens of ``KL(full || masked)`` in nats.

    A few tokens decide whether a solution goes wrong, so the sum over tokens counts and not their mean; the logarithm
    keeps one lost solution from hiding what happens to the others.  Teacher-forced, with the prompt masked too.

    Args:
        model: wrapped with :class:`rlkv.training.head_gate.HeadGateConfig`, which says sink and window, in eval mode on
            its device.
        traces: prompts with their solutions, whose tokens are the answers.
        rows: traces of one forward.
        on_forward: called after each.

    Attributes:
        passes: forwards over all traces so far, in units of whole ones.
    """

    def __init__(
        self, model: Any, traces: Sequence[MarkedText], rows: int, on_forward: Callable[[], None] = lambda: None
    ) -> None:
        self.model, self.base, self.passes, self.on_forward = model, model.get_base_model(), 0.0, on_forward
        self.layers = list(self.base.get_decoder().layers)
        if len(gate_parameters(model)) < len(self.layers):
            raise ValueError("some layers of this model have no full attention: heads of such models cannot be ranked")
        ordered = sorted(traces, key=lambda trace: len(trace.ids))
        pieces = [ordered[start : start + rows] for start in range(0, len(ordered), rows)]
        self.batches = [collate(piece, PADDING, self.base.device) for piece in pieces]
        self.num_traces = len(traces)
        with torch.no_grad(), model.disable_adapter():
            self.full = [self._states(batch).cpu() for batch in self.batches]

    def _states(self, batch: Batch) -> Tensor:
        """Last hidden states ``[N, D]`` of the positions that predict the answers."""
        hidden_BTD = self.base.get_decoder()(input_ids=batch.ids_BT, attention_mask=batch.mask_BT, use_cache=False)[0]
        return hidden_BTD[batch.row_N, batch.position_N]

    def _sum(self, batch: Batch, full_ND: Tensor, skipped: int = 0) -> float:
        """Sum over the rows of a batch, under the current gates; ``skipped`` layers do not compute."""
        head, rows = self.base.get_output_embeddings(), len(batch.ids_BT)
        kl_B = torch.zeros(rows, device=batch.ids_BT.device)
        parts = [part.split(TOKENS_AT_ONCE) for part in (self._states(batch), full_ND, batch.row_N)]
        for mixed, full, row in zip(*parts, strict=True):
            kl_B.index_add_(0, row, next_token_kl(head(mixed), head(full.to(mixed.device))).float())
        total = kl_B.clamp(min=0).log1p().sum().item()
        self._count(rows, skipped)
        return total

    def _count(self, rows: int, skipped: int = 0) -> None:
        self.passes += rows / self.num_traces * (1 - skipped / len(self.layers))
        self.on_forward()

    @torch.no_grad()
    def of(self, full_LH: Tensor) -> float:
        """The loss when only the heads of ``full_LH`` (bool ``[L, H]``) are full."""
        set_gates(self.model, full_LH.float())
        return sum(map(self._sum, self.batches, self.full)) / self.num_traces

    @torch.no_grad()
    def without_each(self, full_LH: Tensor, heads: Sequence[Head]) -> list[float]:
        """The losses when one more head is compressible, one for each of ``heads``.

        Layers below the head's own compute the same for all: they run once.
        """
        sums = [0.0] * len(heads)
        for batch, full_ND in zip(self.batches, self.full, strict=True):
            set_gates(self.model, full_LH.float())
            outputs = self._outputs(batch)
            for i, (layer, head) in enumerate(heads):
                alpha_LH = full_LH.float()
                alpha_LH[layer, head] = 0
                set_gates(self.model, alpha_LH)
                # the layer below gives what it gave; what those before it give is not looked at
                with replaced(self.layers[:layer], lambda *_, found=outputs[layer - 1], **__: found):
                    sums[i] += self._sum(batch, full_ND, skipped=layer)
        return [total / self.num_traces for total in sums]

    def _outputs(self, batch: Batch) -> list[Any]:
        """What each layer returns under the current gates."""
        found: list[Any] = []
        with ExitStack() as hooks:
            for layer in self.layers:
                hook = layer.register_forward_hook(lambda module, given, output: found.append(output))
                hooks.callback(hook.remove)
            self._states(batch)
        self._count(len(batch.ids_BT))
        return found
