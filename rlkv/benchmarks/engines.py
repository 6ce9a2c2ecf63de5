"""A process with two vLLM engines that take a few steps each by turns.

What slows the machine down for a while slows both: their ratio varies by a hundredth or two where
that of processes of their own varies by a half.

    python -m rlkv.benchmarks.engines SPEC.json RESULT.json
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlkv.utils.files import write_json


@dataclass
class Spent:
    """Costs of all requests: seconds of an engine's own steps, how many, tokens written."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0


def step_by_turns(engines: Mapping[str, Any], at_once: int) -> dict[str, Spent]:
    """Let engines that have requests take ``at_once`` steps by turns until none is left.

    Each time another one begins.

    Returns:
        :class:`Spent` by name.
    """
    import torch  # after vLLM, which sets variables for it

    spent = {name: Spent() for name in engines}
    waiting = list(engines)
    while waiting:
        for name in waiting:
            engine = engines[name]
            own = spent[name]
            start = time.perf_counter()
            for _ in range(at_once):
                if not engine.has_unfinished_requests():
                    break
                own.steps += 1
                for request in engine.step():
                    if request.finished:
                        own.tokens += len(request.outputs[0].token_ids)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the engine may have a step in flight
            own.seconds += time.perf_counter() - start
        waiting = [name for name in waiting if engines[name].has_unfinished_requests()]
        waiting = waiting[1:] + waiting[:1]
    return spent


def main() -> None:
    """Run the requests of a spec and write what each engine took in each round."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM, SamplingParams

    models = {name: LLM(**options) for name, options in spec["engines"].items()}
    engines = {name: model.llm_engine for name, model in models.items()}

    def run(requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        for engine in engines.values():
            for number, (prompt, tokens) in enumerate(requests):
                sampling = SamplingParams(
                    temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
                )
                engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        spent = step_by_turns(engines, spec["turn_steps"])
        return {name: asdict(own) for name, own in spent.items()}

    run(spec["requests"][:2])  # the first steps of an engine are slower
    rounds = []
    for _ in range(spec["rounds"]):
        rounds.append(run(spec["requests"]))
    write_json(Path(sys.argv[2]), {"rounds": rounds})


if __name__ == "__main__":
    main()
