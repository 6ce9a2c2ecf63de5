"""Sparsity sweep: rankings of heads x sparsities, each cell measured once and appended to a file at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlkv.evaluation.heads.measure import CacheSettings, HeadResult, measure
from rlkv.evaluation.run.fingerprint import library_facts, model_facts
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from rlkv.utils.store import open_store

Order = list[tuple[int, int]]


@dataclass(frozen=True)
class Cell:
    """One measurement to make: a method at a sparsity; ``seed`` numbers its runs or draws if there are several."""

    method: str
    sparsity: float
    seed: int | None
    allocation: HeadAllocation

    @property
    def key(self) -> tuple[str, float, int | None]:
        return self.method, self.sparsity, self.seed


def plan_sweep(
    shape: ModelShape,
    sparsities: list[float],
    gates: dict[str, list[HeadGates]],
    orders: dict[str, Order],
    random_draws: int,
) -> Iterator[Cell]:
    """The full cache once, then at every sparsity each gates file, each measured order and the random draws.

    ``gates`` has a list per method: several are runs of the same method, numbered as seeds.
    ``orders`` list (layer, head) from the head that can go first to the one that goes last.
    """
    layers, heads = shape.num_layers, shape.num_kv_heads
    yield Cell("full cache", 0.0, None, HeadAllocation.from_order([], layers, heads, 0.0))
    for sparsity in (s for s in sparsities if s > 0):
        for name, rankings in gates.items():
            for seed, ranking in enumerate(rankings):
                number = seed if len(rankings) > 1 else None
                yield Cell(name, sparsity, number, HeadAllocation.from_gates(ranking, sparsity))
        for name, order in orders.items():
            yield Cell(name, sparsity, None, HeadAllocation.from_order(order, layers, heads, sparsity))
        for seed in range(random_draws):
            yield Cell("random heads", sparsity, seed, HeadAllocation.random(layers, heads, sparsity, seed))


def run_sweep(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[dict[str, str]],
    cells: list[Cell],
    settings: CacheSettings,
    rows_file: Path,
    fingerprint: dict[str, Any],
    on_row: Callable[[int, HeadResult], None],
) -> list[HeadResult]:
    """Measure what ``rows_file`` does not hold yet; every row is flushed as it is made.

    Raises:
        ValueError: if ``rows_file`` was written with other settings, weights, code or libraries (it is left as it is).
    """
    fingerprint = {**fingerprint, **asdict(settings), "model_state": model_facts(model), "libraries": library_facts()}
    fingerprint["problems"] = hashlib.sha256(json.dumps(problems).encode()).hexdigest()
    fingerprint["cells"] = [[*cell.key, cell.allocation.full.int().flatten().tolist()] for cell in cells]
    with open_store(rows_file, fingerprint, ("method", "sparsity", "seed")) as log:
        rows = [HeadResult(**row) for row in log.rows]
        done = {(r.method, r.sparsity, r.seed) for r in rows}
        for i, cell in enumerate(cells):
            if cell.key not in done:
                row = measure(model, tokenizer, problems, cell.allocation, settings).row(*cell.key)
                rows.append(row)
                log.append(row.to_dict())
            on_row(i + 1, rows[-1])
    order = {cell.key: i for i, cell in enumerate(cells)}
    return sorted(rows, key=lambda r: order[(r.method, r.sparsity, r.seed)])
