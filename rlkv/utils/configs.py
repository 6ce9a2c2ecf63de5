"""The YAML files of ``configs/``, which are part of the package: found by name after ``pip
install`` too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def packaged(*kinds: Any) -> list[str]:
    """Names of the packaged configs that set nothing but fields of the dataclasses ``kinds``, a
    command's options.
    """
    keys = {field.name for kind in kinds for field in fields(kind)}
    return sorted(path.stem for path in CONFIGS.glob("*.yaml") if read_config(path).keys() <= keys)


def read_config(path: Path) -> dict[str, Any]:
    """The values of a YAML file by field; ``base:

    NAME`` adds those that only NAME.yaml, in the same folder, has.

    Raises:
        ValueError: if the file or its base cannot be read or is not a mapping, or if the base has a
            base.
    """
    values = _read_mapping(path)
    base = values.pop("base", None)
    folder = path.resolve().parent
    if base is not None and not (base and (folder / f"{base}.yaml").parent == folder):
        raise ValueError(
            f"--config {path}: base: {base!r} is not the name of a config in its folder, without "
            ".yaml"
        )
    if base is not None and not (folder / f"{base}.yaml").is_file():
        raise ValueError(f"--config {path}: its base {base}.yaml is not in {folder}")
    inherited = {} if base is None else _read_mapping(path.with_name(f"{base}.yaml"))
    if "base" in inherited:
        raise ValueError(
            f"--config {path}: its base {base} has a base itself: name a file that has none"
        )
    return inherited | values


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(
            f"--config {path} is not readable as YAML: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(values, dict):
        raise ValueError(
            f"--config {path} holds a {type(values).__name__}: write name: value on each line"
        )
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def preset_file(name: str) -> Path:
    """The packaged file of a preset, such as ``modern``.

    A ``ValueError`` lists them if there is none of that name.
    """
    files = {path.stem: path for path in sorted((CONFIGS / "presets").glob("*.yaml"))}
    if name not in files:
        raise ValueError(f"there is no preset {name!r}: choose one of {', '.join(files)}")
    return files[name]


def take_config(arguments: Sequence[str], *kinds: type) -> tuple[Path | None, list[str]]:
    """The YAML file that ``--config`` names, a path or a packaged file such as ``llama8b``, and the
    other arguments.

    Raises:
        ValueError: if there is no such file; those that :func:`packaged` finds are listed.
    """
    options = [argument.partition("=")[0] for argument in arguments]
    if "--config" not in options:
        return None, list(arguments)
    place = options.index("--config")
    _, equals, name = arguments[place].partition("=")
    rest = list(arguments[place + 1 :])
    if not equals and rest:
        name = rest.pop(0)
    for path in (Path(name), CONFIGS / f"{name}.yaml"):
        if path.is_file():
            return path, [*arguments[:place], *rest]
    raise ValueError(
        f"--config needs a file or a packaged name ({', '.join(packaged(*kinds))}), got {name!r}"
    )
