"""The serving cache; registers the attention ``rlkv_realloc`` with transformers."""

from rlkv.cache.layer import IMPLEMENTATION
from rlkv.cache.plan import PREFILL_MODES, CacheSettings
from rlkv.cache.reallocation import HeadReallocationCache

__all__ = ["IMPLEMENTATION", "PREFILL_MODES", "CacheSettings", "HeadReallocationCache"]
