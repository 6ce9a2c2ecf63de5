"""Shared fixtures: tiny random decoders of three families."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from tests.helpers.models import FAMILIES, make_tiny_model

# models this small lose more by waking threads than they win; workers of a parallel run have one core each
torch.set_num_threads(1)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tiny_model(family: str) -> PreTrainedModel:
    """One random model per family; tests that use it run once for each."""
    return make_tiny_model(family)
