"""Shared fixture: the tiny models with the attention that the cache needs."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from rlkv.cache import IMPLEMENTATION


@pytest.fixture
def realloc_model(tiny_model: PreTrainedModel) -> PreTrainedModel:
    tiny_model.set_attn_implementation(IMPLEMENTATION)
    return tiny_model
