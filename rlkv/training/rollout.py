"""Rollouts of the training loop: completions sampled under the current gates.

The trainer's own model samples, vLLM in this process, or a server on another GPU.  With an engine all prompts of a step
go through the main process, so that one client sets the gates and one list of rows is sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from peft import get_peft_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlkv.attention import LocalSizes
from rlkv.cache.growing import growing_cache
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.draws import draw_tokens, row_draws, token_logprobs
from rlkv.rollout.gated import GatedEngine, Rows, Sample, gate_version
from rlkv.training.head_gate import HeadGateConfig, gates_matrix, set_gates

if TYPE_CHECKING:
    from rlkv.training.config import GateTrainingArguments, RLKVSettings

SHRINK_AT = 0.75  # share of unfinished rows below which the others are dropped from the batch


def roll_out(
    model: PreTrainedModel, rows: Rows, sampling: SamplingParams, eos_ids: list[int], pad_id: int, max_rows: int
) -> list[tuple[list[int], list[float]]]:
    """``(token ids, log-probabilities)`` of a completion per row: with the end token, without padding.

    Unlike ``model.generate`` this drops rows that have ended from the batch, writes keys and values into a growing
    buffer, and draws tokens per row (:mod:`rlkv.rollout.draws`).

    Args:
        model: in eval mode, on its device.
        rows: their numbers count among the rows of all processes, ``rows.rollout`` since the start of training.
        max_rows: rows decoded at once.
    """
    draws_RT = row_draws(sampling.seed, rows.rollout, rows.numbers, sampling.max_new_tokens)
    order = sorted(range(len(rows.prompts)), key=lambda i: -len(rows.prompts[i]))
    completions: dict[int, tuple[list[int], list[float]]] = {}
    for start in range(0, len(order), max_rows):
        chunk = order[start : start + max_rows]
        found = _decode(model, [rows.prompts[i] for i in chunk], draws_RT[chunk], sampling, eos_ids, pad_id)
        completions.update(zip(chunk, found, strict=True))
    return [completions[i] for i in range(len(order))]


@torch.inference_mode()
def _decode(
    model: PreTrainedModel,
    prompts: list[list[int]],
    draws_RT: Tensor,
    sampling: SamplingParams,
    eos_ids: list[int],
    pad_id: int,
) -> list[tuple[list[int], list[float]]]:
    device = model.device
    width = max(len(ids) for ids in prompts)
    token_RQ = torch.tensor([[pad_id] * (width - len(ids)) + ids for ids in prompts], device=device)
    mask_RT = torch.ones(len(prompts), width + sampling.max_new_tokens, dtype=torch.bool, device=device)
    for row, ids in enumerate(prompts):
        mask_RT[row, : width - len(ids)] = False
    position_RQ = (mask_RT[:, :width].cumsum(-1) - 1).clamp(min=0)
    draws_RT = draws_RT.to(device)
    ends = torch.tensor(eos_ids, device=device)
    sampled = torch.full((len(prompts), sampling.max_new_tokens), pad_id, device=device)
    logprobs = torch.zeros(sampled.shape, device=device)
    lengths = torch.full((len(prompts),), sampling.max_new_tokens, device=device)
    in_batch = torch.arange(len(prompts), device=device)  # row of ``prompts`` that each row of the batch is
    running = torch.ones(len(prompts), dtype=torch.bool, device=device)
    cache = growing_cache(model.config, width + sampling.max_new_tokens)
    if cache is None:
        cache = DynamicCache(config=model.config)  # sliding and linear layers have their own kinds
    for step in range(sampling.max_new_tokens):
        logits = model(
            input_ids=token_RQ,
            attention_mask=mask_RT[in_batch, : width + step],
            position_ids=position_RQ,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        token_R = draw_tokens(logits, draws_RT[in_batch, step], sampling.temperature, sampling.top_p, sampling.top_k)
        sampled[in_batch[running], step] = token_R[running]
        logprobs[in_batch, step] = token_logprobs(logits, token_R, sampling.temperature)
        ended = running & torch.isin(token_R, ends)
        lengths[in_batch[ended]] = step + 1
        running &= ~ended
        left = int(running.sum())
        if left == 0:
            break
        if left <= SHRINK_AT * len(running):
            keep = running.nonzero()[:, 0]
            cache.batch_select_indices(keep)
            in_batch, running, token_R, position_RQ = in_batch[keep], running[keep], token_R[keep], position_RQ[keep]
        token_RQ, position_RQ = token_R[:, None], position_RQ[:, -1:] + 1
    rows = zip(sampled.tolist(), logprobs.tolist(), lengths.tolist(), strict=True)
    return [(ids[:length], values[:length]) for ids, values, length in rows]


class GatedHFEngine:
    """A :class:`~rlkv.rollout.gated.GatedEngine`: completions in batches of ``max_rows``, as in the training loop."""

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
        """Yield ``(index into rows.prompts, sample)``, batch by batch, the longest prompts first."""
        base: Any = self.model.get_base_model()
        version = gate_version(self.gates())
        order = sorted(range(len(rows.prompts)), key=lambda i: -len(rows.prompts[i]))
        for start in range(0, len(order), self.max_rows):
            indices = order[start : start + self.max_rows]
            found = roll_out(base, rows.only(indices), sampling, eos_ids, self.pad_id, self.max_rows)
            for index, (ids, logprobs) in zip(indices, found, strict=True):
                yield index, Sample(ids, logprobs, "stop" if ids[-1] in eos_ids else "length", version)


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
