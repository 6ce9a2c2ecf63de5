"""Rollouts of the training loop: completions sampled under the current gates.

The trainer's own model samples, vLLM in this process, or a server on another GPU.  With an engine all prompts of a step
go through the main process, so that one client sets the gates and one list of rows is sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from transformers import Cache, PreTrainedModel

from rlkv.attention import LocalSizes
from rlkv.cache.growing import full_cache
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.decoding import Decoding, Row
from rlkv.rollout.gated import GatedEngine, Rows

if TYPE_CHECKING:
    from rlkv.training.config import GateTrainingArguments, RLKVSettings

# mean |difference| of log-probabilities above which two engines hold different models; rounding in bf16 gives ~0.02
SAME_MODEL = 0.5


def roll_out(
    model: PreTrainedModel, rows: Rows, sampling: SamplingParams, eos_ids: list[int], pad_id: int, max_rows: int
) -> Iterator[Row]:
    """A completion per row, in the order of their ends.

    Args:
        model: in eval mode, on its device.
        rows: their numbers count among the rows of all processes, ``rows.rollout`` since the start of training.
        max_rows: rows decoded at once.
    """

    def new_cache(limit: int) -> Cache:
        return full_cache(model.config, limit)

    decoding = Decoding(model, sampling, eos_ids, pad_id, max_rows, new_cache, rollout=rows.rollout, logprobs=True)
    return decoding.run(rows.prompts, rows.numbers)


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
        kv_gib=settings.rollout_kv_gib,
        max_rows=settings.rollout_rows,
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


def check_same_model(difference: float) -> None:
    """Raise ``ValueError`` if the engine's log-probabilities are those of another model, or of other gates."""
    if difference > SAME_MODEL:
        raise ValueError(
            f"the log-probabilities of the rollouts differ from the trainer's by {difference:.2f} on average: the "
            "rollout engine must serve the same model with the same sink and window"
        )
