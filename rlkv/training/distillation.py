"""Gates by distillation: mixed attention is pulled to what full attention computes, an L1 term pulls gates to 0.

Two losses on chosen tokens of a text, both plus ``l1_weight * mean(alpha)``:

- *distance* (DuoAttention, arXiv 2410.10819): mean squared difference of the last hidden states, on the answers of a
  recall task.  The paper sums over the hidden size and the gates; here both are means, as in the published code;
- *kl*: ``KL(full || mixed)`` of the next-token distribution, on the model's own solutions.

Shapes: N answer tokens of a batch, D hidden size, V vocabulary.  States are compared at the position
before a token, which predicts it (the published code takes the token's own position).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlkv.data.recall import MarkedText
from rlkv.training.callbacks import GateMean, clamp_gate
from rlkv.training.distill_config import DistillSettings
from rlkv.training.head_gate import full_attention_modules, gate_parameters, gate_shares, gates_matrix
from rlkv.training.trace_batches import TraceBatch, make_batch

TOKENS_AT_ONCE = 512  # logits of real vocabularies are large: 512 x 128k in float32 are 256 MB
SLOWEST = 0.1  # the learning rate starts and ends at this share of its peak (2410.10819, section on training)


def squared_distance(mixed_ND: Tensor, full_ND: Tensor) -> Tensor:
    """``mean_d (full - mixed)^2`` per token, in float32 or wider: ``[N]``."""
    wide = torch.promote_types(torch.float32, mixed_ND.dtype)
    return (full_ND.to(wide) - mixed_ND.to(wide)).square().mean(-1)


def log_probabilities(logits_NV: Tensor) -> Tensor:
    """In float32 or wider."""
    return logits_NV.to(torch.promote_types(torch.float32, logits_NV.dtype)).log_softmax(-1)


class _KLOfStates(torch.autograd.Function):
    """The gradient is made next to the value, piece by piece, as no logits are kept: ``dKL/dlogits = mixed - full``."""

    @staticmethod
    def forward(ctx: Any, mixed_ND: Tensor, full_ND: Tensor, head: nn.Module) -> Tensor:
        kl, gradient = [], []
        for mixed, full in zip(mixed_ND.split(TOKENS_AT_ONCE), full_ND.split(TOKENS_AT_ONCE), strict=True):
            with torch.enable_grad():
                state = mixed.detach().requires_grad_()
                logits = head(state)
            expected, found = log_probabilities(head(full)), log_probabilities(logits.detach())
            kl.append((expected.exp() * (expected - found)).sum(-1))
            gradient += torch.autograd.grad(logits, state, (found.exp_() - expected.exp_()).to(logits.dtype))
        ctx.save_for_backward(torch.cat(gradient))
        return torch.cat(kl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer_N: Tensor) -> tuple[Tensor, None, None]:
        (gradient_ND,) = ctx.saved_tensors
        return (outer_N[0][:, None] * gradient_ND).to(gradient_ND.dtype), None, None


def kl_of_states(head: nn.Module, mixed_ND: Tensor, full_ND: Tensor) -> Tensor:
    """``sum_v p_full (log p_full - log p_mixed)`` per token in nats, in float32 or wider: ``[N]``.

    ``head`` makes the logits of hidden states; the gradient goes to ``mixed_ND`` only.
    """
    return _KLOfStates.apply(mixed_ND, full_ND, head)


@torch.no_grad()
def count_right(head: nn.Module, states_ND: Tensor, answer_N: Tensor) -> int:
    """Tokens that are the argmax of their state's logits."""
    pairs = zip(states_ND.split(TOKENS_AT_ONCE), answer_N.split(TOKENS_AT_ONCE), strict=True)
    return sum(int((head(states).argmax(-1) == answers).sum()) for states, answers in pairs)


