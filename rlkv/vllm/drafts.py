"""Mode lossless in the engine: the served model drafts for itself, its compressible heads cut.

The engine's proposer for a draft model gets the served model in its place: no second copy of the
weights, and no second cache.  A draft writes its keys and values into the request's own slots, and
the verification, which reads the same tokens with all heads, writes them again before anybody
else reads them.  So what is cached is the full model's, and so is the text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from rlkv.vllm.plugin import wrap_once


class HeadDraftProposer(DraftModelProposer):
    """Drafts token by token from what a step has accepted, one query for each request.

    Nothing is read again: keys and values before the first query are the verified ones.
    """

    prompt_R: Tensor  # tokens of the requests' prompts, which may be protected

    def load_model(self, target_model: Any) -> None:
        self.model = target_model
        # layers with metadata of their own while drafting
        self._draft_attn_layer_names = {*target_model.rlkv_drafts}

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: Tensor,
        requests: Any,
        gpu_input_batch: Any,
        discard_request_mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        prompts = gpu_input_batch.num_prompt_tokens[: gpu_input_batch.num_reqs]
        self.prompt_R = torch.from_numpy(prompts.copy()).int().to(self.device)
        return super().prepare_next_token_ids_padded(
            sampled_token_ids, requests, gpu_input_batch, discard_request_mask
        )

    def propose(self, *args: Any, **kwargs: Any) -> Tensor:
        # the first pass has left out what was rejected: its lengths are exact
        return super().propose(*args, **(kwargs | {"num_rejected_tokens_gpu": None}))

    def set_inputs_first_pass(
        self,
        target_token_ids: Tensor,
        next_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        token_indices_to_sample: Tensor | None,
        cad: Any,
        num_rejected_tokens_gpu: Tensor | None,
    ) -> tuple[int, Tensor, Any]:
        """Place each request's next token behind its last accepted one."""
        rows = cad.batch_size()
        last_R = cad.query_start_loc[1:] - 1
        if token_indices_to_sample is not None:
            last_R = token_indices_to_sample
        position_R = target_positions[last_R.long()] + 1
        self.input_ids[:rows] = next_token_ids
        self.positions[:rows] = position_R
        block_R = cad.block_table_tensor.gather(1, (position_R // self.block_size)[:, None])[:, 0]
        slot_R = block_R.long() * self.block_size + position_R % self.block_size
        starts = torch.arange(rows + 1, dtype=torch.int32)
        first = cad.replace(
            num_actual_tokens=rows,
            max_query_len=1,
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=(position_R + 1).int(),
            seq_lens_cpu_upper_bound=cad.seq_lens_cpu_upper_bound + 1,
            max_seq_len=cad.max_seq_len + 1,
            slot_mapping=slot_R,
            rswa_prefix_lens=self.prompt_R,
        )
        return rows, starts[:-1].to(self.device), first


def draft_with_heads() -> None:
    """Let the engine's proposer for a draft model draft with the served model, if that asks so."""

    def load_model(stock: Any, self: Any, target_model: Any) -> None:
        # the runner makes its proposer before it loads the model
        if hasattr(target_model, "rlkv_drafts"):
            self.__class__ = HeadDraftProposer
            self.load_model(target_model)
        else:
            stock(self, target_model)

    wrap_once(DraftModelProposer, "load_model", load_model)


def mend_sampling() -> None:
    """Give each verified token its request's temperature, top_k and top_p.

    vLLM 0.31 to 0.33 writes them to a copy on a CPU and drops it, and the sampler takes what was in
    memory (``_expand_kernel_impl`` in vllm/utils/cpu_triton_utils.py).  And in a step that
    verifies nothing, such as that of a prompt, it ends at the largest of no top_k.
    """
    rejection_sampler.expand_batch_to_tokens = _expand
    rejection_sampler.apply_sampling_constraints = _constrain


_stock_constrain = rejection_sampler.apply_sampling_constraints


def _constrain(logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any) -> Tensor:
    if logits.shape[0] == 0:
        return logits
    return _stock_constrain(logits, cu_num_draft_tokens, sampling_metadata)


def _expand(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat the value of each request for its tokens: ``[num_tokens]``."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    found = x.where(x != replace_from, replace_to)
    return found.repeat_interleave(counts, output_size=num_tokens)
