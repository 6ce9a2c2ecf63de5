"""A rollout engine of plain transformers with gates: what a rollout server serves where there is no vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from peft import get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from rlkv.attention import LocalSizes
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.gated import Rows, Sample, gate_version
from rlkv.training.head_gate import HeadGateConfig, gates_matrix, set_gates
from rlkv.training.rollout import roll_out


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
        """Sample under these gates from now on; their version.

        Raises:
            ValueError: for another shape.
        """
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
