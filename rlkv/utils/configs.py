"""The YAML files of ``configs/``, which are part of the package: found by name after ``pip install`` too."""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def packaged() -> list[str]:
    """Names of the packaged configs."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def find_config(name: str) -> Path:
    """The YAML file that ``name`` means: a path, or a packaged file such as ``llama8b``.

    Raises:
        ValueError: if there is neither; the packaged names are listed.
    """
    for path in (Path(name), CONFIGS / f"{name}.yaml"):
        if path.is_file():
            return path
    raise ValueError(f"--config {name}: no such file, and no packaged config of this name: {', '.join(packaged())}")
