"""What is not Python but needed after ``pip install`` is declared as package data."""

from __future__ import annotations

import tomllib

from tests.helpers.paths import ROOT


def test_every_file_of_the_package_is_in_the_wheel() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    packed = {
        path
        for package, patterns in declared.items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    files = {
        path
        for path in (ROOT / "rlkv").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert {str(path) for path in files - packed} == set()
    assert {"llama8b.yaml", "tiny.yaml", "gates.safetensors", "py.typed"} <= {
        path.name for path in packed
    }
