r"""Measure the order of the heads that the gates keep, for sparsities where gates are uncertain.

    python inference/rerank_heads.py --gates outputs/tiny/gates.pt \
        --curriculum results/curriculum/curriculum.parquet --output outputs/tiny/reranked.pt

Heads that are full at sparsity ``--low`` are made compressible one by one up to ``--high``, each
time the one without which recorded solutions are predicted most as with the full cache.  The gates'
numbers are handed out in the new order, so the result is used as any gates file; below ``--low``
nothing changes.  It reads the curriculum that the gates were trained on, with the recorded outputs.

It takes about half a pass over the solutions per head that is full at ``--low``, and one to three
per head that goes; the gates file keeps how many, in ``training["reranked"]``: ``passes``, and
``cpu_seconds`` of all threads.  Without gates: ``rlkv-train --finder elimination``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rlkv.cli.app import parse, run_app
from rlkv.data.problems import curriculum_template
from rlkv.gates.formats import SUFFIXES
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.options import ModelOptions, check_least
from rlkv.models.prompts import choose_template
from rlkv.utils.files import check_new


@dataclass(frozen=True, kw_only=True)
class RerankConfig(ModelOptions):
    """Measure the order of the heads that the gates keep."""

    gates: str
    """gates file whose order is refined"""
    curriculum: Path
    """the filter's .parquet or .jsonl, with recorded outputs"""
    output: Path
    """gates file to write; its suffix is the format"""
    overwrite: bool = False
    """replace --output if it exists"""
    low: float = 0.25
    """sparsity up to which the gates are trusted"""
    high: float = 0.8
    """sparsity up to which heads are measured"""
    num_traces: int = 32
    """solutions that are teacher-forced"""
    budget: float = 3.0
    """most passes over the solutions, per head of the model"""
    rows: int = 16
    """solutions of one forward"""
    prefill: Literal["full", "local"] = "full"
    """how prompts are read when serving"""
    seed: int = 0
    """of the drawn traces"""
    model: str = ""
    """tiny, a folder or a hub id; default: the one of the gates"""
    template: str | None = None
    """prompt template: rlkv, boxed or plain; default: the curriculum's, the gates', or rlkv"""

    def check(self) -> None:
        if self.output.suffix not in SUFFIXES:  # not after hours
            raise ValueError(f"--output {self.output} must end with {', '.join(SUFFIXES)}")
        check_new(self.output, self.overwrite)
        check_least(self, 0, "budget")
        check_least(self, 1, "num_traces", "rows")


def main() -> None:
    config = parse(RerankConfig, __doc__)
    from rlkv.training.elimination import rerank_on_traces
    from rlkv.training.solutions import draw_traces, read_traces

    found = HeadGates.load(config.gates)
    name = config.model or found.model_id
    if not name:
        raise ValueError(f"{config.gates} names no model: pass --model")
    model, tokenizer = replace(config, model=name).load()
    found.check_model(model.config)
    template = choose_template(
        config.template,
        None if config.template else curriculum_template(config.curriculum),
        found.training.get("template"),
        model=model.config._name_or_path,
    )
    recorded = read_traces(str(config.curriculum), tokenizer, template)
    traces, _ = draw_traces(recorded, config.num_traces, config.seed)
    result = rerank_on_traces(
        model,
        traces,
        found,
        config.low,
        config.high,
        budget=config.budget,
        rows=config.rows,
        prefill=config.prefill,
    )
    result.training["reranked"]["seed"] = config.seed
    result.save(config.output)
    print(f"written to {config.output}: {result.training['reranked']}")


if __name__ == "__main__":
    run_app(main)
