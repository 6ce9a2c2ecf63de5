"""Gates by distillation: mixed attention is pulled to full attention, gates are pulled to 0.

Two losses on chosen tokens of a text, both plus ``l1_weight * mean(alpha)``:

- *distance* (DuoAttention, arXiv 2410.10819): mean squared difference of the last hidden states, on
  the answers of a recall task.  The paper sums over the hidden size and the gates; here both are
  means, as in the published code;
- *kl*: ``KL(full || mixed)`` of the next-token distribution, on the model's own solutions.

Shapes: N answer tokens of a batch, D hidden size, V vocabulary.  States are compared at the
position before a token, which predicts it (the published code takes the token's own position).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from rlkv.attention.head_gate import (
    HeadGateConfig,
    gate_parameters,
    gate_shares,
    gate_values,
)
from rlkv.data.recall import (
    MarkedText,
    TextRecall,
    knows_bindings,
    read_haystack,
    recall_sample,
)
from rlkv.gates.head_gates import HeadGates
from rlkv.models.loading import dtype_name, load_model, load_tokenizer, resolve_device
from rlkv.models.shape import max_positions
from rlkv.training.callbacks import GateMean, StopOnTermination, clamp_gate
from rlkv.training.config import DistillSettings
from rlkv.training.logs import LOG, RunLog
from rlkv.training.run_folder import (
    RunFolder,
    load_tensors,
    new_checkpoint,
    refuse_retraining,
    save_tensors,
)
from rlkv.training.solutions import (
    TOKENS_AT_ONCE,
    by_length,
    check_dropout,
    check_head,
    check_masks,
    log_probabilities,
    make_batch,
    read_traces,
)
from rlkv.utils.files import TEXT_SIZE, curve_figure, read_log, save_figure
from rlkv.utils.progress import progress_bar
from rlkv.utils.runtime import digest

# the samples of a step (0-based): the same at every call, so that a resumed run goes on with them
Draw = Callable[[int], list[MarkedText]]

STATE = "state.pt"
CHECKPOINTS_KEPT = 2
# the learning rate starts and ends at this share of its peak (2410.10819, section on training)
SLOWEST = 0.1
CURVES = (
    ("gates/mean", "mean gate"),
    ("gates/below_0.5", "gates below 0.5"),
    ("teacher/right", "teacher's accuracy"),
)


def distill_gates(
    settings: DistillSettings,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> HeadGates:
    """Start or resume the distillation run in ``settings.output_dir``, and export it there.

    Args:
        model, tokenizer: instead of the ones that ``settings.model`` names; afterwards the model
            has no gates.

    Raises:
        ValueError: for data, a model or a folder that do not fit.
    """
    refuse_retraining(Path(settings.output_dir))
    if tokenizer is None:
        tokenizer = load_tokenizer(settings.model)
    if settings.data == "recall":
        draw, facts, longest = recall_task(settings, tokenizer)
        draw(0)  # settings that give no samples fail here, not after the model is loaded
        return distill(settings, draw, facts, longest, model)
    if settings.curriculum is None:
        raise ValueError("no traces: pass --curriculum FILE, which rlkv-filter writes")
    settings = settings.with_curriculum()
    # a first output token is predicted by the prompt alone
    least = 2 if settings.prefill == "full" else 1
    template = str(settings.template)  # which with_curriculum has chosen
    traces = read_traces(str(settings.curriculum), tokenizer, template, settings.max_length, least)
    return distill_traces(settings, traces, model)


def distill_traces(
    settings: DistillSettings, traces: Sequence[MarkedText], model: PreTrainedModel | None
) -> HeadGates:
    """Distil on texts, each of which is drawn once an epoch, as :func:`distill_gates` does."""

    def draw(step: int) -> list[MarkedText]:
        samples = []
        for place in range(step * settings.batch_size, (step + 1) * settings.batch_size):
            epoch, index = divmod(place, len(traces))
            order = list(range(len(traces)))
            random.Random(f"rlkv-distill-{settings.seed}-{epoch}").shuffle(order)
            samples.append(traces[order[index]])
        return samples

    facts = {"samples": len(traces), "data_digest": digest([text.ids for text in traces])}
    return distill(settings, draw, facts, max(len(text.ids) for text in traces), model)


def distill(
    settings: DistillSettings,
    draw: Draw,
    facts: dict[str, Any],
    longest: int,
    model: PreTrainedModel | None,
) -> HeadGates:
    """Start or resume a run on loaded data, and export it.

    The model is loaded, where none is given, once the folder has been checked.

    Args:
        facts: what the run notes of its data; a digest ties a resumed run to the same texts.
        longest: tokens of the longest text, which the model must have positions for.
    """
    config = {**asdict(settings), **facts, "haystack": None, "loss": settings.loss_kind}
    config["dtype"] = dtype_name(settings.dtype, resolve_device(settings.device))
    run = RunFolder(Path(settings.output_dir), settings, config)
    if model is None:
        model, _ = load_model(settings.model, dtype=settings.dtype, device=settings.device)
    most = max_positions(model.config)
    if longest > most:
        raise ValueError(
            f"texts have up to {longest} tokens, the model has {most} positions: give shorter ones "
            "(rlkv-distill: --max-length)"
        )
    if settings.gradient_checkpointing:
        check_dropout(model.config)
    if settings.loss_kind == "kl":
        check_head(model, draw(0)[0].ids)
    check_masks(model, draw(0)[0], settings.prefill)
    was_training = model.training
    adapter = HeadGateConfig(sink=settings.sink, window=settings.window)
    gated: Any = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    distiller = Distiller(gated, settings)

    def make_gates() -> HeadGates:
        return run.gates(gated, distiller.gate_mean.mean(), settings.method, distiller.step)

    try:
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            # transformers recomputes in training mode only, which must not switch dropout on
            gated.train()
            for module in gated.modules():
                if isinstance(module, nn.Dropout):
                    module.eval()
        if run.checkpoint is not None:
            distiller.load(load_tensors(run.checkpoint / STATE))
        callbacks = [RunLog(run, make_gates), StopOnTermination()]
        run.write_config()
        train(distiller, draw, run.path, callbacks)
        gates = make_gates()
    finally:
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_disable()
        gated.unload().train(was_training)
    plot_losses(read_log(run.path / LOG), run.path / "losses.png", settings)
    run.export(gates, CURVES)
    return gates


def train(
    distiller: Distiller, draw: Draw, folder: Path, callbacks: Sequence[TrainerCallback]
) -> None:
    """Make steps, log records and checkpoints until ``settings.steps``.

    The callbacks are those of ``rlkv-train``.
    """
    settings = distiller.settings
    state = TrainerState(global_step=distiller.step, max_steps=settings.steps)
    control = TrainerControl()

    def notify(event: str, **values: Any) -> None:
        for callback in callbacks:
            getattr(callback, event)(settings, state, control, model=distiller.model, **values)

    notify("on_train_begin")
    with progress_bar(f"distil {settings.data}", "step", settings.steps) as progress:
        progress.resume(distiller.step)
        while distiller.step < settings.steps and not control.should_training_stop:
            record = distiller.train_step(draw(distiller.step))
            state.global_step = distiller.step
            notify("on_step_end")
            notify("on_log", logs=record)
            due = distiller.step % settings.save_steps == 0 or distiller.step == settings.steps
            if due or control.should_save:
                with new_checkpoint(folder, distiller.step, CHECKPOINTS_KEPT) as saved:
                    save_tensors(saved / STATE, distiller.state())
            progress.advance()
    notify("on_train_end")


class Distiller:
    """The optimizer step: AdamW without weight decay, gates clamped to [0, 1] after each step.

    Args:
        model: wrapped with :class:`rlkv.attention.head_gate.HeadGateConfig`, on its device.
    """

    def __init__(self, model: Any, settings: DistillSettings) -> None:
        self.model = model
        self.settings = settings
        self.base = model.get_base_model()
        self.gates: list[Tensor] = [parameter for _, parameter in gate_parameters(model)]
        self.optimizer = torch.optim.AdamW(self.gates, lr=settings.learning_rate, weight_decay=0.0)
        self.gate_mean = GateMean()
        self.step = 0

    def train_step(self, samples: Sequence[MarkedText]) -> dict[str, float]:
        """Make an optimizer step and return its record.

        ``teacher/right`` is the share of the answers that full attention predicts.
        """
        started = time.perf_counter()
        cpu_started = time.process_time()
        settings = self.settings
        answers = sum(len(sample.answers) for sample in samples)
        if settings.prefill == "full":
            answers -= len(samples)  # a first answer is read with the prompt
        rate = settings.learning_rate * lr_factor(self.step, settings.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        distilled = 0.0
        right = 0
        for texts in by_length(samples, settings.forward_rows):
            loss, found = self._backward(texts, answers)
            distilled += loss
            right += found
        l1 = torch.cat(self.gates).mean()
        (settings.l1_weight * l1).backward()
        norm = torch.cat([gate.grad for gate in self.gates if gate.grad is not None]).norm().item()
        if not math.isfinite(norm):
            raise ValueError(
                f"the gradients of step {self.step + 1} are not finite: try --dtype float32, or "
                "resume with the same command, which goes on from the last checkpoint"
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
            **gate_shares(gate_values(self.model)),
            "gates/grad_norm": norm,
            "train/learning_rate": rate,
            "time/step_s": time.perf_counter() - started,
            "time/step_cpu_s": time.process_time() - cpu_started,
        }

    def _backward(self, samples: Sequence[MarkedText], answers: int) -> tuple[float, int]:
        """Add gradients; return the loss, and how many answers full attention predicts."""
        decoder = self.base.get_decoder()
        head = self.base.get_output_embeddings()
        with torch.no_grad(), self.model.disable_adapter():
            batch = make_batch(decoder, samples, self.settings.prefill)
            full_ND = batch.states(decoder)
            right = count_right(head, full_ND, batch.answer_N)
        mixed_ND = batch.states(decoder)
        if self.settings.loss_kind == "kl":
            per_token = kl_of_states(head, mixed_ND, full_ND)
        else:
            per_token = squared_distance(mixed_ND, full_ND)
        loss = per_token.sum() / answers
        loss.backward()
        return loss.item(), right

    def state(self) -> dict[str, Any]:
        """Return all that a resumed run needs besides its settings."""
        return {
            "step": self.step,
            "alphas": [gate.detach().cpu() for gate in self.gates],
            "optimizer": self.optimizer.state_dict(),
            "gate_mean": self.gate_mean.state(),
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        for gate, alpha in zip(self.gates, state["alphas"], strict=True):
            gate.copy_(alpha)
        self.optimizer.load_state_dict(state["optimizer"])
        self.gate_mean.load(state["gate_mean"])
        self.step = state["step"]


# --- data


def recall_task(settings: DistillSettings, tokenizer: Any) -> tuple[Draw, dict[str, Any], int]:
    """Return the draw of recall samples, what a run notes of its data, and their most tokens.

    Raises:
        ValueError: for a haystack that cannot be read, or options that the tiny model has no use
            for.
    """
    is_tiny = knows_bindings(tokenizer)
    for name in ("haystack", "passkey_words", "min_length", "max_length") if is_tiny else ():
        value = getattr(settings, name)
        if value != getattr(DistillSettings, name):
            raise ValueError(
                f"--{name.replace('_', '-')} {value}: the tiny model reads no text, its haystack "
                "is definitions of its task"
            )
    facts = {"recall_task": "bindings of the tiny task"}
    longest = 0  # which the tiny model reads by design
    draw_one: Callable[[random.Random], MarkedText] = partial(
        recall_sample, tokenizer, passkeys=settings.passkeys
    )
    if not is_tiny:
        haystack = None
        if settings.haystack is not None:
            haystack = read_haystack(settings.haystack, tokenizer)
        facts = {"recall_task": "word sequences in text", "data_digest": digest(haystack)}
        longest = settings.max_length
        draw_one = TextRecall(
            tokenizer,
            haystack,
            settings.passkeys,
            settings.passkey_words,
            settings.min_length,
            settings.max_length,
        ).draw

    def draw(step: int) -> list[MarkedText]:
        rng = random.Random(f"rlkv-recall-{settings.seed}-{step}")
        return [draw_one(rng) for _ in range(settings.batch_size)]

    return draw, facts, longest


# --- losses


def squared_distance(mixed_ND: Tensor, full_ND: Tensor) -> Tensor:
    """Return ``mean_d (full - mixed)^2`` per token, in float32 or wider: ``[N]``."""
    wide = torch.promote_types(torch.float32, mixed_ND.dtype)
    return (full_ND.to(wide) - mixed_ND.to(wide)).square().mean(-1)


def kl_of_states(head: nn.Module, mixed_ND: Tensor, full_ND: Tensor) -> Tensor:
    """Return ``sum_v p_full (log p_full - log p_mixed)`` per token, in nats: ``[N]``.

    It is float32 or wider.  ``head`` makes the logits of hidden states; the gradient goes to
    ``mixed_ND`` only.
    """

    def kl(mixed: Tensor, full: Tensor) -> Tensor:
        expected = log_probabilities(head(full))
        return (expected.exp() * (expected - log_probabilities(head(mixed)))).sum(-1)

    found = []
    for mixed, full in zip(
        mixed_ND.split(TOKENS_AT_ONCE), full_ND.split(TOKENS_AT_ONCE), strict=True
    ):
        # no logits are kept: backward makes them again, piece by piece
        found.append(checkpoint(kl, mixed, full, use_reentrant=False))
    return torch.cat(found)


@torch.no_grad()
def count_right(head: nn.Module, states_ND: Tensor, answer_N: Tensor) -> int:
    """Count tokens that are the argmax of their state's logits."""
    right = 0
    pieces = zip(states_ND.split(TOKENS_AT_ONCE), answer_N.split(TOKENS_AT_ONCE), strict=True)
    for states, answers in pieces:
        right += int((head(states).argmax(-1) == answers).sum())
    return right


def lr_factor(step: int, steps: int) -> float:
    """Return the share of the peak learning rate at ``step`` (0-based).

    It goes up over the first fifth of the steps and down over the last.
    """
    fifth = max(1, steps // 5)
    return min(1.0, max(SLOWEST, (step + 1) / fifth), max(SLOWEST, (steps - step) / fifth))


def plot_losses(records: list[dict[str, Any]], path: Path, settings: DistillSettings) -> None:
    """Plot both terms of the loss, the L1 term with its weight, on a logarithmic axis."""
    figure, axes = curve_figure(f"Distillation on {settings.data}", "optimizer step", "loss")
    steps = [record["step"] for record in records]
    distilled = [record["loss/distill"] for record in records]
    weighted = [settings.l1_weight * record["loss/l1"] for record in records]
    axes.plot(steps, distilled, label=settings.loss_kind, linewidth=0.8)
    axes.plot(steps, weighted, label=f"L1, weight {settings.l1_weight:g}")
    axes.set_yscale("log")
    axes.legend(fontsize=TEXT_SIZE)
    save_figure(figure, path)
