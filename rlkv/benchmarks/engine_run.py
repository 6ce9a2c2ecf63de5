"""One run of the serving benchmark, in its own process: python -m rlkv.benchmarks.engine_run
TASK.json RESULT.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from rlkv.benchmarks.workload import PERCENTILES, Workload
from rlkv.utils.files import write_json
from rlkv.vllm.settings import VARIABLES

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler is watched, so it lives in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


class Watch:
    """What the scheduler does: sums over its steps in ``totals``."""

    def __init__(self, scheduler: Any, block_bytes: int) -> None:
        self.scheduler, self.block_bytes, self.totals, self.most_running = (
            scheduler,
            block_bytes,
            Counter[str](),
            0,
        )
        self._schedule, scheduler.schedule = scheduler.schedule, self._watched

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            rows, pool = (
                len(output.num_scheduled_tokens),
                self.scheduler.kv_cache_manager.block_pool,
            )
            used = (
                pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
            )  # the engine sets one block aside
            self.most_running = max(self.most_running, rows)
            self.totals.update(
                steps=1,
                running=rows,
                preemptions=len(output.preempted_req_ids or ()),
                bytes_held=used * self.block_bytes,
                tokens_held=sum(request.num_computed_tokens for request in self.scheduler.running),
            )
        return output

    def reset(self) -> None:
        self.totals.clear()
        self.most_running = 0


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Serve all requests at once and say how it went, in seconds; they all arrive at the start.

    ``task``: ``workload``, ``setting``, ``model`` (a folder with a config), ``rlkv`` (settings of
    the plugin or None).
    """
    work = Workload.from_dict(task["workload"])
    engine = _start_engine(work, task)
    cache = engine.engine_core.engine_core.scheduler.kv_cache_config
    (pool_bytes,) = {tensor.size for tensor in cache.kv_cache_tensors}  # parts of one allocation
    watch = Watch(engine.engine_core.engine_core.scheduler, pool_bytes // cache.num_blocks)
    _serve(engine, work.prompts[:2], [8, 8], "warm-up")
    watch.reset()
    start = time.perf_counter()
    outputs = _serve(engine, work.prompts, work.output_lengths, "timed")
    seconds = time.perf_counter() - start
    made = [len(outputs[number].outputs[0].token_ids) for number in range(work.requests)]
    if made != work.output_lengths:
        raise RuntimeError(
            f"the engine made outputs of {made[:5]}... tokens instead of "
            f"{work.output_lengths[:5]}..."
        )
    totals, times = watch.totals, [output.metrics for output in outputs.values()]
    return {
        "seconds": seconds,
        "output_tokens": sum(made),
        "tokens_per_second": sum(made) / seconds,
        "steps": totals["steps"],
        "mean_running": totals["running"] / totals["steps"],
        "most_running": watch.most_running,
        "preemptions": totals["preemptions"],
        "bytes_per_token": totals["bytes_held"] / totals["tokens_held"],
        "pool_bytes": pool_bytes,
        "pool_tokens": engine.vllm_config.cache_config.kv_cache_size_tokens,
        "block_bytes": watch.block_bytes,
        "block_tables": len(cache.kv_cache_groups),
        "async_scheduling": bool(engine.vllm_config.scheduler_config.async_scheduling),
        **_percentiles("ttft", [found.first_token_ts - found.queued_ts for found in times]),
        **_percentiles("latency", [found.last_token_ts - found.queued_ts for found in times]),
    }


def _percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    return {f"{name}_p{share}": float(np.percentile(seconds, share)) for share in PERCENTILES}


def _start_engine(work: Workload, task: dict[str, Any]) -> Any:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.pop(
        "VLLM_CPU_KVCACHE_SPACE", None
    )  # the engine prefers it to the pool that is asked for
    for name in (
        VARIABLES.values()
    ):  # they would ask for head reallocation in the runs of the full cache too
        os.environ.pop(name, None)
    from vllm import LLM

    llm = LLM(
        task["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=work.dtype,
        enforce_eager=work.eager,
        max_model_len=work.positions,
        block_size=work.block_size,
        max_num_seqs=work.rows_of(task["setting"]),
        max_num_batched_tokens=work.step_tokens,
        kv_cache_memory_bytes=work.pool_bytes(task["setting"]),
        enable_prefix_caching=False,
        generation_config="vllm",
        seed=0,
        disable_log_stats=False,  # with it come the times of every request
        additional_config={"rlkv": task["rlkv"]} if task["rlkv"] else {},
    )
    return llm.llm_engine


def _serve(engine: Any, prompts: list[list[int]], lengths: list[int], name: str) -> dict[int, Any]:
    """Add all requests, step until all are finished; outputs by number of the request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    numbers = {f"{name} {number}": number for number in range(len(prompts))}
    for (request, number), length in zip(numbers.items(), lengths, strict=True):
        final = {
            "ignore_eos": True,
            "detokenize": False,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        params = SamplingParams(temperature=0, max_tokens=length, **final)
        engine.add_request(request, {"prompt_token_ids": prompts[number]}, params)
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[numbers[output.request_id]] = output
    return found


if __name__ == "__main__":
    write_json(sys.argv[2], run(json.loads(Path(sys.argv[1]).read_text())))
