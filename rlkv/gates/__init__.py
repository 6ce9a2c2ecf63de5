"""Gates: which KV heads need the whole past, and the allocation that follows from a sparsity."""

from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates

__all__ = ["HeadAllocation", "HeadGates"]
