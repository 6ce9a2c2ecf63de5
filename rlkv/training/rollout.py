"""Rollouts of the training loop: completions sampled under the current gates.

The trainer's own model samples, vLLM in each process, or servers on other GPUs, which the main process asks for the
rows of all processes, so that one client sets the gates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from peft import get_peft_model
from torch import Tensor
from transformers import Cache, PreTrainedModel

from rlkv.attention import LocalSizes
from rlkv.cache.growing import full_cache
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.decoding import Decoding, Row
from rlkv.rollout.estimate import DEFAULT_KV_GIB
from rlkv.rollout.gated import GatedEngine, Rows, Sample, gate_version
from rlkv.training.head_gate import HeadGateConfig, gates_matrix, set_gates

if TYPE_CHECKING:
    from rlkv.training.config import GateTrainingArguments, RLKVSettings


def roll_out(
    model: PreTrainedModel,
    rows: Rows,
    sampling: SamplingParams,
    eos_ids: list[int],
    pad_id: int,
    max_rows: int,
    sharded: bool = False,
) -> Iterator[Row]:
    """A completion per row, in the order of their ends.

    Args:
        model: in eval mode, on its device.
        rows: their numbers count among the rows of all processes, ``rows.rollout`` since the start of training.
        max_rows: rows decoded at once.
        sharded: as of :class:`~rlkv.rollout.decoding.Decoding`.
    """

    def new_cache(limit: int, rows: list[int]) -> Cache:
        return full_cache(model.config, limit)

    decoding = Decoding(
        model, sampling, eos_ids, pad_id, max_rows, new_cache, rows.rollout, logprobs=True, sharded=sharded
    )
    return decoding.run(rows.prompts, rows.numbers)


class GatedHFEngine:
    """A :class:`~rlkv.rollout.gated.GatedEngine`: ``max_rows`` rows at once, as in the training loop."""

    def __init__(self, model: PreTrainedModel, sizes: LocalSizes, pad_id: int, max_rows: int = 64) -> None:
        """``model`` should be on its device; all gates are 1 at first."""
        self.model = get_peft_model(model, HeadGateConfig(sink=sizes.sink, window=sizes.window)).eval()
        self.pad_id, self.max_rows = pad_id, max_rows

    def gates(self) -> Tensor:
        """Float32 ``[num_layers, num_kv_heads]``."""
        return gates_matrix(self.model)

    def set_gates(self, alpha_LH: Tensor) -> str:
        """Sample under these gates from now on; their version; ``ValueError`` for another shape."""
        expected = self.gates().shape
        if alpha_LH.shape != expected:
            raise ValueError(f"the model has gates {list(expected)}, got {list(alpha_LH.shape)}")
        set_gates(self.model, alpha_LH)
        return gate_version(self.gates())

    def sample(self, rows: Rows, sampling: SamplingParams, eos_ids: list[int]) -> Iterator[tuple[int, Sample]]:
        """Yield ``(index into rows.prompts, sample)`` as rows end, the longest prompts first."""
        base: Any = self.model.get_base_model()
        version = gate_version(self.gates())
        for row in roll_out(base, rows, sampling, eos_ids, self.pad_id, self.max_rows):
            assert row.finish_reason is not None
            yield row.index, Sample(row.token_ids, row.logprobs, row.finish_reason, version)


@contextmanager
def open_engine(
    settings: RLKVSettings, args: GateTrainingArguments, longest_prompt: int
) -> Iterator[GatedEngine | None]:
    """What samples in this process instead of the trainer's own model: an engine, or for the main one a client.

    At the end an engine gives its memory back, unless the trainer has a process group.

    Raises:
        ValueError: if the engine is not installed, a server cannot be reached, or it does not fit the settings.
    """
    sizes = LocalSizes(settings.sink, settings.window)
    positions = longest_prompt + (args.max_completion_length or 0)
    if settings.rollout == "vllm-server" and args.process_index == 0:
        from rlkv.rollout.client import RolloutClient

        client = RolloutClient(settings.servers, settings.rollout_patience)
        client.check(sizes, positions)
        yield client
        return
    if settings.rollout != "vllm":
        yield None
        return
    from rlkv.training.config import DEFAULT_ROWS
    from rlkv.vllm.engine import VLLMEngine

    # vLLM ends any process group with its own: also the trainer's, which it then uses too
    alone = not torch.distributed.is_initialized()
    engine = VLLMEngine(
        settings.model,
        sizes,
        settings.dtype,
        max_positions=positions,
        kv_gib=settings.rollout_kv_gib or DEFAULT_KV_GIB,
        max_rows=settings.rollout_rows or DEFAULT_ROWS,
        enforce_eager=settings.rollout_eager,
    )
    with closing(engine) if alone else nullcontext():
        yield engine


def judged(
    ended: Iterable[tuple[int, Sample]], judge: Callable[[list[tuple[int, Sample]]], Sequence[float]]
) -> tuple[list[tuple[Sample, float]], float]:
    """Samples in the order of their indices with what ``judge`` says of them, on another thread while others decode.

    Those that end while it judges are its next batch, so that the verifier's processes share them.

    Returns:
        Them, and the seconds for which ``judge`` was waited for at the end.
    """
    arrived: SimpleQueue[tuple[int, Sample]] = SimpleQueue()
    found: dict[int, tuple[Sample, float]] = {}

    def judge_arrived() -> None:
        if batch := [arrived.get() for _ in range(arrived.qsize())]:
            for (index, sample), verdict in zip(batch, judge(batch), strict=True):
                found[index] = sample, verdict

    thread, calls = ThreadPoolExecutor(1, "judge"), []
    try:
        for item in ended:
            arrived.put(item)
            calls.append(thread.submit(judge_arrived))
        waiting = time.perf_counter()
        for call in calls:
            call.result()
        return [found[index] for index in sorted(found)], time.perf_counter() - waiting
    finally:  # an error or a signal does not wait for verdicts
        thread.shutdown(wait=False, cancel_futures=True)
