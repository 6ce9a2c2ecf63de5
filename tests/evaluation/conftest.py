"""The input files of a study, which no test changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.study_program import write_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))
