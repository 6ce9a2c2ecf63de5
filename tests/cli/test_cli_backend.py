"""``rlkv-infer --backend``: what the one of vLLM does not do is said before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from rlkv.cli.infer_setup import check_backend

SERVED: dict[str, Any] = {
    "backend": "vllm",
    "chat": False,
    "show_kept": None,
    "compare_full": False,
    "device": "auto",
}


def test_what_works_passes() -> None:
    check_backend(**SERVED)
    check_backend(**{**SERVED, "backend": "hf", "chat": True, "compare_full": True})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "sglang"}, "unknown --backend 'sglang': choose one of hf, vllm"),
        ({"chat": True}, "needs --prompt or --input"),
        ({"show_kept": "page.html"}, "--show-kept does not work"),
        ({"compare_full": True}, "--compare-full does not work"),
        ({"device": "cpu"}, "--device does not work"),
    ],
)
def test_what_does_not_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_backend(**{**SERVED, **change})
