"""Mixed attention for transformers: ``alpha * full + (1 - alpha) * local`` per KV head, with no patch of the model.

Importing this package registers the attention implementation :data:`IMPLEMENTATION`; the gates themselves come
from :class:`rlkv.training.head_gate.HeadGateConfig`.
"""

from rlkv.attention.call import LocalSizes
from rlkv.attention.mixed import IMPLEMENTATION, Gate

__all__ = ["IMPLEMENTATION", "Gate", "LocalSizes"]