def lr_factor(step: int, steps: int) -> float:
    """Share of the peak learning rate at ``step`` (0-based): up over the first fifth, down over the last."""
    fifth = max(1, steps // 5)
    return min(1.0, max(SLOWEST, (step + 1) / fifth), max(SLOWEST, (steps - step) / fifth))


def check_head(model: Any, ids: Sequence[int]) -> None:
    """Raise ``ValueError`` if the model's logits are not its output embeddings applied to its last hidden states."""
    ids_BT = torch.tensor([list(ids)], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=ids_BT, use_cache=False).logits
        again = model.get_output_embeddings()(model.get_decoder()(input_ids=ids_BT, use_cache=False)[0])
    if not torch.allclose(logits.float(), again.float(), rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"{type(model).__name__} changes its logits after the output embeddings (scaled or capped), which the "
            "KL of next tokens does not know: take rlkv-distill --data recall, which needs no logits"
        )


def check_layers(model: Any) -> None:
    """Raise ``ValueError`` unless every layer of the model has full attention, as prompts in full need."""
    if len(list(full_attention_modules(model))) < len(model.get_decoder().layers):
        raise ValueError("some layers of this model have no full attention: heads of such models cannot be ranked")


class Distiller:
    """The optimizer step on the gates of a PEFT model: AdamW without weight decay, clamp to [0, 1] after each step.

    Args:
        model: wrapped with :class:`rlkv.training.head_gate.HeadGateConfig`, on its device.
    """

    def __init__(self, model: Any, settings: DistillSettings) -> None:
        self.model, self.settings = model, settings
        self.base = model.get_base_model()
        self.gates: list[Tensor] = [parameter for _, parameter in gate_parameters(model)]
        self.optimizer = torch.optim.AdamW(self.gates, lr=settings.learning_rate, weight_decay=0.0)
        self.gate_mean = GateMean()
        self.step = 0

    def _batches(self, samples: Sequence[MarkedText]) -> Iterator[tuple[TraceBatch, Tensor]]:
        """With the states ``[N, D]`` of full attention."""
        ordered, rows = sorted(samples, key=lambda sample: len(sample.ids)), self.settings.forward_rows
        decoder, in_full = self.base.get_decoder(), self.settings.prefill == "full"
        for start in range(0, len(ordered), rows):
            with torch.no_grad(), self.model.disable_adapter():
                batch = make_batch(decoder, ordered[start : start + rows], in_full, self.base.device)
                full_ND = batch.states(decoder)
            yield batch, full_ND

    def train_step(self, samples: Sequence[MarkedText]) -> dict[str, float]:
        """One optimizer step; its record (``teacher/right``: share of the answers that full attention predicts)."""
        started, cpu_started = time.perf_counter(), time.process_time()
        settings, head = self.settings, self.base.get_output_embeddings()
        predicted = len(samples) if settings.prefill == "full" else 0  # a first answer is read with the prompt
        answers = sum(len(sample.answers) for sample in samples) - predicted
        rate = settings.learning_rate * lr_factor(self.step, settings.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        distilled, right = 0.0, 0
        for batch, full_ND in self._batches(samples):
            right += count_right(head, full_ND, batch.answer_N)
            mixed_ND, by_kl = batch.states(self.base.get_decoder()), settings.loss_kind == "kl"
            per_token = kl_of_states(head, mixed_ND, full_ND) if by_kl else squared_distance(mixed_ND, full_ND)
            loss = per_token.sum() / answers
            loss.backward()
            distilled += loss.item()
        l1 = torch.cat(self.gates).mean()
        (settings.l1_weight * l1).backward()
        norm = torch.cat([gate.grad for gate in self.gates if gate.grad is not None]).norm().item()
        if not math.isfinite(norm):
            raise ValueError(
                f"the gradients of step {self.step + 1} are not finite: try --dtype float32, or resume with the same "
                "command, which goes on from the last checkpoint"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        for gate in self.gates:
            clamp_gate(gate)
        self.step += 1
        self.gate_mean.on_step_end(None, None, None, model=self.model)
        return {
            "loss/distill": distilled,
            "loss/l1": l1.item(),
            "loss/total": distilled + settings.l1_weight * l1.item(),
            "teacher/right": right / answers,
            "tokens/answers": answers,
            **gate_shares(gates_matrix(self.model)),
            "gates/grad_norm": norm,
            "train/learning_rate": rate,
            "time/step_s": time.perf_counter() - started,
            "time/step_cpu_s": time.process_time() - cpu_started,
        }

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs besides its settings."""
        alphas = [gate.detach().cpu() for gate in self.gates]
        optimizer = self.optimizer.state_dict()
        return {"step": self.step, "alphas": alphas, "optimizer": optimizer, "gate_mean": self.gate_mean.state()}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        for gate, alpha in zip(self.gates, state["alphas"], strict=True):
            gate.copy_(alpha)
        self.optimizer.load_state_dict(state["optimizer"])
        self.gate_mean.load(state["gate_mean"])
        self.step = state["step"]
