"""Options of the rollout server."""

from __future__ import annotations

import pytest

from tests.helpers.programs import load_program

SERVE = load_program("rollout/serve_vllm.py")


@pytest.mark.parametrize("kv_gib", [0, -1])
def test_no_memory_is_refused(kv_gib: float) -> None:
    with pytest.raises(ValueError, match=f"--kv-gib.* {kv_gib}"):
        SERVE.ServeConfig(kv_gib=kv_gib).check()
