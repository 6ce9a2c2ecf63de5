r"""Pretrain the built-in tiny reasoning model from scratch, and write its package folder.

    python train/pretrain_tiny.py                      # 4,000 steps, about 40 minutes on 2 CPU cores
    python train/pretrain_tiny.py --output-dir my_tiny --steps 200

Seeded; resumes from ``checkpoint.pt`` in the work folder after a kill.  When it ends it measures greedy
accuracy on held-out problems of the full length range and writes the figure into ``pretraining.json``.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlkv.cli.errors import help_text, run_app
from rlkv.models.loading import resolve_device
from rlkv.tiny import MODEL_DIR
from rlkv.tiny.tokenizer import build_tokenizer
from rlkv.training.tiny_heldout import heldout_accuracy
from rlkv.training.tiny_pretraining import PretrainConfig, build_model, pretrain
from rlkv.utils.provenance import hardware_line

app = typer.Typer(add_completion=False, help=help_text(__doc__), rich_markup_mode=None)


def seconds_trained(log: Path) -> float:
    """Seconds of all runs in the log: each run counts from zero, so a run ends where the count falls."""
    seconds = [json.loads(line)["seconds"] for line in log.read_text().splitlines()]
    return sum(now for now, later in zip(seconds, [*seconds[1:], 0.0], strict=True) if later < now)


@app.command(help=help_text(__doc__))
def main(
    output_dir: Annotated[Path, typer.Option(help="where the finished model goes")] = MODEL_DIR,
    work_dir: Annotated[Path, typer.Option(help="checkpoint and log of the run")] = Path("results/pretrain_tiny"),
    steps: Annotated[int, typer.Option(help="optimizer steps before the closing stage")] = PretrainConfig.steps,
    seed: Annotated[int, typer.Option(help="initial weights and problems")] = PretrainConfig.seed,
    heldout: Annotated[int, typer.Option(help="problems of the closing accuracy measurement")] = 1000,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    config = PretrainConfig(seed=seed, steps=steps)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed).to(resolve_device(device))
    work_dir.mkdir(parents=True, exist_ok=True)
    log = (work_dir / "log.jsonl").open("a")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    started = time.perf_counter()
    with Progress(*columns) as progress, log:
        task = progress.add_task("pretraining", total=config.total_steps)

        def on_step(step: int, loss: float) -> None:
            progress.update(task, completed=step + 1, description=f"pretraining  loss {loss:.4f}")
            seconds = round(time.perf_counter() - started, 1)
            log.write(json.dumps({"step": step, "loss": loss, "seconds": seconds}) + "\n")
            log.flush()

        pretrain(model, tokenizer, config, on_step, checkpoint=work_dir / "checkpoint.pt")
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    summary = {
        "config": asdict(config),
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
        "seconds": round(seconds_trained(work_dir / "log.jsonl")),
        "hardware": hardware_line(),
        "heldout": heldout_accuracy(model, tokenizer, heldout),
    }
    (output_dir / "pretraining.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    run_app(app)
