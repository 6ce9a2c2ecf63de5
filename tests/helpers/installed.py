"""A vLLM that seems to be installed, or absent."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from rlkv.vllm import plugin

GPU_BUILD = f"{plugin.TESTED[-1]}.0"
CPU_BUILD = f"{GPU_BUILD}+cpu"


def pretend_vllm(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    """Act as if ``vllm`` of version ``found`` (None: none) were installed, and no GPU."""

    def version(name: str) -> str:
        if found is None or name != "vllm":
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(plugin, "version", version)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
