"""The registry: names, refusals, and a new policy as one file and one line, taken through the
matrix.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlkv.eviction import POLICIES, RKV, make_policy, register
from tests.helpers.eviction_matrix import OldestKey
from tests.helpers.eviction_reference import REFERENCES
from tests.helpers.paths import ROOT

# the one file; its one line is the decorator (in the package: and the import in
# rlkv/eviction/__init__.py)
NEW_POLICY = '''
from dataclasses import dataclass

from rlkv.eviction import EvictionPolicy, register


@register
@dataclass(frozen=True)
class FirstElement(EvictionPolicy):
    """Keep the keys with the largest first element."""

    def scores(self, keys, queries, valid):
        return keys[..., 0].float().masked_fill(~valid[:, None], 0)
'''
MATRIX = [
    "eviction/test_policies",
    "eviction/test_budgets",
    "cache/test_eviction_matrix",
    "cache/test_evicting_cache",
]


def test_all_policies_are_there_by_name():
    assert (
        set(POLICIES)
        == {"sink_window", "rkv", "rpc", "snapkv", "h2o", "tova", "random"}
        == set(REFERENCES)
    )
    assert all(POLICIES[name].name == name for name in POLICIES)
    assert make_policy("rkv", budget=64, lam=0.2) == RKV(budget=64, lam=0.2)
    with pytest.raises(TypeError):
        POLICIES["mine"] = RKV


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="'rkv'"):
        register(type("Mine", (OldestKey,), {"name": "rkv"}))
    assert POLICIES["rkv"] is RKV


def test_a_new_policy_is_one_file_and_one_line(tmp_path: Path):
    (tmp_path / "first_element.py").write_text(NEW_POLICY)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "first_element",
        "-k",
        "firstelement",
    ]
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, *(f"tests/{name}.py" for name in MATRIX)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 40
