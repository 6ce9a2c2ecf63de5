"""Kill the filter job at random moments; used by test_filter_kill.py.

python -m tests.helpers.filter_kill_driver FOLDER KILLS
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlkv.data import filter as filter_job
from rlkv.data.filter import FilterConfig
from rlkv.rollout.base import Completion, SamplingParams
from rlkv.rollout.decoding import Row
from rlkv.rollout.hf import HFEngine
from tests.helpers.kill_rounds import run_and_kill
from tests.helpers.models import build_tokenizer, make_tiny_model

PROBLEMS = 120
NEW_TOKENS = 24
BATCH = 4


class BoxingEngine(HFEngine):
    """A random model that now and then answers, so that all statuses occur."""

    def _completion(self, row: Row) -> Completion:
        done = super()._completion(row)
        digest = sum((i + 1) * token for i, token in enumerate(done.token_ids))
        text = f"{done.text} \\boxed{{ {digest % 10} }}" if digest % 7 else done.text
        return Completion(done.token_ids, text, done.finish_reason)


def build_engine() -> BoxingEngine:
    tokenizer = build_tokenizer()
    model = make_tiny_model("llama", vocab_size=len(tokenizer), num_hidden_layers=1)
    # many ends: lengths vary
    model.generation_config.eos_token_id = list(range(0, len(tokenizer), 12))
    return BoxingEngine(model, tokenizer, batch_size=BATCH)


def job(folder: Path) -> None:
    config = FilterConfig(
        model="tiny",  # in name only: the hub is not asked
        input="tiny",
        num_problems=PROBLEMS,
        output_dir=str(folder),
        max_new_tokens=NEW_TOKENS,
        max_length=400,
        batch_size=BATCH,
        buckets=("0-4:5", "4-8:5", "8-16:5", "16-24:5"),
    )
    filter_job.run_filter(config)


def main(root: Path, kills_wanted: int) -> None:
    engine = build_engine()
    engine.generate(["find a ?"], SamplingParams(2))  # what generate imports on first use
    FilterConfig.load_engine = lambda config: engine  # type: ignore[method-assign]
    run_and_kill(root, kills_wanted, job, "shards/*.jsonl", PROBLEMS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
