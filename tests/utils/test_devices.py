"""Memory that new allocations can take."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkv.utils import devices

HELD = {"memory.current": "900000", "memory.stat": "anon 500000\ninactive_file 300000"}


@pytest.mark.parametrize(("limit", "expected"), [("1000000", 400_000), ("800000", 200_000)])
def test_a_container_has_what_its_limit_leaves(
    limit: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    of_the_host = devices.available_memory()
    if not of_the_host:
        pytest.skip("this system does not say what is free")
    for name, content in (HELD | {"memory.max": limit}).items():
        (tmp_path / name).write_text(content)
    assert devices.available_memory() == expected
    (tmp_path / "memory.max").write_text("max")
    assert devices.available_memory() > expected
