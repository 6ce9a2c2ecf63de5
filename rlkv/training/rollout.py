"""Rollouts of the training loop: completions sampled under the current gates.

The trainer's own model samples, vLLM in this process, or a server on another GPU.  With an engine all prompts of a step
go through the main process, so that one client sets the gates and one list of rows is sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list, gather_object
from peft import get_peft_model
from torch import Tensor
from transformers import Cache, PreTrainedModel

from rlkv.attention import LocalSizes
from rlkv.cache.growing import full_cache
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.decoding import Decoding, Row
from rlkv.rollout.estimate import DEFAULT_KV_GIB
from rlkv.rollout.gated import GatedEngine, Rows, Sample, gate_version
from rlkv.training.config import DEFAULT_ROWS
from rlkv.training.head_gate import HeadGateConfig, gates_matrix, set_gates

if TYPE_CHECKING:
    from rlkv.training.config import GateTrainingArguments, RLKVSettings


def roll_out(
    model: PreTrainedModel, rows: Rows, sampling: SamplingParams, eos_ids: list[int], pad_id: int, max_rows: int
) -> Iterator[Row]:
    """A completion per row, in the order of their ends.

    Args:
        model: in eval mode, on its device.
        rows: their numbers count among the rows of all processes, ``rows.rollout`` since the start of training.
        max_rows: rows decoded at once.
    """

    def new_cache(limit: int, rows: list[int]) -> Cache:
        return full_cache(model.config, limit)

    decoding = Decoding(model, sampling, eos_ids, pad_id, max_rows, new_cache, rollout=rows.rollout, logprobs=True)
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


def open_engine(settings: RLKVSettings, args: GateTrainingArguments, longest_prompt: int) -> GatedEngine | None:
    """The engine that ``settings.rollout`` names; None for ``hf``, where the trainer's own model samples.

    Raises:
        ValueError: if the engine is not installed, cannot be reached, or does not fit the settings.
    """
    if settings.rollout == "hf":
        return None
    sizes = LocalSizes(settings.sink, settings.window)
    positions = longest_prompt + (args.max_completion_length or 0)
    if settings.rollout == "vllm-server":
        from rlkv.rollout.client import RolloutClient

        client = RolloutClient(settings.rollout_url, settings.rollout_patience)
        client.check(sizes, positions)
        return client
    if args.world_size > 1:
        raise ValueError(
            f"--rollout vllm samples in the trainer's process and takes one process, not {args.world_size}: start "
            "rollout/serve_vllm.py on a GPU of its own and train with --rollout vllm-server"
        )
    from rlkv.vllm.engine import VLLMEngine

    return VLLMEngine(
        settings.model,
        sizes,
        settings.dtype,
        max_positions=positions,
        kv_gib=settings.rollout_kv_gib or DEFAULT_KV_GIB,
        max_rows=settings.rollout_rows or DEFAULT_ROWS,
        enforce_eager=settings.rollout_eager,
    )


def engine_roll_out(
    engine: GatedEngine | None,
    accelerator: Any,
    alpha_LH: Tensor,
    prompts: list[list[int]],
    rollout: int,
    sampling: SamplingParams,
    eos_ids: list[int],
) -> list[tuple[list[int], list[float]]]:
    """:func:`roll_out` of this process's prompts through ``engine``, which only the main process has."""
    everything: list[list[int]] = gather_object(prompts)
    outcome: list[Any] = [None]
    if accelerator.is_main_process:
        assert engine is not None
        version = engine.set_gates(alpha_LH)
        rows = Rows(everything, list(range(len(everything))), rollout)
        samples = dict(engine.sample(rows, sampling, eos_ids))
        assert sorted(samples) == list(range(len(everything))), "a prompt of the step is lost"
        assert {sample.version for sample in samples.values()} == {version}, "samples of other gates than the trainer's"
        outcome = [[(samples[i].token_ids, samples[i].logprobs) for i in range(len(everything))]]
    outcome = broadcast_object_list(outcome)
    first = accelerator.process_index * len(prompts)
    return outcome[0][first : first + len(prompts)]
