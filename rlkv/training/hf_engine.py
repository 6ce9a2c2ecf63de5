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
    """A :class:`~rlkv.rollout.gated.GatedEngine`: ``max_rows`` rows at once, as in the training loop."""

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
        """Yield ``(index into rows.prompts, sample)`` as rows end, the longest prompts first."""
        base: Any = self.model.get_base_model()
        version = gate_version(self.gates())
        for row in roll_out(base, rows, sampling, eos_ids, self.pad_id, self.max_rows):
            assert row.finish_reason is not None
            yield row.index, Sample(row.token_ids, row.logprobs, row.finish_reason, version)
