"""Supervised fine-tuning that makes SmolLM2-135M a reasoner on the task of :mod:`rlkv.smol`: a LoRA on all matrices.

The longest chain of the batches grows over the first half of the run, as in the tiny model's pretraining.  The problems
of a batch have the same number of steps, so that little is padded.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from peft.helpers import disable_input_dtype_casting
from safetensors.torch import load_file, save_file
from scipy.stats import binomtest
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from rlkv.models.builtin import SMOLLM2
from rlkv.models.loading import load_model, resolve_device
from rlkv.models.prompts import build_messages, render_prompt
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.hf import HFEngine
from rlkv.smol.task import MAX_DISTRACTORS, MAX_NEW_TOKENS, MAX_STEPS, draw_problem, problems
from rlkv.utils.progress import ProgressBar, progress_bar
from rlkv.utils.provenance import hardware_line
from rlkv.verifier.verifier import are_correct

HELD_OUT_SEED = 1_000_003
ADAPTER_FILE = "adapter_model.safetensors"


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Fine-tuning of SmolLM2 on the built-in reasoning task."""

    output_dir: Path = Path("results/finetune_smol")
    """checkpoints, the log and the adapter"""
    steps: int = 240
    """optimizer steps"""
    batch_size: int = 8
    """problems of a step"""
    learning_rate: float = 1.5e-3
    """peak; a linear warm-up of 20 steps, then a cosine down to 0"""
    rank: int = 8
    """of the LoRA on every matrix of the layers"""
    seed: int = 0
    """of problems and initial weights"""
    held_out: int = 200
    """problems of each closing measurement"""
    device: str = "auto"
    """auto, cpu or cuda"""


class _Progress(TrainerCallback):
    def __init__(self, bar: ProgressBar) -> None:
        self.bar = bar

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.resume(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.bar.update(state.global_step, note=f"loss {logs['loss']:.4f}")


class _Trainer(SFTTrainer):
    """Scores the solutions alone: on a CPU trl's loss takes the prompts through the output embeddings too."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Mean cross entropy of the solutions' tokens."""
        base, targets = model.get_base_model(), inputs["labels"][:, 1:]
        ids, mask, wanted = inputs["input_ids"], inputs["attention_mask"], targets != -100
        with self.accelerator.autocast():
            hidden = base.get_decoder()(ids, attention_mask=mask, use_cache=False)[0]
            logits = base.get_output_embeddings()(hidden[:, :-1][wanted])
        return cross_entropy(logits.float(), targets[wanted])


def training_rows(config: FinetuneConfig) -> list[dict[str, Any]]:
    """Prompts and solutions in the order of training, ``steps * batch_size`` of them."""
    rows = []
    for step in range(config.steps):
        rng = random.Random(f"rlkv-smol-finetune-{config.seed}-{step}")
        longest = 3 + round(min(1.0, 2 * step / config.steps) * (MAX_STEPS - 3))
        steps, distractors = rng.randint(2, longest), rng.randint(2, MAX_DISTRACTORS)
        for _ in range(config.batch_size):
            drawn = draw_problem(rng, steps, distractors)
            solution = [{"role": "assistant", "content": drawn.solution}]
            rows.append({"prompt": build_messages(drawn.problem, "plain"), "completion": solution})
    return rows


def finetune(config: FinetuneConfig) -> dict[str, Any]:
    """Fine-tune, or go on with, the run in ``config.output_dir``; returns what its ``finetuning.json`` says."""
    device = resolve_device(config.device)
    model, tokenizer = load_model(SMOLLM2, dtype="bfloat16", device=str(device))
    model.set_attn_implementation("eager")  # on a CPU its backward pass takes less time
    arguments = SFTConfig(
        output_dir=str(config.output_dir),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        train_sampling_strategy="sequential",
        max_length=None,
        gradient_checkpointing=False,
        bf16=True,
        use_cpu=device.type == "cpu",
        save_steps=20,
        save_total_limit=2,
        logging_steps=5,
        include_num_input_tokens_seen="non_padding",
        report_to="none",
        seed=config.seed,
    )
    lora = LoraConfig(r=config.rank, lora_alpha=2 * config.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    rows = Dataset.from_list(training_rows(config))
    with progress_bar("fine-tuning", "steps", config.steps) as bar:
        trainer = _Trainer(
            model,
            arguments,
            train_dataset=rows,
            processing_class=tokenizer,
            peft_config=lora,
            callbacks=[_Progress(bar)],
        )
        trainer.remove_callback(PrinterCallback)
        tuned: Any = trainer.model
        with disable_input_dtype_casting(tuned):  # autocast does it; twice costs a quarter of a step
            trainer.train(resume_from_checkpoint=_last_checkpoint(config.output_dir))
    log = "".join(json.dumps(record) + "\n" for record in trainer.state.log_history)
    (config.output_dir / "log.jsonl").write_text(log)
    adapter = config.output_dir / "adapter"
    tuned.save_pretrained(adapter)
    _halve(adapter / ADAPTER_FILE)
    config_file = adapter / "adapter_config.json"
    settings = {**json.loads(config_file.read_text()), "base_model_name_or_path": SMOLLM2}
    config_file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    summary = {
        "config": {key: value for key, value in asdict(config).items() if key not in ("output_dir", "device")},
        "tokens": trainer.state.num_input_tokens_seen,
        "seconds": round(sum(record.get("train_runtime", 0) for record in trainer.state.log_history)),
        "torch": torch.__version__,
        "hardware": hardware_line(),
        "held_out": held_out_accuracy(adapter, config.held_out, str(device)),
    }
    (adapter / "finetuning.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that is whole: its state file is written last."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(whole, key=lambda path: int(path.name.split("-")[1]))) if whole else None


def _halve(file: Path) -> None:
    """Store the weights in bfloat16, the precision that they were trained against."""
    save_file({name: weight.bfloat16() for name, weight in load_file(file).items()}, file, {"format": "pt"})


def held_out_accuracy(adapter: Path, n: int, device: str = "cpu") -> dict[str, Any]:
    """Greedy accuracy of the merged model in float32 on problems of 4 to 10 steps, with names seen and unseen."""
    model, tokenizer = load_model(SMOLLM2, dtype="float32", device=device)
    engine = HFEngine(PeftModel.from_pretrained(model, adapter).merge_and_unload(), tokenizer, batch_size=25)
    found = {}
    for title, unseen in (("names of fine-tuning", False), ("other names", True)):
        drawn = problems(n, HELD_OUT_SEED, 4, 10, held_out_names=unseen)
        prompts = [render_prompt(tokenizer, p["problem"], "plain") for p in drawn]
        completions = engine.generate(prompts, SamplingParams(max_new_tokens=MAX_NEW_TOKENS))
        right = sum(are_correct((c.text, p["answer"]) for c, p in zip(completions, drawn, strict=True)))
        low, high = binomtest(right, n).proportion_ci(method="wilson")
        found[title] = {"n": n, "accuracy": right / n, "ci_low": float(low), "ci_high": float(high)}
    return found
