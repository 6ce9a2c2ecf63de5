"""What training gates adds to a forward and backward pass: mixed attention against the model's own, by text length.

Both passes go down to the embeddings, and both take log-probabilities of the whole text from an output layer in
chunks (:mod:`rlkv.benchmarks.check.update`); the stock model has no gates.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor

from rlkv.benchmarks.agreement import ALLOWED_OF_MODELS, relative_error
from rlkv.benchmarks.check.update import plain_score
from rlkv.benchmarks.train_step_config import TrainStepConfig
from rlkv.benchmarks.turns import peak_bytes, timed, turns
from rlkv.evaluation.report.plots import Panel, Point
from rlkv.training.head_gate import HeadGateConfig, gates_matrix, set_gates
from rlkv.training.logprobs import completion_logprobs
from rlkv.utils.progress import progress_bar

STOCK, GATED = "stock", "gates"
COLUMNS = {
    "tokens": "{tokens}",
    "model": "{model}",
    "s": "{seconds:.2f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "time / stock": "{over_stock:.2f}",
    "peak bytes beyond the weights": "{peak_bytes:,}",
    "": "{note}",
}


@dataclass
class Contender:
    """A model, and the seconds of its passes over each length."""

    name: str
    model: Any
    times: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    peaks: dict[int, int] = field(default_factory=dict)

    def logprobs(self, ids: Tensor) -> Tensor:
        """Log-probabilities of all tokens but the first, ``[1, T - 1]``; ids: int64 ``[1, T]``."""
        base = self.model.get_base_model() if self.name == GATED else self.model
        return completion_logprobs(plain_score(base), ids, torch.ones_like(ids), ids.shape[1] - 1, 1)

    def step(self, ids: Tensor) -> None:
        """One forward and backward pass."""
        self.logprobs(ids).mean().backward()
        self.model.zero_grad()


def _contenders(config: TrainStepConfig) -> list[Contender]:
    found = []
    for name in (STOCK, GATED):
        model: Any = config.build_model(max(config.lengths))
        model.requires_grad_(False)
        if name == GATED:
            model = get_peft_model(model, HeadGateConfig(sink=config.sink, window=config.window))
        model.enable_input_require_grads()  # both pass back to the embeddings, as with checkpointing
        if config.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        found.append(Contender(name, model.train()))
    return found


def _difference(contenders: list[Contender], ids: Tensor) -> float:
    """Relative difference of the log-probabilities with all gates at 1, which is the stock model."""
    stock, gated = contenders
    gates = gates_matrix(gated.model)
    set_gates(gated.model, torch.ones_like(gates))
    with torch.no_grad():
        error = relative_error(gated.logprobs(ids), stock.logprobs(ids))
    set_gates(gated.model, torch.full_like(gates, 0.5))
    return error


def measure_train_step(config: TrainStepConfig) -> list[dict[str, Any]]:
    """A row for each length and model, which take turns."""
    contenders, results = _contenders(config), []
    device = config.options["device"]
    with progress_bar("train-step", "turns", len(config.lengths) * config.rounds * len(contenders)) as bar:
        for length in config.lengths:
            ids = torch.randint(0, config.vocabulary, (1, length), device=device)
            error = _difference(contenders, ids)
            for contender in turns(contenders, config.rounds):
                step = partial(contender.step, ids)
                if length not in contender.peaks:
                    step()  # warms up, and compiles
                    contender.peaks[length] = peak_bytes(step, device)
                contender.times[length].append(timed(step, device))
                bar.advance()
            results += [_row(contender, length, error, contenders[0]) for contender in contenders]
    return results


def _row(contender: Contender, length: int, error: float, stock: Contender) -> dict[str, Any]:
    seconds = statistics.median(contender.times[length])
    row: dict[str, Any] = {"tokens": length, "model": contender.name, "seconds": seconds, "error": error, "note": ""}
    row |= {"tokens_per_second": length / seconds, "peak_bytes": contender.peaks[length]}
    if error > ALLOWED_OF_MODELS[contender.model.dtype]:
        return row | {"note": f"gates of 1 are not the stock model: log-probabilities differ by {error:.2g}"}
    return row | {"over_stock": seconds / statistics.median(stock.times[length])}


def run_train_step(config: TrainStepConfig) -> None:
    """``rlkv-bench train-step``: measure and write the results."""
    results = measure_train_step(config)
    curves: dict[str, list[Point]] = defaultdict(list)
    for row in results:
        curves[row["model"]].append((row["tokens"], *[row["seconds"]] * 3))
    panel = Panel("forward and backward", "tokens", curves, "seconds (median)", limits=None, log=True)
    config.write("train-step", results, COLUMNS, [panel])
