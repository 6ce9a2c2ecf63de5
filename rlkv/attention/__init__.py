"""Mixed attention: ``alpha * full + (1 - alpha) * local`` per KV head.

Registers ``rlkv_mixed`` with transformers.
"""

from rlkv.attention.call import LocalSizes
from rlkv.attention.mixed import IMPLEMENTATION, Gate

__all__ = ["IMPLEMENTATION", "Gate", "LocalSizes"]
