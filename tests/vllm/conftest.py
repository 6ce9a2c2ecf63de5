"""What the tests of the plugin share."""

from __future__ import annotations

import pytest

from tests.helpers.engines import Served, make_served


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A random Llama and random gates, in a folder."""
    return make_served(tmp_path_factory.mktemp("models"), "llama")
