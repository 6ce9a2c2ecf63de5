"""One distillation run from its configuration to its export: data, model, loop, log, resume; on one device."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from peft import get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState

from rlkv.gates.head_gates import HeadGates
from rlkv.models.loading import dtype_name, load_model, load_tokenizer, resolve_device
from rlkv.training.checkpoints import load_tensors, new_checkpoint, save_tensors
from rlkv.training.distill_config import DistillSettings
from rlkv.training.distill_data import Draw, load_data
from rlkv.training.distillation import Distiller, check_head, check_layers
from rlkv.training.head_gate import HeadGateConfig
from rlkv.training.logs import LOG
from rlkv.training.run_folder import RunFolder
from rlkv.training.stopping import StopOnTermination
from rlkv.utils.figures import TEXT_SIZE, curve_figure, save_figure
from rlkv.utils.jsonl import read_log
from rlkv.utils.progress import progress_bar

STATE = "state.pt"
CHECKPOINTS_KEPT = 2
CURVES = (("gates/mean", "mean gate"), ("gates/below_0.5", "gates below 0.5"), ("teacher/right", "teacher's accuracy"))


def distill_gates(
    settings: DistillSettings, model: PreTrainedModel | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> HeadGates:
    """Start or resume the distillation run in ``settings.output_dir``, and export it there.

    Args:
        model, tokenizer: instead of the ones that ``settings.model`` names; afterwards the model has no gates.

    Raises:
        ValueError: for data, a model or a folder that do not fit.
    """
    if tokenizer is None:
        tokenizer = load_tokenizer(settings.model)
    if settings.data == "traces":
        settings = settings.with_curriculum()
    draw, facts = load_data(settings, tokenizer)
    config = {**asdict(settings), **facts, "haystack": None, "loss": settings.loss_kind}
    config["dtype"] = dtype_name(settings.dtype, resolve_device(settings.device))
    run = RunFolder(Path(settings.output_dir), settings, config)
    if model is None:
        model, _ = load_model(settings.model, dtype=settings.dtype, device=settings.device)
    if settings.loss_kind == "kl":
        check_head(model, draw(0)[0].ids[:32])
    if settings.prefill == "full":
        check_layers(model)
    was_training = model.training
    adapter = HeadGateConfig(sink=settings.sink, window=settings.window)
    gated: Any = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    distiller = Distiller(gated, settings)

    def make_gates() -> HeadGates:
        return run.gates(gated, distiller.gate_mean.mean(), settings.method, distiller.step)

    try:
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            gated.train()  # transformers recomputes in training mode only; gated attention allows no dropout
        if run.checkpoint is not None:
            distiller.load(load_tensors(run.checkpoint / STATE))
        callbacks = [*run.loggers(make_gates), StopOnTermination()]
        run.write_config()
        _loop(distiller, draw, run.path, callbacks)
        gates = make_gates()
    finally:
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_disable()
        gated.unload().train(was_training)
    plot_losses(read_log(run.path / LOG), run.path / "losses.png", settings)
    run.export(gates, CURVES)
    return gates


def _loop(distiller: Distiller, draw: Draw, folder: Path, callbacks: list[TrainerCallback]) -> None:
    """Steps, log records and checkpoints until ``settings.steps``; the callbacks are those of ``rlkv-train``."""
    settings = distiller.settings
    state, control = TrainerState(global_step=distiller.step, max_steps=settings.steps), TrainerControl()

    def notify(event: str, **values: Any) -> None:
        for callback in callbacks:
            getattr(callback, event)(settings, state, control, model=distiller.model, **values)

    notify("on_train_begin")
    with progress_bar(f"distil {settings.data}", "step", settings.steps) as progress:
        progress.resume(distiller.step)
        while distiller.step < settings.steps:
            record = distiller.train_step(draw(distiller.step))
            state.global_step = distiller.step
            notify("on_step_end")
            notify("on_log", logs=record)
            due = distiller.step % settings.save_steps == 0 or distiller.step == settings.steps
            if due or control.should_save:
                with new_checkpoint(folder, distiller.step, CHECKPOINTS_KEPT) as target:
                    save_tensors(target / STATE, distiller.state())
            progress.advance()
            if control.should_training_stop:
                break
    notify("on_train_end")


def plot_losses(records: list[dict[str, Any]], path: Path, settings: DistillSettings) -> None:
    """Both terms of the loss over the steps, the L1 term with its weight, on a logarithmic axis."""
    figure, axes = curve_figure(f"Distillation on {settings.data}", "optimizer step", "loss")
    steps = [record["step"] for record in records]
    axes.plot(steps, [record["loss/distill"] for record in records], label=settings.loss_kind, linewidth=0.8)
    weighted = [settings.l1_weight * record["loss/l1"] for record in records]
    axes.plot(steps, weighted, label=f"L1, weight {settings.l1_weight:g}")
    axes.set_yscale("log")
    axes.legend(fontsize=TEXT_SIZE)
    save_figure(figure, path)
