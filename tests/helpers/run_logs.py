"""The logs of a made-up training run, as rlkv-train writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlkv.training.logs import GATES_LOG, LOG, SAMPLES_LOG, append_record
from rlkv.training.run_folder import RUN_CONFIG
from rlkv.utils.files import write_json

LAYERS, HEADS = 3, 4


def alpha_after(step: int) -> list[list[float]]:
    """Gates that fall at speeds of their own; no two are equal."""
    return [
        [max(0.0, 1 - 0.01 * step * (1 + 4 * layer + head)) for head in range(HEADS)]
        for layer in range(LAYERS)
    ]


def record(step: int, **changes: float) -> dict[str, Any]:
    """A record of ``log.jsonl`` (no figure is left out that an alert reads)."""
    gates = [value for row in alpha_after(step) for value in row]
    shares = {
        f"gates/below_{limit}": sum(value < limit for value in gates) / len(gates)
        for limit in (0.1, 0.5)
    }
    values = {
        "reward/mean": 0.8,
        "reward/zero_spread_share": 0.25,
        "response/length_mean": 100.0 + step,
        "response/truncated_share": 0.0,
        "penalty/beta_prime": 1e-3,
        "gates/mean": sum(gates) / len(gates),
        **shares,
        "train/skipped_steps": 0,
        "time/step_s": 2.0,
    }
    return {
        "step": step,
        **values,
        **{name.replace("__", "/"): value for name, value in changes.items()},
    }


def write_steps(folder: Path, first: int, last: int, total: int = 40) -> None:
    """Append the steps ``first`` to ``last``; the settings are written with step 1."""
    if first == 1:
        write_json(folder / RUN_CONFIG, {"model": "tiny", "finder": "rlkv", "max_steps": total})
    for step in range(first, last + 1):
        append_record(folder / LOG, step, record(step))
        append_record(folder / GATES_LOG, step, {"alpha": alpha_after(step)})


def write_sample(folder: Path, step: int, text: str, right: bool) -> None:
    row = {"problem": "1 + 1", "answer": "2", "text": text, "right": right, "tokens": 7}
    append_record(folder / SAMPLES_LOG, step, row)
