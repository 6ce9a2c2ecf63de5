"""YAML files that are based on others."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkv.utils.configs import read_config


def test_a_file_adds_to_its_base_and_overrides_it(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("max-steps: 9\ntau: 0.5\nwandb: online\n")
    second = tmp_path / "second.yaml"
    second.write_text("base: first\nmax_steps: 3\nwandb:\nseed: 1\n")
    assert read_config(second) == {"max_steps": 3, "tau": 0.5, "wandb": None, "seed": 1}


@pytest.mark.parametrize(
    ("first", "named"),
    [(None, "first.yaml"), ("- a\n", "first.yaml.*list"), ("base: second\n", "second.yaml.*first")],
)
def test_a_base_that_does_not_fit_is_named(first: str | None, named: str, tmp_path: Path) -> None:
    (tmp_path / "second.yaml").write_text("base: first\n")
    if first is not None:
        (tmp_path / "first.yaml").write_text(first)
    with pytest.raises(ValueError, match=named):
        read_config(tmp_path / "second.yaml")


@pytest.mark.parametrize("base", ["../first", "''"])
def test_a_base_is_a_name(base: str, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "first.yaml").write_text("seed: 1\n")
    (tmp_path / "own" / "second.yaml").write_text(f"base: {base}\n")
    with pytest.raises(ValueError, match=r"second.yaml: base: "):
        read_config(tmp_path / "own" / "second.yaml")
